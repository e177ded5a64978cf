"""qtool: one tool from checkpoint to endpoint. Quantize an LLM, prove what it cost, serve it.

    from qtool import LLM, SamplingParams

Importing this package imports nothing else; the two names load their modules when first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from qtool.runtime.llm import LLM
    from qtool.runtime.sampling_params import SamplingParams

__all__ = ["LLM", "SamplingParams", "__version__"]

__version__ = "0.1.0"

_LAZY = {"LLM": "qtool.runtime.llm", "SamplingParams": "qtool.runtime.sampling_params"}


def __getattr__(name: str) -> object:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)
