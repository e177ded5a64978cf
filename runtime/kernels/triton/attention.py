"""Causal attention over a paged cache: one kernel for decode and prompts and every kind of codes.

Contract: rows of a batch in tiles of one sequence each (:mod:`.attention_plan`), pages of
:mod:`.kv_pages`. A query sees what is stored, except that where there are codes of 4 bits it sees
its own page as it was computed: such a page is written when it is full. Softmax is online (Milakov
& Gimelshein 2018), sums are float32.

Scales of bytes are applied where they are few: those of keys to columns of scores, those of values
to columns of probabilities. These are ``2**LOG_FACTOR`` times as large, in sums and totals alike,
so that their products with scales are no subnormals in float16. Codes of 4 bits become values with
one multiply-add for two of them. Scaling the query once a page instead, and probabilities by the
group, costs more: every warp would scale all of the query (4.3 and 3.7 instructions an element
against 3.3).
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from qtool.runtime.kernels.triton.attention_merge import leave_part, merge_parts, store_rows
from qtool.runtime.kernels.triton.kv_planes import (
    channel_of,
    halves_of,
    is_channel,
    load_words,
    placed,
    planes_of,
    tile_of,
    token_scales,
)

# The highest score where nothing is seen yet, and what masked scores are: finite, so that the
# difference of two of them is no NaN, and apart, so that masked ones weigh nothing even then. Of
# equals a fused multiply-add would leave what rounding left, up to 1e22, whose power is infinite.
NOTHING, MASKED = tl.constexpr(-1e30), tl.constexpr(-2e30)
# Rows of a query's own page at a time: more of them, in 16 bits, would spill.
OWN_ROWS = tl.constexpr(16)
_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def soft_cap(x: tl.tensor, CAP: tl.constexpr) -> tl.tensor:
    """``CAP * tanh(x)`` in powers of two; infinities of the exponential come out right."""
    return (1.0 - 2.0 / (tl.exp2(x * (2.0 * _LOG2_E)) + 1.0)) * (CAP * _LOG2_E)


@triton.jit
def masked(
    x: tl.tensor,  # scores [BLOCK_M, N]
    at: tl.tensor,  # [1, N], positions of keys
    at_row: tl.tensor,  # [BLOCK_M, 1], of queries
    WINDOW: tl.constexpr,
    IS_PAST: tl.constexpr,  # no key comes after a query
) -> tl.tensor:
    """Scores, but of what a row must not see."""
    if WINDOW > 0:
        visible = at > at_row - WINDOW
        if not IS_PAST:
            visible = visible & (at <= at_row)
        x = tl.where(visible, x, MASKED)
    elif not IS_PAST:
        x = tl.where(at <= at_row, x, MASKED)
    return x


@triton.jit
def softmax_step(
    x: tl.tensor, highest: tl.tensor, unit: tl.tensor, LOG_FACTOR: tl.constexpr
) -> Any:
    """(probabilities, what older sums shrink by, the highest scores so far)."""
    higher = tl.maximum(highest, tl.max(x, 1))
    p = tl.exp2(x * unit - (higher * unit - LOG_FACTOR)[:, None])
    return p, tl.exp2((highest - higher) * unit), higher


# Widths of tables change from step to step; a kernel for each kind of them would be too many.
@triton.jit(
    do_not_specialize=[
        "q_stride", "own_key_stride", "own_value_stride", "tail_stride", "table_stride",
    ]
)  # fmt: skip
def paged_attention_kernel(
    q_ptr: tl.tensor,  # [T, H, D]
    key_words_ptr: tl.tensor,  # int16, or the compute dtype: [blocks, KV, PAGE, D / planes]
    key_grid_ptr: tl.tensor,  # int32 [blocks, KV, PAGE / 2], float16 [blocks, KV, 2, D], or None
    value_words_ptr: tl.tensor,
    value_grid_ptr: tl.tensor,  # int32 [blocks, KV, PAGE / 2] or [.., GROUPS, 2, PAGE / 2], or None
    static_ptr: tl.tensor,  # float32 [2, KV], scales of all keys and all values; or None
    own_keys_ptr: tl.tensor,  # the batch's rows, [T, KV, D]; where there are tail pages
    own_values_ptr: tl.tensor,
    tails_ptr: tl.tensor,  # [tails, 2, PAGE, KV, D], or None
    tables_ptr: tl.tensor,  # int64 [S, B]
    tiles_ptr: tl.tensor,  # int32 [tiles, 8]: see attention_plan
    splits_ptr: tl.tensor,  # int32 [tiles, 4]
    work_ptr: tl.tensor,  # int32 [items, 2]
    out_ptr: tl.tensor,  # [T, H, D]
    partials_ptr: tl.tensor,  # float32
    locks_ptr: tl.tensor,  # int32 [places, KV], all 0 between launches
    q_stride: tl.tensor,
    own_key_stride: tl.tensor,
    own_value_stride: tl.tensor,
    tail_stride: tl.tensor,
    table_stride: tl.tensor,
    scale: tl.tensor,  # of scores, in powers of two; with a cap: over the cap
    GROUP: tl.constexpr,  # H / KV
    D: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    KEYS: tl.constexpr,  # "wide", "int8", "fp8" or "int4"
    VALUES: tl.constexpr,
    VALUE_GROUPS: tl.constexpr,  # of 4-bit values
    WINDOW: tl.constexpr,  # 0: none
    CAP: tl.constexpr,  # 0: none
    LOG_FACTOR: tl.constexpr,
    VALUE_FACTOR: tl.constexpr,  # what operands of values are short of
    OPERAND: tl.constexpr,
    ASM: tl.constexpr,
) -> None:
    KEY_PLANES: tl.constexpr = 4 if KEYS == "int4" else (1 if KEYS == "wide" else 2)
    VALUE_PLANES: tl.constexpr = 4 if VALUES == "int4" else (1 if VALUES == "wide" else 2)
    KEY_PLACES: tl.constexpr = KEY_PLANES * triton.next_power_of_2(D // KEY_PLANES)
    WIDTH: tl.constexpr = triton.next_power_of_2(D // VALUE_PLANES)
    PER_GROUP: tl.constexpr = VALUE_PLANES // VALUE_GROUPS
    HAS_TAILS: tl.constexpr = tails_ptr is not None
    item, head, num_heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    tile, split = tl.load(work_ptr + 2 * item), tl.load(work_ptr + 2 * item + 1)
    if tile < 0:
        return
    sequence, row = tl.load(tiles_ptr + 8 * tile), tl.load(tiles_ptr + 8 * tile + 1)
    count, position = tl.load(tiles_ptr + 8 * tile + 2), tl.load(tiles_ptr + 8 * tile + 3)
    splits, per = tl.load(splits_ptr + 4 * tile), tl.load(splits_ptr + 4 * tile + 1)
    base = tl.load(splits_ptr + 4 * tile + 2)

    first, end = 0, position + count  # of the positions that any row sees
    if WINDOW > 0:
        first = tl.maximum(position - WINDOW + 1, 0)
    start = tl.maximum(first // PAGE, base + split * per)
    stop = base + (split + 1) * per
    if HAS_TAILS:
        # All rows of a tile lie in one page, which is not stored yet.
        stop = tl.minimum(stop, position // PAGE)
    else:
        stop = tl.minimum(stop, tl.cdiv(end, PAGE))

    rows, slots = tl.arange(0, BLOCK_M), tl.arange(0, PAGE)
    tokens = rows // GROUP
    at_row = (position + tokens)[:, None]
    places = tl.arange(0, KEY_PLACES)
    channels = channel_of(places, KEY_PLANES, D) if KEY_PLACES != D else places
    live_q = (tokens < count)[:, None]
    if KEY_PLACES != D:
        live_q = live_q & is_channel(places, KEY_PLANES, D)[None, :]
    heads = head * GROUP + rows % GROUP
    q_rows = (row + tokens).to(tl.int64) * q_stride + heads * D
    q = tl.load(q_ptr + q_rows[:, None] + channels[None, :], mask=live_q, other=0.0).to(OPERAND)
    if static_ptr is not None:
        scale *= tl.load(static_ptr + head)
    # Without a cap the scores' unit is left to the exponential.
    unit = 1.0 if CAP > 0 else scale

    highest = tl.full((BLOCK_M,), NOTHING, tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    sums = (tl.zeros((BLOCK_M, WIDTH), tl.float32),) * VALUE_PLANES
    table_ptr = tables_ptr + sequence.to(tl.int64) * table_stride
    # A page's id is read one page ahead: read where it is used, it would take the place of
    # keys and values in flight.
    next_block = tl.load(table_ptr + start)
    for page in range(start, stop):
        block = next_block.to(tl.int64)
        next_block = tl.load(table_ptr + tl.minimum(page + 1, stop - 1))
        page_head = block * num_heads + head
        page_row = page_head * PAGE
        at = page * PAGE + slots
        live = (at >= first) & (at < end)
        key_words = load_words(key_words_ptr, page_row, slots, live, D // KEY_PLANES, False)
        value_words = load_words(
            value_words_ptr, page_row, slots, live, D // VALUE_PLANES, VALUES == "wide"
        )
        keys = tile_of(key_words, KEYS, OPERAND, ASM)
        if KEYS == "int4":
            grid_ptrs = key_grid_ptr + page_head * (2 * D) + channels
            if KEY_PLACES != D:
                inside = is_channel(places, KEY_PLANES, D)
                step = tl.load(grid_ptrs, mask=inside, other=0.0)
                low = tl.load(grid_ptrs + D, mask=inside, other=0.0)
            else:
                step, low = tl.load(grid_ptrs), tl.load(grid_ptrs + D)
            keys = placed(keys, step[None, :], low[None, :], ASM)
        x = tl.dot(q, tl.trans(keys))
        if KEYS != "wide" and KEYS != "int4" and key_grid_ptr is not None:
            scales = token_scales(key_grid_ptr, page_row, slots, live, not HAS_TAILS)
            x *= (scales * scale if CAP > 0 else scales)[None, :]
        elif CAP > 0:
            x *= scale
        if CAP > 0:
            x = soft_cap(x, CAP)
        x = masked(x, at[None, :], at_row, WINDOW, HAS_TAILS)
        p, decay, highest = softmax_step(x, highest, unit, LOG_FACTOR)
        total = total * decay + tl.sum(p, 1)
        planes = planes_of(value_words, VALUES, OPERAND, ASM)
        new_sums: tl.tuple = ()
        if VALUES == "int4":
            shares = p.to(OPERAND)
            for group in tl.static_range(VALUE_GROUPS):
                grid_row = page_row * VALUE_GROUPS + group * PAGE
                grid_ptrs = value_grid_ptr + grid_row + tl.arange(0, PAGE // 2)
                step, low = halves_of(tl.load(grid_ptrs)), halves_of(tl.load(grid_ptrs + PAGE // 2))
                for j in tl.static_range(group * PER_GROUP, (group + 1) * PER_GROUP):
                    values = placed(planes[j], step[:, None], low[:, None], ASM)
                    new_sums = new_sums + (tl.dot(shares, values, sums[j] * decay[:, None]),)
        else:
            if VALUES != "wide" and value_grid_ptr is not None:
                p *= token_scales(value_grid_ptr, page_row, slots, live, True)[None, :]
            shares = p.to(OPERAND)
            for j in tl.static_range(VALUE_PLANES):
                new_sums = new_sums + (tl.dot(shares, planes[j], sums[j] * decay[:, None]),)
        sums = new_sums

    if HAS_TAILS:
        # By the last split: the own page, from its tail page and from the batch itself.
        chunk_at, chunk_row = tl.load(tiles_ptr + 8 * tile + 4), tl.load(tiles_ptr + 8 * tile + 5)
        tail = tl.load(tiles_ptr + 8 * tile + 6).to(tl.int64)
        token_stride = num_heads * D
        columns = tl.arange(0, WIDTH)
        page_at = position // PAGE * PAGE
        parts = tl.where(split == splits - 1, tl.cdiv(end - page_at, OWN_ROWS), 0)
        for part in tl.range(0, parts, num_stages=1):
            within = part * OWN_ROWS + tl.arange(0, OWN_ROWS)
            at = page_at + within
            live, fresh = ((at >= first) & (at < end))[:, None], at >= chunk_at
            own = (chunk_row + at - chunk_at).to(tl.int64)
            kept_ptrs = tails_ptr + (tail * tail_stride + within * token_stride + head * D)
            own_ptrs = own_keys_ptr + (own * own_key_stride + head * D)
            ptrs = tl.where(fresh, own_ptrs, kept_ptrs)[:, None] + channels[None, :]
            here = is_channel(places, KEY_PLANES, D)[None, :]
            keys = tl.load(ptrs, mask=live & here, other=0.0).to(OPERAND)
            x = tl.dot(q, tl.trans(keys))
            if CAP > 0:
                x = soft_cap(x * scale, CAP)
            x = masked(x, at[None, :], at_row, WINDOW, False)
            p, decay, highest = softmax_step(x, highest, unit, LOG_FACTOR)
            total = total * decay + tl.sum(p, 1)
            shares = p.to(OPERAND)
            own_ptrs = own_values_ptr + (own * own_value_stride + head * D)
            kept_ptrs += PAGE * token_stride
            ptrs = tl.where(fresh, own_ptrs, kept_ptrs)[:, None] + columns[None, :]
            here = (columns < D // VALUE_PLANES)[None, :]
            new_sums = ()
            for j in tl.static_range(VALUE_PLANES):
                place = ptrs + j * (D // VALUE_PLANES)
                values = tl.load(place, mask=live & here, other=0.0).to(OPERAND)
                new_sums = new_sums + (tl.dot(shares, values, sums[j] * decay[:, None]),)
            sums = new_sums

    factor = VALUE_FACTOR
    if static_ptr is not None:
        factor *= tl.load(static_ptr + num_heads + head)
    out_rows = (row + tokens).to(tl.int64) * (num_heads * GROUP * D) + heads * D
    if splits == 1:
        store_rows(sums, total, out_ptr + out_rows, tokens < count, factor, VALUE_PLANES, D)
    else:
        SIZE: tl.constexpr = BLOCK_M * (VALUE_PLANES * WIDTH + 2)
        place = tl.load(splits_ptr + 4 * tile + 3).to(tl.int64) * num_heads + head
        first_ptr = partials_ptr + place * SIZE
        stride = num_heads.to(tl.int64) * SIZE
        leave_part(sums, highest * unit, total, first_ptr + split * stride, VALUE_PLANES)
        # All threads' stores come before the one thread's release.
        tl.debug_barrier()
        lock_ptr = locks_ptr + place
        if tl.atomic_add(lock_ptr, 1, sem="acq_rel", scope="gpu") == splits - 1:
            sums, total = merge_parts(first_ptr, stride, splits, VALUE_PLANES, BLOCK_M, WIDTH)
            store_rows(sums, total, out_ptr + out_rows, tokens < count, factor, VALUE_PLANES, D)
            tl.atomic_xchg(lock_ptr, 0)
