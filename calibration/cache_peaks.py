"""The largest keys and values that a block hands to the cache.

Static scales come from them, and factors that make the channels of keys alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from qtool.calibration.decoder_block import BATCH_TOKENS, DecoderBlock
from qtool.errors import CalibrationError

# Transformers' argument for the cache, in this version and in older ones.
_ARGUMENTS = ("cache", "past_key_values")


@dataclass(frozen=True, slots=True)
class CachePeaks:
    """Largest keys, after rotation, and values of a block's attention on all tokens.

    Attributes:
        keys: largest \\|key\\| of each head's channels, [num_kv_heads][head_dim].
        value: largest \\|value\\| of all.

    Raises:
        CalibrationError: one is not finite.
    """

    prefix: str
    keys: tuple[tuple[float, ...], ...]
    value: float

    def __post_init__(self) -> None:
        channels = (peak for head in self.keys for peak in head)
        for name, peaks in (("key", channels), ("value", (self.value,))):
            if wrong := [peak for peak in peaks if not math.isfinite(peak)]:
                raise CalibrationError(
                    f"a {name} of {self.prefix} is {wrong[0]} on calibration text; the model "
                    "overflows on this text, or its weights are damaged"
                )

    @property
    def key(self) -> float:
        """Largest \\|key\\| of all."""
        return max(max(head) for head in self.keys)


class _Stored(Exception):
    """Ends a pass: keys and values have been seen, and nobody looks at the rest."""


class _Watcher:
    """Stands in for the cache, and remembers what it is given."""

    def __init__(self) -> None:
        self.keys, self.value = torch.zeros(1, 1), torch.zeros(())

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> NoReturn:
        """Take keys and values [batch, num_kv_heads, seq_len, head_dim]."""
        # maximum, and not a comparison: it hands NaN on.
        self.keys = torch.maximum(self.keys, keys.abs().amax((0, 2)).float().cpu())
        self.value = torch.maximum(self.value, values.abs().amax().float().cpu())
        raise _Stored


def cache_peaks(block: DecoderBlock) -> CachePeaks:
    """Run the block, with its present weights, as far as its cache, on all samples.

    Raises:
        CalibrationError: a key or a value is not finite.
    """
    watcher = _Watcher()
    (argument,) = (name for name in _ARGUMENTS if name in block.arguments)
    arguments = {**block.arguments, argument: watcher}
    with _own_forwards(block.module):
        for batch in block.inputs.split(max(1, BATCH_TOKENS // block.inputs.shape[1])):
            with suppress(_Stored):
                block.module(batch.to(block.device), **arguments)
    keys = tuple(tuple(head) for head in watcher.keys.tolist())
    return CachePeaks(block.prefix, keys, float(watcher.value))


@contextmanager
def _own_forwards(module: nn.Module) -> Iterator[None]:
    """Let submodules compute by themselves, also where something stands in for them."""
    stand_ins = {m: vars(m).pop("forward") for m in module.modules() if "forward" in vars(m)}
    try:
        yield
    finally:
        for submodule, forward in stand_ins.items():
            submodule.forward = forward
