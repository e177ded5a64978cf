"""Affine quantization: ``weight = scale * (code - zero)``. This is the only place that says so.

Every granularity (tensor, channel, group) is one reshape to [rows, r, columns, c], where a
block of r x c weights shares a scale. Codes and zeros are unsigned integers in uint8.

Scales are rounded to the dtype they are stored in *before* codes are computed from them;
otherwise the file would hold codes for a grid that nobody can rebuild.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qtool.formats.scheme import WeightScheme

# AutoRound's bound: below it float16 scales turn subnormal and their reciprocals overflow.
MIN_SCALE = 1e-5


def to_blocks(weight: Tensor, scheme: WeightScheme) -> Tensor:
    """View a weight [N, K] as its blocks [N/r, K/c, r*c]."""
    rows, columns = scheme.block_shape((weight.shape[0], weight.shape[1]))
    out_blocks, in_blocks = weight.shape[0] // rows, weight.shape[1] // columns
    grid = weight.reshape(out_blocks, rows, in_blocks, columns)
    return grid.transpose(1, 2).reshape(out_blocks, in_blocks, rows * columns)


def from_blocks(blocks: Tensor, scheme: WeightScheme, shape: tuple[int, int]) -> Tensor:
    """Inverse of :func:`to_blocks`."""
    rows, columns = scheme.block_shape(shape)
    grid = blocks.reshape(shape[0] // rows, shape[1] // columns, rows, columns)
    return grid.transpose(1, 2).reshape(shape)


def choose_grid(
    weight: Tensor, scheme: WeightScheme, scale_dtype: torch.dtype, clip: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Scales and zeros that span each block's range.

    Args:
        weight: [N, K], any floating dtype.
        scheme: bits, symmetry and block shape.
        scale_dtype: dtype the scales will be stored in; they are rounded to it.
        clip: optional shrink factor in (0, 1] per block, [N/r, K/c], applied to both ends.

    Returns:
        ``scales`` [N/r, K/c] in ``scale_dtype`` and ``zeros`` [N/r, K/c] in uint8. An all-zero
        block has scale 1 and dequantizes to exact zero; no other scale is below
        :data:`MIN_SCALE`. Zero is always in range, so a block of one sign loses nothing.
    """
    blocks = to_blocks(weight, scheme).float()
    high = blocks.amax(-1).clamp(min=0)
    low = blocks.amin(-1).clamp(max=0)
    if clip is not None:
        high, low = high * clip, low * clip
    if scheme.symmetric:
        # The negative end has one code more, so the range is divided by half the levels minus
        # one half: the largest weight is at most half a step outside.
        span, steps = torch.maximum(high, -low), (scheme.levels - 1) / 2
    else:
        span, steps = high - low, float(scheme.max_code)
    scales = (span / steps).clamp(min=MIN_SCALE)
    scales = torch.where(span == 0, torch.ones_like(scales), scales).to(scale_dtype)
    if scheme.symmetric:
        zeros = torch.full_like(scales, scheme.symmetric_zero, dtype=torch.uint8)
    else:
        zeros = (-low / scales.float()).round().clamp(0, scheme.max_code).to(torch.uint8)
    return scales, zeros


def quantize(weight: Tensor, scales: Tensor, zeros: Tensor, scheme: WeightScheme) -> Tensor:
    """Codes [N, K] in uint8 of a weight [N, K] on the given grid, rounded to nearest."""
    blocks = to_blocks(weight, scheme).float()
    codes = (blocks / scales.float().unsqueeze(-1)).round() + zeros.unsqueeze(-1)
    shape = (weight.shape[0], weight.shape[1])
    return from_blocks(codes.clamp(0, scheme.max_code).to(torch.uint8), scheme, shape)


def dequantize(codes: Tensor, scales: Tensor, zeros: Tensor, scheme: WeightScheme) -> Tensor:
    """Float32 weight [N, K] of codes [N, K]."""
    blocks = to_blocks(codes, scheme).float()
    weight = scales.float().unsqueeze(-1) * (blocks - zeros.float().unsqueeze(-1))
    return from_blocks(weight, scheme, (codes.shape[0], codes.shape[1]))
