"""What a GEMM does with its sums, inside kernels: add up the splits of K, scale, add, store.

Sums are kept transposed, [BLOCK_N, BLOCK_M]: weights are the left operand.
"""

from __future__ import annotations

import triton
import triton.language as tl

from qtool.runtime.kernels.triton.gated import sigmoid


@triton.jit
def sum_splits(
    sums: tl.tensor,  # float32 [BLOCK_N, BLOCK_M]
    partials_ptr: tl.tensor,  # float32 [tiles, SPLITS, BLOCK_N, BLOCK_M]
    locks_ptr: tl.tensor,  # int32 [tiles], all 0 between launches
    tile: tl.tensor,
    split: tl.tensor,
    SPLITS: tl.constexpr,
) -> tl.tensor:
    """(sums over all splits, whether this program is the one that has them).

    Every program leaves its sums in ``partials``; the last to arrive adds them in the order of
    the splits, so that the bits do not depend on who was last, and sets the lock back, so that a
    captured graph can be launched again.
    """
    BLOCK_N: tl.constexpr = sums.shape[0]
    BLOCK_M: tl.constexpr = sums.shape[1]
    SIZE: tl.constexpr = BLOCK_N * BLOCK_M
    within = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
    first_ptr = partials_ptr + tile.to(tl.int64) * (SPLITS * SIZE)
    tl.store(first_ptr + split * SIZE + within, sums)
    # All threads' stores come before the one thread's release.
    tl.debug_barrier()
    arrived = tl.atomic_add(locks_ptr + tile, 1, sem="acq_rel", scope="gpu")
    last = arrived == SPLITS - 1
    if last:
        sums = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        # Not unrolled: all loads at once would spill.
        for i in tl.range(0, SPLITS, num_stages=1):
            # Past the first-level cache, which may hold what others have overwritten.
            sums += tl.load(first_ptr + i * SIZE + within, cache_modifier=".cg")
        tl.atomic_xchg(locks_ptr + tile, 0)
    return sums, last


@triton.jit
def store_tile(
    sums: tl.tensor,  # float32 [BLOCK_N, BLOCK_M]
    out_ptr: tl.tensor,  # [M', N], or [M', N / 2] where gated
    row_scales_ptr: tl.tensor,  # int32 bits of float32 [N'], or None
    token_scales_ptr: tl.tensor,  # float32 [M], or None
    slot_scales_ptr: tl.tensor,  # float32 [M'], or None
    bias_ptr: tl.tensor,  # [N], or None
    residual_ptr: tl.tensor,  # [M', N], or None
    tokens: tl.tensor,  # int32 [BLOCK_M]: rows of the input
    slots: tl.tensor,  # int32 [BLOCK_M]: rows of the result
    live: tl.tensor,  # bool [BLOCK_M]: rows to store
    N: tl.tensor,
    tile_n: tl.tensor,
    FACTOR: tl.constexpr,
    GATED: tl.constexpr,
) -> None:
    """``out = sums * scales + bias + residual``, or silu(gate) * up of its rows."""
    BLOCK_N: tl.constexpr = sums.shape[0]
    BLOCK_M: tl.constexpr = sums.shape[1]
    rows_n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    if FACTOR != 1.0:
        sums *= FACTOR
    if row_scales_ptr is not None:
        sums *= tl.load(row_scales_ptr + rows_n).to(tl.float32, bitcast=True)[:, None]
    if token_scales_ptr is not None:
        sums *= tl.load(token_scales_ptr + tokens, mask=live, other=0.0)[None, :]
    if slot_scales_ptr is not None:
        sums *= tl.load(slot_scales_ptr + slots, mask=live, other=0.0)[None, :]
    if bias_ptr is not None:
        sums += tl.load(bias_ptr + rows_n, mask=rows_n < N, other=0.0).to(tl.float32)[:, None]
    width = N
    if GATED:
        # Eight rows of the gate, then their eight of up: a thread has both of a pair.
        pairs = tl.reshape(sums, (BLOCK_N // 16, 2, 8, BLOCK_M))
        gate, up = tl.split(tl.permute(pairs, (0, 2, 3, 1)))
        gate = tl.reshape(gate, (BLOCK_N // 2, BLOCK_M))
        up = tl.reshape(up, (BLOCK_N // 2, BLOCK_M))
        sums = gate * sigmoid(gate) * up
        rows_n = tile_n * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
        width = N // 2
    offsets = slots.to(tl.int64)[None, :] * width + rows_n[:, None]
    inside = live[None, :] & (rows_n < width)[:, None]
    if residual_ptr is not None:
        sums += tl.load(residual_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + offsets, sums.to(out_ptr.dtype.element_ty), mask=inside)
