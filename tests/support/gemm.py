"""Quantized weights, poisoned buffers and float64 products for tests of GEMM kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from qtool.formats.scheme import WeightScheme
from qtool.formats.tensor import QuantizedTensor
from qtool.quantize.rtn import quantize_rtn


def make_weight(
    scheme: WeightScheme,
    rows: int,
    columns: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    input_scale: float | None = None,
) -> QuantizedTensor:
    """A seeded random weight, rounded to nearest."""
    generator = torch.Generator().manual_seed(rows * columns)
    inputs = None if input_scale is None else torch.tensor([input_scale])
    weight = torch.randn(rows, columns, generator=generator)
    return quantize_rtn(weight, scheme, dtype, None, inputs)


def make_input(tokens: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Seeded random activations [tokens, columns]."""
    generator = torch.Generator().manual_seed(tokens)
    return torch.randn(tokens, columns, generator=generator).to(dtype)


def fenced(values: Tensor) -> Tensor:
    """The same values within NaN: a contiguous view that has poison before and behind it."""
    pad = 64
    fence = torch.full((values.numel() + 2 * pad,), torch.nan, dtype=values.dtype)
    fence[pad : pad + values.numel()] = values.flatten()
    return fence[pad : pad + values.numel()].view(values.shape)


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Frobenius norm of the difference over that of the expected."""
    return float((found.double() - expected).norm() / expected.norm())
