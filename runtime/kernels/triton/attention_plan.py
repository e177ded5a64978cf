"""Which program attends to what: rows in tiles, and contexts in splits.

A tile is rows of one sequence between two multiples of its size, so that all of them lie in one
page and where a row lies in its tile follows from its position. How a tile's context is split
among programs is decided on the device from the positions there: one launch a step and window,
for all layers. Its grid, and that of the attention, follow from numbers of tiles alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from qtool.runtime.kernels.backend import PagedBatch
from qtool.runtime.kernels.triton.attention_config import large_tile
from qtool.runtime.kernels.triton.target import Target

# Tiles that are counted at a time.
BLOCK = 256
# Rows of a matrix instruction.
SMALL_TILE = 16
# A program that sees fewer tokens spends more on the merge than on them.
MIN_TOKENS_PER_SPLIT = 256
# Programs that share a multiprocessor, by registers and shared memory of a decode step's kernels.
PROGRAMS_PER_SM = 4


@triton.jit
def _pages(
    tiles_ptr: tl.tensor,
    numbers: tl.tensor,
    num_tiles: tl.tensor,
    WINDOW: tl.constexpr,
    PAGE: tl.constexpr,
) -> Any:
    """(first, end) of the pages that tiles see; both 0 for a tile without rows."""
    inside = numbers < num_tiles
    count = tl.load(tiles_ptr + 8 * numbers + 2, mask=inside, other=0)
    position = tl.load(tiles_ptr + 8 * numbers + 3, mask=inside, other=0)
    first = tl.zeros_like(position)
    if WINDOW > 0:
        first = tl.maximum(position - WINDOW + 1, 0) // PAGE
    end = tl.cdiv(position + count, PAGE)
    return tl.where(count > 0, first, 0), tl.where(count > 0, end, 0)


@triton.jit(do_not_specialize=["num_tiles", "num_items", "budget", "least"])
def plan_splits_kernel(
    tiles_ptr: tl.tensor,  # int32 [tiles, 8]
    splits_ptr: tl.tensor,  # int32 [tiles, 4]
    work_ptr: tl.tensor,  # int32 [items, 2]
    num_tiles: tl.tensor,
    num_items: tl.tensor,
    budget: tl.tensor,  # splits of all tiles that are worth having
    least: tl.tensor,  # pages of a split
    FIXED: tl.constexpr,  # every split has `least` pages, counted from a sequence's first
    WINDOW: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    tile, numbers = tl.program_id(0), tl.arange(0, BLOCK)
    per = least
    if not FIXED:
        total = tl.zeros((BLOCK,), tl.int32)
        for begin in range(0, num_tiles, BLOCK):
            first, end = _pages(tiles_ptr, begin + numbers, num_tiles, WINDOW, PAGE)
            total += end - first
        per = tl.maximum(tl.cdiv(tl.sum(total, 0), budget), least)
    before = tl.zeros((BLOCK,), tl.int32)
    shared = tl.zeros((BLOCK,), tl.int32)
    for begin in range(0, tile, BLOCK):
        first, end = _pages(tiles_ptr, begin + numbers, num_tiles, WINDOW, PAGE)
        if FIXED:
            first = first // per * per
        splits = tl.where(begin + numbers < tile, tl.cdiv(end - first, per), 0)
        before += splits
        shared += tl.where(splits > 1, splits, 0)
    item, place = tl.sum(before, 0), tl.sum(shared, 0)
    own_first, own_end = _pages(tiles_ptr, tile, num_tiles, WINDOW, PAGE)
    if FIXED:
        own_first = own_first // per * per
    own = tl.cdiv(own_end - own_first, per)
    tl.store(splits_ptr + 4 * tile, own)
    tl.store(splits_ptr + 4 * tile + 1, per)
    tl.store(splits_ptr + 4 * tile + 2, own_first)
    tl.store(splits_ptr + 4 * tile + 3, place)
    for begin in range(0, own, BLOCK):
        inside = begin + numbers < own
        ptrs = work_ptr + 2 * (item + begin + numbers)
        tl.store(ptrs, tl.zeros_like(numbers) + tile, mask=inside)
        tl.store(ptrs + 1, begin + numbers, mask=inside)
    if tile == num_tiles - 1:
        # What is left of the grid has nothing to do.
        for begin in range(item + own, num_items, BLOCK):
            inside = begin + numbers < num_items
            tl.store(work_ptr + 2 * (begin + numbers), tl.full((BLOCK,), -1, tl.int32), mask=inside)


@dataclass(frozen=True, slots=True, eq=False)
class Splits:
    """The contexts of a plan's tiles as pieces of work, for one window.

    Attributes:
        tiles: int32 [tiles, 4]: number of splits, pages of each, the page that they are counted
            from, and where the tile's partial results lie.
        work: int32 [items, 2]: tile and split, or -1 for nothing.
        num_shared: how many items have partial results, at most.
    """

    tiles: Tensor
    work: Tensor
    num_shared: int


class AttentionPlan:
    """A batch as tiles.

    Args:
        group: heads of queries to one of keys.
        page: tokens of a page.
        fixed: tokens of every split, a multiple of a page's: what a row's sums are added up of
            then depends on its position alone, and not on its company.

    Attributes:
        block_m: rows of a tile, with those that fill it up.
        tiles: int32 [tiles, 8]: sequence, first row, rows, position of the first, position and row
            of the sequence's first row in the batch, tail page, 0.
    """

    def __init__(
        self,
        batch: PagedBatch,
        group: int,
        num_kv_heads: int,
        page: int,
        target: Target,
        fixed: int | None = None,
    ) -> None:
        self.batch, self.page = batch, page
        self.num_kv_heads = num_kv_heads
        longest = max(span.length for span in batch.spans)
        self.block_m = max(SMALL_TILE, triton.next_power_of_2(group))
        if longest > self.block_m // group:
            self.block_m = max(large_tile(target), self.block_m)
        # A power of two, so that tiles end where pages do.
        size = min(page, 1 << ((self.block_m // group).bit_length() - 1))
        rows = list(_tile_rows(batch, size))
        self._longest_tile = max(row[3] + row[2] for row in rows)
        self.tiles = self._device_table(rows)
        self._fixed = fixed
        self._budget = max(1, target.num_sms * PROGRAMS_PER_SM // num_kv_heads)
        self._splits: dict[int, Splits] = {}

    def over(self, batch: PagedBatch) -> AttentionPlan:
        """The same of the same rows, where they have slots and block tables of another group."""
        other = copy(self)
        other.batch = batch
        return other

    def splits(self, window: int | None) -> Splits:
        """How contexts are split, for all layers of a window."""
        width = window or 0
        if width not in self._splits:
            self._splits[width] = self._plan_splits(width)
        return self._splits[width]

    @cached_property
    def pages(self) -> Tensor:
        """Pages that rows lie in, int32 [pages, 8]: sequence, page, position and row of the
        sequence's first row in the batch, tail page, tokens up to the last row, 0, 0."""
        rows = [row for index in range(len(self.batch.spans)) for row in self._page_rows(index)]
        return self._device_table(rows)

    @cached_property
    def tail_slots(self) -> Tensor:
        """Where rows lie in the tail pages, int64 [T]; -1 for those of a sequence's later pages.

        A tail page holds one page of its sequence, and what it holds of an earlier one is read
        until the batch has been attended to.
        """
        slots = []
        for span, tail in zip(self.batch.spans, self.batch.tails, strict=True):
            first = span.context_len - span.length
            at = torch.arange(first, span.context_len)
            slots.append(torch.where(at // self.page == first // self.page, at % self.page, -1))
            slots[-1][slots[-1] >= 0] += tail * self.page
        return torch.cat(slots).to(self.batch.block_tables.device, non_blocking=True)

    @cached_property
    def late_rows(self) -> tuple[Tensor, Tensor, Tensor] | None:
        """Rows, tail pages and offsets there of what goes into tail pages at the end, int64."""
        rows, tails, offsets = list[int](), list[int](), list[int]()
        for span, tail in zip(self.batch.spans, self.batch.tails, strict=True):
            count = span.context_len % self.page
            if count and count < span.length:
                end = span.start + span.length
                rows += range(end - count, end)
                tails += [tail] * count
                offsets += range(count)
        if not rows:
            return None
        device = self.batch.block_tables.device
        first, second, third = (
            torch.tensor(numbers, device=device) for numbers in (rows, tails, offsets)
        )
        return first, second, third

    def _page_rows(self, index: int) -> Iterator[tuple[int, ...]]:
        span, tail = self.batch.spans[index], self.batch.tails[index]
        first = span.context_len - span.length
        for page in range(first // self.page, -(-span.context_len // self.page)):
            yield index, page, first, span.start, tail, span.context_len, 0, 0

    def _plan_splits(self, window: int) -> Splits:
        num_tiles = len(self.tiles)
        if self._fixed is None:
            least, shared = max(1, MIN_TOKENS_PER_SPLIT // self.page), 2 * self._budget
            num_items = num_tiles + self._budget
        else:
            least = self._fixed // self.page
            num_items = shared = num_tiles * -(-self._longest_tile // self._fixed)
        device = self.tiles.device
        splits = torch.empty(num_tiles, 4, dtype=torch.int32, device=device)
        work = torch.empty(num_items, 2, dtype=torch.int32, device=device)
        plan_splits_kernel[(num_tiles,)](
            self.tiles, splits, work, num_tiles, num_items, self._budget, least,
            FIXED=self._fixed is not None, WINDOW=window, PAGE=self.page, BLOCK=BLOCK, num_warps=4,
        )  # fmt: skip
        return Splits(splits, work, shared)

    def _device_table(self, rows: list[tuple[int, ...]]) -> Tensor:
        table = torch.tensor(rows, dtype=torch.int32)
        return table.to(self.batch.block_tables.device, non_blocking=True)


def _tile_rows(batch: PagedBatch, size: int) -> Iterator[tuple[int, ...]]:
    """Rows of a plan's table of tiles."""
    for index, span in enumerate(batch.spans):
        chunk_at = span.context_len - span.length
        tail = batch.tails[index] if batch.tails else -1
        position = chunk_at
        while position < span.context_len:
            end = min((position // size + 1) * size, span.context_len)
            row = span.start + position - chunk_at
            yield index, row, end - position, position, chunk_at, span.start, tail, 0
            position = end
