"""A packed weight to 16 bits, for products so long that the vendor's GEMM is faster.

Contract: :func:`.layout.unpack`'s weight, computed in float32, then cast; [N, K] contiguous.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from qtool.runtime.kernels.triton import layout
from qtool.runtime.kernels.triton.config import GemmShape, shape_of
from qtool.runtime.kernels.triton.launch import is_interpreted
from qtool.runtime.kernels.triton.layout import PackedWeight
from qtool.runtime.kernels.triton.planes import unpack_fp8, unpack_int4, unpack_int8

ZERO_MASK = tl.constexpr(layout.ZERO_MASK)
TILE_ROWS = tl.constexpr(layout.TILE_ROWS)


@triton.jit
def dequantize_kernel(
    words_ptr: tl.tensor,  # int16 [N' / 64, steps, 64, STEP / planes]
    scales_ptr: tl.tensor,  # int32 [steps, N'], or [N'] where not grouped
    zeros_ptr: tl.tensor,  # int32 [N'], or None
    out_ptr: tl.tensor,  # [N, K]
    N: tl.tensor,
    K: tl.tensor,
    STEP: tl.constexpr,
    CODES: tl.constexpr,
    GROUPED: tl.constexpr,
    ZERO: tl.constexpr,
) -> None:
    WORDS: tl.constexpr = STEP // (4 if CODES == "int4" else 2)
    tile, step = tl.program_id(0).to(tl.int64), tl.program_id(1)
    rows = tl.arange(0, TILE_ROWS)
    places = rows[:, None] * WORDS + tl.arange(0, WORDS)[None, :]
    first = (tile * tl.num_programs(1) + step) * (TILE_ROWS * WORDS)
    words = tl.load(words_ptr + first + places)
    columns = tile * TILE_ROWS + rows
    scale_ptrs = scales_ptr + columns
    if GROUPED:
        scale_ptrs += step.to(tl.int64) * tl.num_programs(0) * TILE_ROWS
    grid = tl.load(scale_ptrs)
    zero = tl.full((TILE_ROWS,), ZERO, tl.int32)
    if zeros_ptr is not None:
        zero = tl.load(zeros_ptr + columns)
    elif ZERO < 0:
        zero = grid & ZERO_MASK
        grid &= ~ZERO_MASK
    if CODES == "int4":
        weights = unpack_int4(words, zero, ZERO, tl.float32, False)
    elif CODES == "int8":
        weights = unpack_int8(words, zero, ZERO, tl.float32, False)
    else:
        weights = unpack_fp8(words, tl.float32, False)
    weights *= grid.to(tl.float32, bitcast=True)[:, None]
    k = step * STEP + tl.arange(0, STEP)
    inside = (columns < N)[:, None] & (k < K)[None, :]
    out_ptrs = out_ptr + columns[:, None] * K + k[None, :]
    tl.store(out_ptrs, weights.to(out_ptr.dtype.element_ty), mask=inside)


def dequantize(weight: PackedWeight, dtype: torch.dtype) -> Tensor:
    """The weight [N, K]."""
    shape = shape_of(weight)
    # The interpreter cuts bits off where it should round to bfloat16.
    wide = torch.float32 if is_interpreted() else dtype
    out = torch.empty(weight.shape, dtype=wide, device=weight.words.device)
    dequantize_kernel[(shape.rows // layout.TILE_ROWS, shape.steps)](
        weight.words,
        weight.scales,
        weight.zeros,
        out,
        *weight.shape,
        **constants(shape),
        num_warps=4,
    )
    return out.to(dtype)


def constants(shape: GemmShape) -> dict[str, Any]:
    """The kernel's compile-time parameters."""
    return {
        "STEP": shape.step,
        "CODES": shape.codes.value,
        "GROUPED": shape.grouped,
        "ZERO": shape.constant_zero,
    }
