"""Rows of a batch into the cache: queries and keys rotated, codes and grids stored.

Contract: rotation as :func:`qtool.runtime.rotary.rotate`, computed in float32 and rounded to the
compute dtype once; then the codes of :mod:`qtool.runtime.kv_codes` bit for bit. Rows whose slot is
-1 are rotated and not stored. Grids follow from shapes alone.
"""

from __future__ import annotations

import triton
import triton.language as tl

from qtool.runtime.kernels.triton.kv_codes import (
    byte_words,
    group_words,
    head_scale,
    nibbles,
    rounded,
    span_grid,
)


@triton.jit
def turned(
    row_ptrs: tl.tensor,  # [R, 1], a head's first channel
    channels: tl.tensor,  # [1, WIDTH]
    inside: tl.tensor,
    cos_ptr: tl.tensor,  # [R, 1], a row's first
    sin_ptr: tl.tensor,
    ROTARY: tl.constexpr,  # channels that turn; 0: none
) -> tl.tensor:
    """Channels of heads, rotated, float32 [R, WIDTH], rounded to the dtype they come in."""
    x = tl.load(row_ptrs + channels, mask=inside, other=0.0).to(tl.float32)
    if ROTARY > 0:
        HALF: tl.constexpr = ROTARY // 2
        is_first, turning = channels < HALF, inside & (channels < ROTARY)
        partner = tl.where(is_first, channels + HALF, channels - HALF)
        y = tl.load(row_ptrs + partner, mask=turning, other=0.0).to(tl.float32)
        cos = tl.load(cos_ptr + channels, mask=turning, other=1.0).to(tl.float32)
        sin = tl.load(sin_ptr + channels, mask=turning, other=0.0).to(tl.float32)
        x = rounded(x * cos + tl.where(is_first, -y, y) * sin, row_ptrs.dtype.element_ty)
    return x


