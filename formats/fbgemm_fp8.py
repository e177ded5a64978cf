"""FBGEMM's FP8 format, read only: a scale a row, inputs by token with an upper bound.

weight         float8_e4m3fn  [N, K]
weight_scale   float32        [N, 1]
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from qtool.formats.fp8 import is_float8
from qtool.formats.linears import StoredLinears, plain_codes
from qtool.formats.reader import TensorEntry
from qtool.formats.scheme import ActivationScheme, WeightScheme
from qtool.formats.tensor import QuantizedTensor

QUANT_METHOD = "fbgemm_fp8"


class FbgemmLinears(StoredLinears):
    """A linear with FP8 codes or their scale is quantized."""

    names = ("weight", "weight_scale")
    marks = ("weight_scale",)

    def __init__(self, block: Mapping[str, Any], entries: Mapping[str, TensorEntry]) -> None:
        super().__init__(entries)
        bound = block.get("activation_scale_ub")
        inputs = ActivationScheme("float", "token", None if bound is None else float(bound))
        self._scheme = WeightScheme(8, True, "channel", None, "float", inputs)

    def is_quantized(self, module: str) -> bool:
        return super().is_quantized(module) or is_float8(f"{module}.weight", self._entries)

    def unpack(self, module: str, tensors: Mapping[str, Tensor]) -> QuantizedTensor:
        return plain_codes(tensors, self._scheme)


def open_linears(block: Mapping[str, Any], entries: Mapping[str, TensorEntry]) -> StoredLinears:
    """The quantized linears of a checkpoint; see :class:`~qtool.formats.linears.ReadableFormat`."""
    return FbgemmLinears(block, entries)
