"""Keys and values to codes and grids inside kernels, as :mod:`qtool.runtime.kv_codes` has them.

Bit for bit: a grid is rounded to float16 before codes are computed, and every division is exact.
Tiles are tuples of *planes*, float32 [R, WIDTH], whose codes share words: see :mod:`.kv_pages`.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from qtool.runtime.kernels.triton.rounding import e4m3_bits, int8_code

HALF_MAX = tl.constexpr(65504.0)
HALF_TINY = tl.constexpr(2.0**-24)
_ROUNDER = tl.constexpr(12582912.0)  # see rounding.py


@triton.jit
def rounded(x: tl.tensor, DTYPE: tl.constexpr) -> tl.tensor:
    """float32 rounded to a 16-bit dtype, ties to even; the interpreter would cut bfloat16 off."""
    if DTYPE == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        y = bits.to(tl.float32, bitcast=True)
    else:
        y = x.to(DTYPE).to(tl.float32)
    return y


@triton.jit
def half_scale(scale: tl.tensor) -> tl.tensor:
    """A scale as float16 has it, never 0."""
    return tl.clamp(scale, HALF_TINY, HALF_MAX).to(tl.float16)


@triton.jit
def head_scale(planes: tl.tuple, PLANES: tl.constexpr, LARGEST: tl.constexpr) -> tl.tensor:
    """float16 [R]: takes the largest of a row's elements to the largest code."""
    peak = tl.max(tl.abs(planes[0]), 1)
    for j in tl.static_range(1, PLANES):
        peak = tl.maximum(peak, tl.max(tl.abs(planes[j]), 1))
    return half_scale(tl.div_rn(peak, LARGEST))


@triton.jit
def byte_words(planes: tl.tuple, scale: tl.tensor, IS_FLOAT: tl.constexpr) -> tl.tensor:
    """Two planes over a float32 scale [R, 1], as words int32 [R, WIDTH]."""
    x0, x1 = tl.div_rn(planes[0], scale), tl.div_rn(planes[1], scale)
    if IS_FLOAT:
        # In the places where float16 wants them: docs/layouts.md draws the word.
        b0, b1 = e4m3_bits(x0), e4m3_bits(x1)
        signs = ((b1 & 0x80) << 8) | ((b0 & 0x80) << 7)
        words = signs | ((b1 & 0x7F) << 7) | (b0 & 0x7F)
    else:
        c0 = int8_code(tl.maximum(x0, -127.0)).to(tl.int32) + 128
        words = c0 | ((int8_code(tl.maximum(x1, -127.0)).to(tl.int32) + 128) << 8)
    return words


@triton.jit
def span_grid(lowest: tl.tensor, highest: tl.tensor) -> Any:
    """float16 (scale, minimum) of 16 steps from the lowest to the highest."""
    low = tl.clamp(lowest, -HALF_MAX, HALF_MAX).to(tl.float16)
    return half_scale(tl.div_rn(highest - low.to(tl.float32), 15.0)), low


@triton.jit
def nibbles(x: tl.tensor, scale: tl.tensor, low: tl.tensor) -> tl.tensor:
    """The nearest of 16 steps, int32; scale and low are float16 and broadcast to x."""
    size = tl.broadcast_to(scale.to(tl.float32), x.shape)
    steps = tl.div_rn(x - low.to(tl.float32), size)
    return ((tl.clamp(steps, 0.0, 15.0) + _ROUNDER) - _ROUNDER).to(tl.int32)


@triton.jit
def group_words(
    planes: tl.tuple, grid_ptrs: tl.tensor, live: tl.tensor, inside: tl.tensor,
    GROUPS: tl.constexpr, PAGE: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Four planes as words int32 [R, WIDTH]; scales and minima of rows and groups are stored.

    Args:
        grid_ptrs: [R], a row's scale in the first group of float16 [GROUPS, 2, PAGE].
        live: [R], rows whose grids are stored.
        inside: [1, WIDTH], what of a plane is channels.
    """
    words = tl.zeros(planes[0].shape, tl.int32)
    for group in tl.static_range(GROUPS):
        lowest = tl.full((planes[0].shape[0],), float("inf"), tl.float32)
        highest = tl.full((planes[0].shape[0],), float("-inf"), tl.float32)
        for j in tl.static_range(group * (4 // GROUPS), (group + 1) * (4 // GROUPS)):
            lowest = tl.minimum(lowest, tl.min(tl.where(inside, planes[j], float("inf")), 1))
            highest = tl.maximum(highest, tl.max(tl.where(inside, planes[j], float("-inf")), 1))
        scale, low = span_grid(lowest, highest)
        tl.store(grid_ptrs + group * (2 * PAGE), scale, mask=live)
        tl.store(grid_ptrs + group * (2 * PAGE) + PAGE, low, mask=live)
        for j in tl.static_range(group * (4 // GROUPS), (group + 1) * (4 // GROUPS)):
            words |= nibbles(planes[j], scale[:, None], low[:, None]) << (4 * j)
    return words
