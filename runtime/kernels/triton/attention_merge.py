"""What becomes of a tile's sums: stored, or met with those of other splits of its context first.

A program that has seen part of a context leaves sums, totals and highest scores in a workspace.
The last of a tile to arrive merges all of them in their order, so that bits do not depend on who
that was, and sets the lock back, so that a captured graph can be launched again.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl


@triton.jit
def store_rows(
    sums: tl.tuple,  # a tuple of planes, float32 [BLOCK_M, WIDTH]
    total: tl.tensor,  # float32 [BLOCK_M]
    out_ptrs: tl.tensor,  # [BLOCK_M], a row's first channel
    live: tl.tensor,  # [BLOCK_M]
    factor: tl.tensor,
    PLANES: tl.constexpr,
    D: tl.constexpr,
) -> None:
    """``out = sums / total * factor``."""
    columns = tl.arange(0, sums[0].shape[1])
    inside = live[:, None] & (columns < D // PLANES)[None, :]
    share = factor / total
    for j in tl.static_range(PLANES):
        out = sums[j] * share[:, None]
        ptrs = out_ptrs[:, None] + (j * (D // PLANES) + columns)[None, :]
        tl.store(ptrs, out.to(out_ptrs.dtype.element_ty), mask=inside)


@triton.jit
def leave_part(
    sums: tl.tuple,
    highest: tl.tensor,  # float32 [BLOCK_M], in powers of two
    total: tl.tensor,
    part_ptr: tl.tensor,  # float32 [PLANES, BLOCK_M, WIDTH], then highest, then total
    PLANES: tl.constexpr,
) -> None:
    """Store what a split has seen."""
    BLOCK_M: tl.constexpr = sums[0].shape[0]
    WIDTH: tl.constexpr = sums[0].shape[1]
    rows = tl.arange(0, BLOCK_M)
    within = rows[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    for j in tl.static_range(PLANES):
        tl.store(part_ptr + j * (BLOCK_M * WIDTH) + within, sums[j])
    tl.store(part_ptr + PLANES * BLOCK_M * WIDTH + rows, highest)
    tl.store(part_ptr + PLANES * BLOCK_M * WIDTH + BLOCK_M + rows, total)


@triton.jit
def merge_parts(
    first_ptr: tl.tensor,  # the part of split 0
    stride: tl.tensor,  # from a split to the next
    splits: tl.tensor,
    PLANES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    WIDTH: tl.constexpr,
) -> Any:
    """(sums, total) over all splits, in their order.

    A split in which a row saw nothing has the finite highest score of nothing: its weight is 0.
    """
    rows = tl.arange(0, BLOCK_M)
    within = rows[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    highest_ptr = first_ptr + PLANES * BLOCK_M * WIDTH + rows
    # Past the first-level cache, which may hold what others have overwritten.
    highest = tl.load(highest_ptr, cache_modifier=".cg")
    for i in tl.range(1, splits, num_stages=1):
        highest = tl.maximum(highest, tl.load(highest_ptr + i * stride, cache_modifier=".cg"))
    total = tl.zeros((BLOCK_M,), tl.float32)
    sums = (tl.zeros((BLOCK_M, WIDTH), tl.float32),) * PLANES
    for i in tl.range(0, splits, num_stages=1):
        part_ptr = first_ptr + i * stride
        own = tl.load(highest_ptr + i * stride, cache_modifier=".cg")
        weight = tl.exp2(own - highest)
        total += tl.load(highest_ptr + i * stride + BLOCK_M, cache_modifier=".cg") * weight
        merged: tl.tuple = ()
        for j in tl.static_range(PLANES):
            part = tl.load(part_ptr + j * (BLOCK_M * WIDTH) + within, cache_modifier=".cg")
            merged = merged + (sums[j] + part * weight[:, None],)
        sums = merged
    return sums, total
