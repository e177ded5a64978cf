"""NVIDIA ModelOpt's FP8 format, read only: one static scale for a weight, one for its input.

    weight         float8_e4m3fn  [N, K]
    weight_scale   float32        one value
    input_scale    float32        one value

Older exports say so in ``hf_quant_config.json`` instead of ``config.json``. Scales of the cache
lie beside the projections (:mod:`~qtool.formats.kv_scales`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from qtool.errors import CheckpointError
from qtool.formats.fp8 import is_float8
from qtool.formats.linears import StoredLinears, plain_codes
from qtool.formats.reader import TensorEntry
from qtool.formats.scheme import fp8_scheme
from qtool.formats.tensor import QuantizedTensor

QUANT_METHOD = "modelopt"
ALGORITHM = "FP8"


class ModelOptLinears(StoredLinears):
    """A linear with FP8 codes or their scale is quantized."""

    names = ("weight", "weight_scale", "input_scale")
    marks = ("weight_scale",)

    def __init__(self, block: Mapping[str, Any], entries: Mapping[str, TensorEntry]) -> None:
        super().__init__(entries)
        # The content of hf_quant_config.json may be nested as it is there.
        algorithm = block.get("quantization", block).get("quant_algo")
        if algorithm != ALGORITHM:
            raise CheckpointError(
                f"ModelOpt with quant_algo {algorithm!r}: this version reads {ALGORITHM}; quantize "
                "the original model with qtool"
            )
        self._scheme = fp8_scheme("tensor")

    def is_quantized(self, module: str) -> bool:
        return super().is_quantized(module) or is_float8(f"{module}.weight", self._entries)

    def unpack(self, module: str, tensors: Mapping[str, Tensor]) -> QuantizedTensor:
        return plain_codes(tensors, self._scheme)


def open_linears(block: Mapping[str, Any], entries: Mapping[str, TensorEntry]) -> StoredLinears:
    """The quantized linears of a checkpoint; see :class:`~qtool.formats.linears.ReadableFormat`."""
    return ModelOptLinears(block, entries)
