"""``out = x @ weight.T`` for weights of 4 or 8 bits and 16-bit activations.

Contract: x [M, K] in float16 or bfloat16; the weight packed by :mod:`.layout`; sums in float32.
``code - zero`` is exact in the operands' dtype and every group's sum is scaled in float32, so the
result is closer to that of the real weight than a product with a weight rounded to 16 bits.

Weights are the left operand, in registers, and tokens the right one: a tile of 8 tokens costs
no more than one of 1, and Hopper's instruction for groups of warps takes weights from registers.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from qtool.runtime.kernels.triton import layout
from qtool.runtime.kernels.triton.config import GemmShape, Tiles, shape_of
from qtool.runtime.kernels.triton.epilogue import store_tile, sum_splits
from qtool.runtime.kernels.triton.launch import Workspace, is_interpreted
from qtool.runtime.kernels.triton.layout import Codes, PackedWeight
from qtool.runtime.kernels.triton.planes import (
    FP8_FP16_FACTOR,
    unpack_fp8,
    unpack_int4,
    unpack_int8,
)
from qtool.runtime.kernels.triton.rounding import DTYPES
from qtool.runtime.kernels.triton.routing import Routed, block_of, rows_of

ZERO_MASK = tl.constexpr(layout.ZERO_MASK)
TILE_ROWS = tl.constexpr(layout.TILE_ROWS)


@triton.jit(do_not_specialize=["M"])
def weight_gemm_kernel(
    x_ptr: tl.tensor,  # [M, K']
    words_ptr: tl.tensor,  # int16 [N' / 64, steps, 64, STEP / planes]
    scales_ptr: tl.tensor,  # int32 [steps, N'], or [N'] where not grouped
    zeros_ptr: tl.tensor,  # int32 [N'], or None
    token_scales_ptr: tl.tensor,  # float32 [M], or [steps, M] where TOKEN_STEPS; or None
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
    CODES: tl.constexpr,  # "int4", "int8" or "fp8"
    GROUPED: tl.constexpr,
    ZERO: tl.constexpr,  # of all weights; -1: in the scales' low bits, or in zeros
    OPERAND: tl.constexpr,
    FACTOR: tl.constexpr,
    GATED: tl.constexpr,
    TOKEN_STEPS: tl.constexpr,  # whether tokens have a scale a step
    SLOTS: tl.constexpr,  # rows of the result for a row of x
    ASM: tl.constexpr,
) -> None:
    PLANES: tl.constexpr = 4 if CODES == "int4" else 2
    WORDS: tl.constexpr = STEP // PLANES
    tile_m, tile_n, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first, last = steps * split // SPLITS, steps * (split + 1) // SPLITS

    rows = tl.arange(0, BLOCK_N)
    columns = tile_n * BLOCK_N + rows
    num_rows = tl.num_programs(1) * BLOCK_N  # N'
    # Tiles of 64 rows follow each other in steps; a wider block takes several of them.
    blocks = (tile_n * (BLOCK_N // TILE_ROWS) + rows // TILE_ROWS).to(tl.int64)
    if blocks_ptr is not None:
        expert, place, end = block_of(blocks_ptr, tile_m)
        if place >= end:
            return
        # Experts lie one behind the other.
        blocks += expert * (num_rows // TILE_ROWS)
        scales_ptr += expert * num_rows * (steps if GROUPED else 1)
        if zeros_ptr is not None:
            zeros_ptr += expert * num_rows
    slots, live = rows_of(order_ptr, blocks_ptr, tile_m, M, BLOCK_M)
    tokens = slots // SLOTS
    word_rows = (blocks * steps + first) * (TILE_ROWS * WORDS) + (rows % TILE_ROWS) * WORDS
    word_ptrs = words_ptr + word_rows[:, None] + tl.arange(0, WORDS)[None, :]
    x_rows = tokens.to(tl.int64) * (steps * STEP) + first * STEP
    x_ptrs = x_ptr + x_rows[None, :] + tl.arange(0, STEP)[:, None]
    scale_ptrs = scales_ptr + first.to(tl.int64) * num_rows + columns
    if TOKEN_STEPS:
        scale_ptrs = scales_ptr + first.to(tl.int64) * num_rows + tile_n * BLOCK_N
        token_scale_ptrs = token_scales_ptr + first.to(tl.int64) * M + tokens

    zero = tl.full((BLOCK_N,), ZERO, tl.int32)
    if zeros_ptr is not None:
        zero = tl.load(zeros_ptr + columns)

    sums = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for _ in range(first, last):
        words = tl.load(word_ptrs, eviction_policy="evict_first")
        x = tl.load(x_ptrs, mask=live[None, :], other=0.0).to(OPERAND)
        if GROUPED:
            grid = tl.load(scale_ptrs)
            if ZERO < 0:
                zero = grid & ZERO_MASK
                grid &= ~ZERO_MASK
        if CODES == "int4":
            weights = unpack_int4(words, zero, ZERO, OPERAND, ASM)
        elif CODES == "int8":
            weights = unpack_int8(words, zero, ZERO, OPERAND, ASM)
        else:
            weights = unpack_fp8(words, OPERAND, ASM)
        if TOKEN_STEPS:
            # One scale for 128 rows, so for all of a tile.
            token_scale = tl.load(token_scale_ptrs, mask=live, other=0.0)
            token_scale *= grid.to(tl.float32, bitcast=True)
            sums += tl.dot(weights, x) * token_scale[None, :]
            token_scale_ptrs += M
        elif GROUPED:
            sums += tl.dot(weights, x) * grid.to(tl.float32, bitcast=True)[:, None]
        else:
            sums = tl.dot(weights, x, sums)
        word_ptrs += TILE_ROWS * WORDS
        x_ptrs += STEP
        scale_ptrs += num_rows

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
        None if TOKEN_STEPS else token_scales_ptr,
        slot_scales_ptr, bias_ptr, residual_ptr,
        slots // SLOTS, slots, live, N, tile_n, FACTOR, GATED,
    )  # fmt: skip


def weight_gemm(
    x: Tensor,
    weight: PackedWeight,
    out: Tensor,
    tiles: Tiles,
    workspace: Workspace,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    token_scales: Tensor | None = None,
    routed: Routed | None = None,
    asm: bool,
) -> None:
    """``out = x @ weight.T * token_scales + bias + residual``; nothing is allocated or read back.

    Args:
        x: [M, K'] contiguous, float16 or bfloat16; columns beyond the weight's are 0.
        weight: packed for 16-bit products.
        out: [M, N] contiguous, in any floating dtype; [M, N / 2], ``silu(gate) * up``, for a
            weight of these two.
        tiles: of :func:`.config.select_config`.
        workspace: with room for them.
        bias: [N], in the order of the packed rows.
        residual: like ``out``.
        token_scales: float32 [M]; [K' / 128, M] for FP8 in blocks whose tokens are so too.
        routed: each expert's rows of ``out``, of which there are ``slots_per_row`` for a row of
            x; the weight is the first expert's, and the others' lie behind it in memory.
        asm: whether the GPU speaks PTX.

    Raises:
        ValueError: a shape or dtype that breaks this contract.
    """
    slots = 1 if routed is None else routed.slots_per_row
    _check(x, weight, out, slots)
    shape, interpreted = shape_of(weight), is_interpreted()
    dtype = torch.float32 if interpreted and x.dtype == torch.bfloat16 else x.dtype
    token_tiles = -(-x.shape[0] // tiles.block_m) if routed is None else routed.blocks.shape[1]
    grid = (token_tiles, shape.rows // tiles.block_n, tiles.splits)
    token_steps = token_scales is not None and token_scales.ndim == 2
    weight_gemm_kernel[grid](
        x,
        weight.words,
        weight.scales,
        weight.zeros,
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
        **constants(
            shape,
            tiles,
            dtype,
            gated=weight.gate_up,
            token_steps=token_steps,
            slots=slots,
            asm=asm and not interpreted,
        ),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )


def constants(
    shape: GemmShape,
    tiles: Tiles,
    dtype: torch.dtype,
    *,
    gated: bool = False,
    token_steps: bool = False,
    slots: int = 1,
    asm: bool,
) -> dict[str, Any]:
    """The kernel's compile-time parameters."""
    short = shape.codes is Codes.FP8 and dtype == torch.float16
    return {
        "BLOCK_M": tiles.block_m,
        "BLOCK_N": tiles.block_n,
        "STEP": shape.step,
        "SPLITS": tiles.splits,
        "CODES": shape.codes.value,
        "GROUPED": shape.grouped,
        "ZERO": shape.constant_zero,
        "OPERAND": DTYPES[dtype],
        "FACTOR": FP8_FP16_FACTOR if short else 1.0,
        "GATED": gated,
        "TOKEN_STEPS": token_steps,
        "SLOTS": slots,
        "ASM": asm,
    }


def _check(x: Tensor, weight: PackedWeight, out: Tensor, slots: int) -> None:
    if x.dtype not in (torch.float16, torch.bfloat16) or weight.words.dtype != torch.int16:
        raise ValueError(f"x of {x.dtype} with words of {weight.words.dtype}: 16 bits each")
    width = weight.shape[0] // 2 if weight.gate_up else weight.shape[0]
    expected = (x.shape[0], weight.padded[1]), (x.shape[0] * slots, width)
    if (tuple(x.shape), tuple(out.shape)) != expected:
        raise ValueError(f"x {tuple(x.shape)}, out {tuple(out.shape)}: expected {expected}")
    if not (x.is_contiguous() and out.is_contiguous()):
        raise ValueError("x and out must be contiguous")
