"""``out = x @ weight.T`` where both have 8 bits: INT8, or e4m3 on GPUs that multiply it (sm_89).

Contract: codes of the tokens [M, K'] with a float32 scale a token, or a token and 128 columns;
the weight packed by :mod:`.layout` as bytes. Products of integers are summed exactly. Products of
e4m3 are summed by the GPU; Hopper keeps about 14 bits of them, so after a step a partial sum
moves to float32: by its scale where there are blocks, by ``PROMOTE`` elsewhere.

Weights are the left operand here too: with fewer than 64 tokens as the left one, Hopper would
have e4m3 converted to float16 first.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from qtool.runtime.kernels.triton import layout
from qtool.runtime.kernels.triton.config import GemmShape, Tiles, shape_of
from qtool.runtime.kernels.triton.epilogue import store_tile, sum_splits
from qtool.runtime.kernels.triton.launch import Workspace, is_interpreted
from qtool.runtime.kernels.triton.layout import Codes, PackedWeight
from qtool.runtime.kernels.triton.routing import Routed, block_of, rows_of

TILE_ROWS = tl.constexpr(layout.TILE_ROWS)

# Passes four bytes on. Where both operands come straight from shared memory, Triton 3.9 fetches
# the first columns of the next step ahead, byte by byte on GPUs before Hopper: twice the
# instructions. It sees through operations of one operand, so this one has two.
SAME = "mov.b32 $0, $1;"
_SAME = tl.constexpr(SAME)


@triton.jit(do_not_specialize=["M"])
def byte_gemm_kernel(
    x_ptr: tl.tensor,  # int8 or e4m3 [M, K']
    words_ptr: tl.tensor,  # int8 or e4m3 [N' / 64, steps, 64, STEP]
    scales_ptr: tl.tensor,  # int32 [steps, N'], or [N'] where not grouped
    token_scales_ptr: tl.tensor,  # float32 [steps, M] where grouped, else [M]
    slot_scales_ptr: tl.tensor,  # float32 [M'], or None
    bias_ptr: tl.tensor,  # [N], or None
    residual_ptr: tl.tensor,  # [M', N], or None
    out_ptr: tl.tensor,  # [M', N]
    order_ptr: tl.tensor,  # int32 [M']: rows of the result by expert; or None, M' is M
    blocks_ptr: tl.tensor,  # int32 [3, tiles of tokens] of :mod:`.routing`, or None
    partials_ptr: tl.tensor,  # float32 [tiles, SPLITS, BLOCK_N, BLOCK_M]
    locks_ptr: tl.tensor,  # int32 [tiles]
    M: tl.tensor,
    N: tl.tensor,
    steps: tl.tensor,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STEP: tl.constexpr,
    SPLITS: tl.constexpr,
    GROUPED: tl.constexpr,
    SUM: tl.constexpr,  # dtype of the products' sums: int32 or float32
    PROMOTE: tl.constexpr,  # columns after which e4m3 sums move to float32; None: never
    GATED: tl.constexpr,
    SLOTS: tl.constexpr,  # rows of the result for a row of x
    ASM: tl.constexpr,  # on GPUs before Hopper
) -> None:
    tile_m, tile_n, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first, last = steps * split // SPLITS, steps * (split + 1) // SPLITS

    rows = tl.arange(0, BLOCK_N)
    num_rows = tl.num_programs(1) * BLOCK_N  # N'
    blocks = (tile_n * (BLOCK_N // TILE_ROWS) + rows // TILE_ROWS).to(tl.int64)
    if blocks_ptr is not None:
        expert, place, end = block_of(blocks_ptr, tile_m)
        if place >= end:
            return
        # Experts lie one behind the other.
        blocks += expert * (num_rows // TILE_ROWS)
        scales_ptr += expert * num_rows * (steps if GROUPED else 1)
    slots, live = rows_of(order_ptr, blocks_ptr, tile_m, M, BLOCK_M)
    tokens = slots // SLOTS
    word_rows = (blocks * steps + first) * (TILE_ROWS * STEP) + (rows % TILE_ROWS) * STEP
    word_ptrs = words_ptr + word_rows[:, None] + tl.arange(0, STEP)[None, :]
    x_rows = tokens.to(tl.int64) * (steps * STEP) + first * STEP
    x_ptrs = x_ptr + x_rows[None, :] + tl.arange(0, STEP)[:, None]
    scale_ptr = scales_ptr + first.to(tl.int64) * num_rows + tile_n * BLOCK_N
    token_scale_ptrs = token_scales_ptr + first.to(tl.int64) * M + tokens

    sums = tl.zeros((BLOCK_N, BLOCK_M), tl.float32 if GROUPED else SUM)
    for _ in range(first, last):
        weights = tl.load(word_ptrs, eviction_policy="evict_first")
        x = tl.load(x_ptrs, mask=live[None, :], other=0.0)
        if ASM:
            weights = tl.inline_asm_elementwise(
                _SAME, "=r,r,r", [weights, weights], dtype=weights.dtype, is_pure=True, pack=4
            )
        if GROUPED:
            # One scale for 128 rows, so for all of a tile.
            scale = tl.load(scale_ptr).to(tl.float32, bitcast=True)
            token_scale = tl.load(token_scale_ptrs, mask=live, other=0.0)
            products = tl.dot(weights, x, out_dtype=SUM).to(tl.float32)
            sums += products * (scale * token_scale)[None, :]
        else:
            sums = tl.dot(weights, x, sums, max_num_imprecise_acc=PROMOTE, out_dtype=SUM)
        word_ptrs += TILE_ROWS * STEP
        x_ptrs += STEP
        scale_ptr += num_rows
        token_scale_ptrs += M

    sums = sums.to(tl.float32)
    stored = M
    if SPLITS > 1:
        tile = tile_n * tl.num_programs(0) + tile_m
        sums, is_last = sum_splits(sums, partials_ptr, locks_ptr, tile, split, SPLITS)
        stored = tl.where(is_last, M, 0)
    slots, live = rows_of(order_ptr, blocks_ptr, tile_m, stored, BLOCK_M)
    store_tile(
        sums,
        out_ptr,
        None if GROUPED else scales_ptr,
        None if GROUPED else token_scales_ptr,
        slot_scales_ptr, bias_ptr, residual_ptr,
        slots // SLOTS, slots, live, N, tile_n, 1.0, GATED,
    )  # fmt: skip


def byte_gemm(
    x: Tensor,
    token_scales: Tensor,
    weight: PackedWeight,
    out: Tensor,
    tiles: Tiles,
    workspace: Workspace,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    routed: Routed | None = None,
    asm: bool,
) -> None:
    """``out = (x * token_scales) @ weight.T + bias + residual``; nothing is allocated or read back.

    Args:
        x: codes [M, K'] contiguous, of the words' dtype; columns beyond the weight's are 0.
        token_scales: float32 [M]; [K' / 128, M] for a weight in blocks.
        weight: packed as bytes.
        out, tiles, workspace, bias, residual, routed: as :func:`.weight_gemm.weight_gemm` has
            them.
        asm: whether the GPU speaks PTX and comes before Hopper.

    Raises:
        ValueError: a shape or dtype that breaks this contract.
    """
    shape, interpreted = shape_of(weight), is_interpreted()
    slots = 1 if routed is None else routed.slots_per_row
    _check(x, token_scales, weight, out, slots)
    token_tiles = -(-x.shape[0] // tiles.block_m) if routed is None else routed.blocks.shape[1]
    grid = (token_tiles, shape.rows // tiles.block_n, tiles.splits)
    byte_gemm_kernel[grid](
        x,
        weight.words,
        weight.scales,
        token_scales,
        None if routed is None else routed.scales,
        bias,
        residual,
        out,
        None if routed is None else routed.order,
        None if routed is None else routed.blocks,
        workspace.partials,
        workspace.locks,
        x.shape[0],
        weight.shape[0],
        shape.steps,
        **constants(shape, tiles, gated=weight.gate_up, slots=slots, asm=asm and not interpreted),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )


def constants(
    shape: GemmShape, tiles: Tiles, *, gated: bool = False, slots: int = 1, asm: bool
) -> dict[str, Any]:
    """The kernel's compile-time parameters."""
    is_float = shape.codes is Codes.FP8_BYTES
    return {
        "BLOCK_M": tiles.block_m,
        "BLOCK_N": tiles.block_n,
        "STEP": shape.step,
        "SPLITS": tiles.splits,
        "GROUPED": shape.grouped,
        "SUM": tl.float32 if is_float else tl.int32,
        "PROMOTE": shape.step if is_float else None,
        "GATED": gated,
        "SLOTS": slots,
        "ASM": asm,
    }


def _check(x: Tensor, token_scales: Tensor, weight: PackedWeight, out: Tensor, slots: int) -> None:
    if x.dtype != weight.words.dtype or weight.codes.planes != 1:
        raise ValueError(f"x of {x.dtype} with words of {weight.words.dtype}: the same bytes")
    if weight.grouped and weight.gate_up:
        raise ValueError("blocks in the order of a gate: a tile's rows must share their scale")
    tokens, columns = x.shape[0], weight.padded[1]
    width = weight.shape[0] // 2 if weight.gate_up else weight.shape[0]
    scales = (columns // weight.step, tokens) if weight.grouped else (tokens,)
    found = tuple(x.shape), tuple(token_scales.shape), tuple(out.shape)
    if found != ((tokens, columns), scales, (tokens * slots, width)):
        raise ValueError(
            f"x, token scales, out of shapes {found}: expected {(tokens, columns)}, {scales} and "
            f"{(tokens * slots, width)}"
        )
    if not (x.is_contiguous() and token_scales.is_contiguous() and out.is_contiguous()):
        raise ValueError("x, token scales and out must be contiguous")
