"""Tokens to experts and back: what stands before and behind the products of a mixture.

A token and one of its experts are a *slot*, number ``token * top_k + i``. Contract: slots sorted
by expert, those of one expert in their order, in blocks of at most ``block_m`` slots of one
expert; how many blocks there may be follows from shapes alone, so grids are static and nothing
is read back. Behind the products a token's slots are added up in their order, in float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

# Values compared at once while slots are counted: 64 a thread.
COMPARED = 8192
WIDTH = 1024


@dataclass(frozen=True, slots=True)
class Routed:
    """Which rows of a product each expert computes.

    Attributes:
        order: int32 [S]: slots, which are rows of the result, by expert.
        blocks: int32 [3, B]: a block's expert, and the places in ``order`` of its first slot and
            behind its expert's last one. Blocks that are not needed begin there or later.
        slots_per_row: rows of the result for a row of the input.
        scales: float32 [S]: what rows of the result are multiplied by; or ``None``.
    """

    order: Tensor
    blocks: Tensor
    slots_per_row: int = 1
    scales: Tensor | None = None


@triton.jit
def block_of(blocks_ptr: tl.tensor, block: tl.tensor) -> tl.tensor:
    """(expert, int64; first place; place behind its expert's last) of a block."""
    count = tl.num_programs(0)
    expert = tl.load(blocks_ptr + block).to(tl.int64)
    return expert, tl.load(blocks_ptr + count + block), tl.load(blocks_ptr + 2 * count + block)


@triton.jit
def rows_of(
    order_ptr: tl.tensor,
    blocks_ptr: tl.tensor,
    block: tl.tensor,
    M: tl.tensor,
    BLOCK_M: tl.constexpr,
) -> tl.tensor:
    """(rows of the result that a tile has, which of them there are), both [BLOCK_M].

    Those of a block; without blocks the tile's of M. None if M is 0. Asked for again behind a
    loop, so that they do not stay in registers.
    """
    if blocks_ptr is None:
        slots = block * BLOCK_M + tl.arange(0, BLOCK_M)
        live = slots < M
    else:
        _, place, end = block_of(blocks_ptr, block)
        places = place + tl.arange(0, BLOCK_M)
        live = places < tl.where(M > 0, end, 0)
        slots = tl.load(order_ptr + places, mask=live, other=0)
    return slots, live


@triton.jit(do_not_specialize=["S", "num_blocks"])
def route_kernel(
    chosen_ptr: tl.tensor,  # int64 [S]
    order_ptr: tl.tensor,  # int32 [S]
    blocks_ptr: tl.tensor,  # int32 [3, num_blocks]
    S: tl.tensor,
    num_blocks: tl.tensor,
    BLOCK_M: tl.constexpr,
    EXPERTS: tl.constexpr,  # rounded up to a power of two
    CHUNK: tl.constexpr,
) -> None:
    expert = tl.program_id(0)
    numbers, within = tl.arange(0, EXPERTS), tl.arange(0, CHUNK)
    counts = tl.zeros((EXPERTS,), tl.int32)
    for start in range(0, S, CHUNK):
        slots = start + within
        chosen = tl.load(chosen_ptr + slots, mask=slots < S, other=EXPERTS).to(tl.int32)
        counts += tl.sum((chosen[None, :] == numbers[:, None]).to(tl.int32), 1)
    taken = (counts + BLOCK_M - 1) // BLOCK_M
    place = tl.sum(tl.where(numbers < expert, counts, 0), 0)
    block = tl.sum(tl.where(numbers < expert, taken, 0), 0)
    end = place + tl.sum(tl.where(numbers == expert, counts, 0), 0)
    # The last expert has all that is left: behind its own blocks they begin behind its slots.
    is_last = expert == tl.num_programs(0) - 1
    behind = block + (end - place + BLOCK_M - 1) // BLOCK_M
    behind = tl.where(is_last, num_blocks, behind)
    for start in range(0, num_blocks, CHUNK):
        blocks = start + within
        mine = (blocks >= block) & (blocks < behind)
        first = place + (blocks - block) * BLOCK_M
        tl.store(blocks_ptr + blocks, tl.zeros_like(blocks) + expert, mask=mine)
        tl.store(blocks_ptr + num_blocks + blocks, first, mask=mine)
        tl.store(blocks_ptr + 2 * num_blocks + blocks, tl.zeros_like(blocks) + end, mask=mine)
    for start in range(0, S, CHUNK):
        slots = start + within
        chosen = tl.load(chosen_ptr + slots, mask=slots < S, other=EXPERTS).to(tl.int32)
        mine = chosen == expert
        ranks = tl.cumsum(mine.to(tl.int32), 0)
        tl.store(order_ptr + place + ranks - 1, slots, mask=mine)
        place += tl.max(ranks, 0)


def max_blocks(slots: int, num_experts: int, block_m: int) -> int:
    """Blocks that any choice of experts fits in: each expert that has a slot may waste one."""
    return (slots + min(slots, num_experts) * (block_m - 1)) // block_m


def route(chosen: Tensor, num_experts: int, block_m: int) -> tuple[Tensor, Tensor]:
    """(order int32 [S], blocks int32 [3, B]) of experts' numbers, int64 [T, top_k]."""
    slots = chosen.numel()
    blocks = max_blocks(slots, num_experts, block_m)
    order = torch.empty(slots, dtype=torch.int32, device=chosen.device)
    table = torch.empty(3, blocks, dtype=torch.int32, device=chosen.device)
    route_kernel[(num_experts,)](
        chosen.contiguous(),
        order,
        table,
        slots,
        blocks,
        **route_constants(num_experts, block_m),
        num_warps=4,
    )
    return order, table


def route_constants(num_experts: int, block_m: int) -> dict[str, int]:
    """The kernel's compile-time parameters."""
    experts = triton.next_power_of_2(num_experts)
    return {"BLOCK_M": block_m, "EXPERTS": experts, "CHUNK": max(16, COMPARED // experts)}


@triton.jit
def combine_kernel(
    parts_ptr: tl.tensor,  # float32 [T, TOP_K, K]
    out_ptr: tl.tensor,  # float32 [T, K]
    K: tl.tensor,
    TOP_K: tl.constexpr,
    SIZE: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    inside = columns < K
    sums = tl.zeros((SIZE,), tl.float32)
    for i in range(TOP_K):
        parts = tl.load(parts_ptr + (token * TOP_K + i) * K + columns, mask=inside, other=0.0)
        sums += parts
    tl.store(out_ptr + token * K + columns, sums, mask=inside)


def combine(parts: Tensor, top_k: int) -> Tensor:
    """Rows of slots, float32 [T * top_k, K] -> their sums by token, in order, float32 [T, K]."""
    slots, width = parts.shape
    out = torch.empty(slots // top_k, width, dtype=torch.float32, device=parts.device)
    grid = (slots // top_k, triton.cdiv(width, WIDTH))
    combine_kernel[grid](parts, out, width, TOP_K=top_k, SIZE=WIDTH, num_warps=4)
    return out
