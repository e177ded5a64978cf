"""Affine quantization: ``weight = scale * (code - zero)``. This is the only place that says so.

Every granularity (tensor, channel, group, block) is one reshape to [rows, r, columns, c], where
a block of r x c weights shares a scale. Integer codes and all zeros are uint8; FP8 codes are
float8_e4m3fn, their zeros 0.

Scales are rounded to the dtype they are stored in *before* codes are computed from them;
otherwise the file would hold codes for a grid that nobody can rebuild.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional

from qtool.formats.scheme import FLOAT8_MAX, CodeType, WeightScheme

# AutoRound's bound: below it float16 scales turn subnormal and their reciprocals overflow.
MIN_SCALE = 1e-5

CODE_DTYPES: Mapping[CodeType, torch.dtype] = {"int": torch.uint8, "float": torch.float8_e4m3fn}


def to_blocks(weight: Tensor, scheme: WeightScheme) -> Tensor:
    """A weight [N, K] as its blocks [ceil(N/r), ceil(K/c), r*c], filled up with zeros."""
    shape = weight.shape[0], weight.shape[1]
    rows, columns = scheme.block_shape(shape)
    out_blocks, in_blocks = scheme.grid_shape(shape)
    padding = out_blocks * rows - shape[0], in_blocks * columns - shape[1]
    if any(padding):
        weight = functional.pad(weight, (0, padding[1], 0, padding[0]))
    grid = weight.reshape(out_blocks, rows, in_blocks, columns)
    return grid.transpose(1, 2).reshape(out_blocks, in_blocks, rows * columns)


def from_blocks(blocks: Tensor, scheme: WeightScheme, shape: tuple[int, int]) -> Tensor:
    """Inverse of :func:`to_blocks`."""
    rows, columns = scheme.block_shape(shape)
    out_blocks, in_blocks = scheme.grid_shape(shape)
    grid = blocks.reshape(out_blocks, in_blocks, rows, columns).transpose(1, 2)
    whole = grid.reshape(out_blocks * rows, in_blocks * columns)
    return whole[: shape[0], : shape[1]]


def per_row(grid: Tensor, scheme: WeightScheme, shape: tuple[int, int]) -> Tensor:
    """A scheme's scales or zeros [N/r, K/c] for every row: [N, K/c]."""
    return grid.repeat_interleave(scheme.block_shape(shape)[0], dim=0)[: shape[0]]


def choose_grid(
    weight: Tensor, scheme: WeightScheme, scale_dtype: torch.dtype, factor: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Scales and zeros that span each block's range, or ``factor`` times it.

    Args:
        weight: [N, K], any floating dtype.
        scheme: type, bits, symmetry and block shape.
        scale_dtype: dtype the scales will be stored in; they are rounded to it.
        factor: of both ends of each block's range, [N/r, K/c]; weights beyond are clipped.

    Returns:
        ``scales`` [N/r, K/c] in ``scale_dtype`` and ``zeros`` [N/r, K/c] in uint8. An all-zero
        block has scale 1 and dequantizes to exact zero; no other scale is below
        :data:`MIN_SCALE`. Zero is always in range, so a block of one sign loses nothing.
    """
    blocks = to_blocks(weight, scheme).float()
    high = blocks.amax(-1).clamp(min=0)
    low = blocks.amin(-1).clamp(max=0)
    if factor is not None:
        high, low = high * factor, low * factor
    if scheme.symmetric:
        span, steps = torch.maximum(high, -low), scheme.symmetric_steps
    else:
        span, steps = high - low, float(scheme.max_code)
    scales = (span / steps).clamp(min=MIN_SCALE)
    scales = torch.where(span == 0, torch.ones_like(scales), scales).to(scale_dtype)
    if scheme.symmetric:
        zeros = torch.full_like(scales, scheme.symmetric_zero, dtype=torch.uint8)
    else:
        zeros = (-low / scales.float()).round().clamp(0, scheme.max_code).to(torch.uint8)
    return scales, zeros


def round_codes(steps: Tensor, zeros: Tensor, scheme: WeightScheme) -> Tensor:
    """Codes, as float32 values, of weights in units of their scale; the input may be overwritten.

    FP8 is clamped before the cast: e4m3fn has no infinity, and a cast from beyond 448 gives NaN.
    """
    if scheme.type == "float":
        return steps.clamp_(-FLOAT8_MAX, FLOAT8_MAX).to(torch.float8_e4m3fn).float()
    return steps.round_().add_(zeros).clamp_(0, scheme.max_code)


def quantize(weight: Tensor, scales: Tensor, zeros: Tensor, scheme: WeightScheme) -> Tensor:
    """Codes [N, K] of a weight [N, K] on the given grid, rounded to nearest."""
    steps = to_blocks(weight, scheme).float() / scales.float().unsqueeze(-1)
    codes = round_codes(steps, zeros.float().unsqueeze(-1), scheme).to(CODE_DTYPES[scheme.type])
    return from_blocks(codes, scheme, (weight.shape[0], weight.shape[1])).contiguous()


def dequantize(codes: Tensor, scales: Tensor, zeros: Tensor, scheme: WeightScheme) -> Tensor:
    """Float32 weight [N, K] of codes [N, K]."""
    blocks = to_blocks(codes.float(), scheme)
    weight = scales.float().unsqueeze(-1) * (blocks - zeros.float().unsqueeze(-1))
    return from_blocks(weight, scheme, (codes.shape[0], codes.shape[1]))