@triton.jit
def store_codes(
    planes: tl.tuple,  # float32 [R, WIDTH] each
    words_ptr: tl.tensor,
    grid_ptr: tl.tensor,
    static: tl.tensor,  # float32 scale, where grid_ptr is None and codes are bytes
    page_head: tl.tensor,  # [R] or one: the page and head, counted in heads
    offsets: tl.tensor,  # [R], where rows lie in the page
    live: tl.tensor,  # [R]
    inside: tl.tensor,  # [1, WIDTH]
    CODES: tl.constexpr,
    GROUPS: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
) -> None:
    """Encode rows and store them in a page; keys of 4 bits are not of this kind."""
    PLANES: tl.constexpr = 4 if CODES == "int4" else (1 if CODES == "wide" else 2)
    if CODES == "wide":
        words = planes[0]
    elif CODES == "int4":
        grid_ptrs = grid_ptr + page_head * (GROUPS * 2 * PAGE) + offsets
        words = group_words(planes, grid_ptrs, live, inside, GROUPS, PAGE)
    elif grid_ptr is not None:
        scale = head_scale(planes, PLANES, 448.0 if CODES == "fp8" else 127.0)
        tl.store(grid_ptr + page_head * PAGE + offsets, scale, mask=live)
        size = tl.broadcast_to(scale.to(tl.float32)[:, None], planes[0].shape)
        words = byte_words(planes, size, CODES == "fp8")
    else:
        size = tl.zeros(planes[0].shape, tl.float32) + static
        words = byte_words(planes, size, CODES == "fp8")
    columns = tl.arange(0, planes[0].shape[1])[None, :]
    ptrs = words_ptr + (page_head * PAGE + offsets)[:, None] * (D // PLANES) + columns
    tl.store(ptrs, words.to(words_ptr.dtype.element_ty), mask=inside & live[:, None])


@triton.jit(do_not_specialize=["q_stride", "key_stride", "value_stride", "tail_stride", "T"])
def write_rows_kernel(
    q_ptr: tl.tensor,  # [T, H, D]
    keys_ptr: tl.tensor,  # [T, KV, D]
    values_ptr: tl.tensor,
    cos_ptr: tl.tensor,  # [T, ROTARY], or None
    sin_ptr: tl.tensor,
    q_out_ptr: tl.tensor,  # [T, H, D], rotated; or None
    keys_out_ptr: tl.tensor,  # [T, KV, D], rotated; or None
    slots_ptr: tl.tensor,  # int64 [T]: in the pages, or in the tail pages
    key_words_ptr: tl.tensor,  # or the tail pages [tails, 2, PAGE, KV, D]
    key_grid_ptr: tl.tensor,
    value_words_ptr: tl.tensor,
    value_grid_ptr: tl.tensor,
    static_ptr: tl.tensor,  # float32 [2, KV], or None
    q_stride: tl.tensor,
    key_stride: tl.tensor,
    value_stride: tl.tensor,
    tail_stride: tl.tensor,
    T: tl.tensor,
    ROWS: tl.constexpr,  # of a program
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,  # GROUP, rounded up to a power of two
    D: tl.constexpr,
    ROTARY: tl.constexpr,
    PAGE: tl.constexpr,
    CODES: tl.constexpr,  # of keys and of values: "wide", "int8" or "fp8"
    TO_TAILS: tl.constexpr,
) -> None:
    PLANES: tl.constexpr = 1 if CODES == "wide" else 2
    WIDTH: tl.constexpr = D // PLANES
    head, num_heads = tl.program_id(1), tl.num_programs(1)
    first = tl.program_id(0) * ROWS
    if ROTARY > 0:
        lines = tl.arange(0, ROWS * HEADS)
        row, group = (first + lines // HEADS).to(tl.int64), lines % HEADS
        channels = tl.arange(0, triton.next_power_of_2(D))[None, :]
        inside = ((row < T) & (group < GROUP))[:, None] & (channels < D)
        q_ptrs = q_ptr + (row * q_stride + (head * GROUP + group) * D)[:, None]
        cos_ptrs, sin_ptrs = cos_ptr + (row * ROTARY)[:, None], sin_ptr + (row * ROTARY)[:, None]
        q = turned(q_ptrs, channels, inside, cos_ptrs, sin_ptrs, ROTARY)
        out_rows = (row * num_heads + head) * (GROUP * D) + group * D
        ptrs = q_out_ptr + out_rows[:, None] + channels
        tl.store(ptrs, q.to(q_out_ptr.dtype.element_ty), mask=inside)

    row = (first + tl.arange(0, ROWS)).to(tl.int64)
    inside_rows = (row < T)[:, None]
    key_ptrs = keys_ptr + (row * key_stride + head * D)[:, None]
    cos_ptrs, sin_ptrs = cos_ptr, sin_ptr
    if ROTARY > 0:
        cos_ptrs, sin_ptrs = cos_ptr + (row * ROTARY)[:, None], sin_ptr + (row * ROTARY)[:, None]
    value_ptrs = values_ptr + (row * value_stride + head * D)[:, None]
    columns = tl.arange(0, triton.next_power_of_2(WIDTH))[None, :]
    inside, live = columns < WIDTH, inside_rows & (columns < WIDTH)
    keys: tl.tuple = ()
    values: tl.tuple = ()
    for j in tl.static_range(PLANES):
        key = turned(key_ptrs, j * WIDTH + columns, live, cos_ptrs, sin_ptrs, ROTARY)
        value = tl.load(value_ptrs + j * WIDTH + columns, mask=live, other=0.0)
        keys, values = keys + (key,), values + (value.to(tl.float32),)
    if keys_out_ptr is not None:
        ptrs = keys_out_ptr + ((row * num_heads + head) * D)[:, None] + columns
        tl.store(ptrs, keys[0].to(keys_out_ptr.dtype.element_ty), mask=live)
    slot = tl.load(slots_ptr + row, mask=row < T, other=-1)
    stored = slot >= 0
    page, offset = slot // PAGE, slot % PAGE
    if TO_TAILS:
        rows = page * tail_stride + (offset * num_heads + head) * D
        ptrs = key_words_ptr + rows[:, None] + columns
        element = key_words_ptr.dtype.element_ty
        tl.store(ptrs, keys[0].to(element), mask=stored[:, None] & inside)
        ptrs += PAGE * num_heads * D
        tl.store(ptrs, values[0].to(element), mask=stored[:, None] & inside)
    else:
        key_static, value_static = 1.0, 1.0
        if static_ptr is not None:
            key_static = tl.load(static_ptr + head)
            value_static = tl.load(static_ptr + num_heads + head)
        page_head = page * num_heads + head
        store_codes(
            keys, key_words_ptr, key_grid_ptr, key_static, page_head, offset, stored, inside,
            CODES, 1, D, PAGE,
        )  # fmt: skip
        store_codes(
            values, value_words_ptr, value_grid_ptr, value_static, page_head, offset, stored,
            inside, CODES, 1, D, PAGE,
        )  # fmt: skip


@triton.jit
def page_planes(
    rows_ptr: tl.tensor,  # [PAGE, 1], the batch's own rows: their first channels
    kept_ptr: tl.tensor,  # [PAGE, 1], those of the tail page
    fresh: tl.tensor,  # [PAGE, 1], which of them are the batch's own
    columns: tl.tensor,  # [1, WIDTH], filled up
    PLANES: tl.constexpr,
    WIDTH: tl.constexpr,
) -> tl.tuple:
    """A page as it was computed, float32 planes [PAGE, WIDTH]; 0 where there is no channel."""
    inside = columns < WIDTH
    planes: tl.tuple = ()
    for j in tl.static_range(PLANES):
        place = j * WIDTH + columns
        x = tl.load(rows_ptr + place, mask=fresh & inside, other=0.0).to(tl.float32)
        x += tl.load(kept_ptr + place, mask=~fresh & inside, other=0.0).to(tl.float32)
        planes = planes + (x,)
    return planes


@triton.jit
def store_channels(
    planes: tl.tuple,  # four, float32 [PAGE, WIDTH]
    words_ptr: tl.tensor,
    grid_ptr: tl.tensor,  # float16 [blocks, KV, 2, D]
    page_head: tl.tensor,
    columns: tl.tensor,  # [1, WIDTH], filled up
    D: tl.constexpr,
    PAGE: tl.constexpr,
) -> None:
    """Encode a page of 4-bit keys, whose tokens share the grid of a channel, and store it."""
    WIDTH: tl.constexpr = D // 4
    inside, slots = columns < WIDTH, tl.arange(0, PAGE)
    words = tl.zeros(planes[0].shape, tl.int32)
    for j in tl.static_range(4):
        scale, low = span_grid(tl.min(planes[j], 0), tl.max(planes[j], 0))
        grid_ptrs = grid_ptr + page_head * (2 * D) + j * WIDTH + tl.ravel(columns)
        tl.store(grid_ptrs, scale, mask=tl.ravel(inside))
        tl.store(grid_ptrs + D, low, mask=tl.ravel(inside))
        words |= nibbles(planes[j], scale[None, :], low[None, :]) << (4 * j)
    ptrs = words_ptr + (page_head * PAGE + slots)[:, None] * WIDTH + columns
    tl.store(ptrs, words.to(tl.int16), mask=inside)


@triton.jit(do_not_specialize=["key_stride", "value_stride", "tail_stride", "table_stride"])
def seal_pages_kernel(
    pages_ptr: tl.tensor,  # int32 [pages, 8]: see attention_plan
    tables_ptr: tl.tensor,  # int64 [S, B]
    keys_ptr: tl.tensor,  # [T, KV, D], rotated
    values_ptr: tl.tensor,
    tails_ptr: tl.tensor,  # [tails, 2, PAGE, KV, D]
    key_words_ptr: tl.tensor,
    key_grid_ptr: tl.tensor,
    value_words_ptr: tl.tensor,
    value_grid_ptr: tl.tensor,
    key_stride: tl.tensor,
    value_stride: tl.tensor,
    tail_stride: tl.tensor,
    table_stride: tl.tensor,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    KEYS: tl.constexpr,  # "int8" or "int4"
    VALUE_GROUPS: tl.constexpr,
) -> None:
    """Store a page that the batch's rows have filled; its values have 4 bits."""
    KEY_PLANES: tl.constexpr = 4 if KEYS == "int4" else 2
    KEY_WIDTH: tl.constexpr = D // KEY_PLANES
    WIDTH: tl.constexpr = D // 4
    item, head, num_heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    fields = pages_ptr + 8 * item
    page = tl.load(fields + 1)
    if (page + 1) * PAGE > tl.load(fields + 5):
        return
    sequence, chunk_at, chunk_row = tl.load(fields), tl.load(fields + 2), tl.load(fields + 3)
    block = tl.load(tables_ptr + sequence.to(tl.int64) * table_stride + page)
    slots = tl.arange(0, PAGE)
    at = page * PAGE + slots
    fresh = (at >= chunk_at)[:, None]
    rows = (chunk_row + at - chunk_at).to(tl.int64)
    tail = tl.load(fields + 4).to(tl.int64) * tail_stride
    key_ptrs = keys_ptr + (rows * key_stride + head * D)[:, None]
    value_ptrs = values_ptr + (rows * value_stride + head * D)[:, None]
    kept_ptrs = tails_ptr + tail + (slots * num_heads + head)[:, None] * D
    page_head = block * num_heads + head
    columns = tl.arange(0, triton.next_power_of_2(KEY_WIDTH))[None, :]
    keys = page_planes(key_ptrs, kept_ptrs, fresh, columns, KEY_PLANES, KEY_WIDTH)
    if KEYS == "int4":
        store_channels(keys, key_words_ptr, key_grid_ptr, page_head, columns, D, PAGE)
    else:
        store_codes(
            keys, key_words_ptr, key_grid_ptr, 1.0, page_head, slots, slots >= 0,
            columns < KEY_WIDTH, KEYS, 1, D, PAGE,
        )  # fmt: skip
    columns = tl.arange(0, triton.next_power_of_2(WIDTH))[None, :]
    kept_ptrs += PAGE * num_heads * D
    values = page_planes(value_ptrs, kept_ptrs, fresh, columns, 4, WIDTH)
    store_codes(
        values, value_words_ptr, value_grid_ptr, 1.0, page_head, slots, slots >= 0,
        columns < WIDTH, "int4", VALUE_GROUPS, D, PAGE,
    )  # fmt: skip
