"""A batch renumbered over the pages it sees, and cut where its rows cross from page to page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from qtool.runtime.batch import Batch, QuerySpan


@dataclass(frozen=True, slots=True)
class Layout:
    """Spans over a pool of their own; what attention reads of a batch."""

    spans: tuple[QuerySpan, ...]
    block_tables: Tensor

    @property
    def is_decode(self) -> bool:
        """Whether every sequence has exactly one row."""
        return all(span.length == 1 for span in self.spans)


@dataclass(frozen=True, slots=True)
class Segment(Layout):
    """At most one page's rows of each sequence, as a batch of its own.

    Attributes:
        rows: int64 [R], which rows of the batch they are.
        slots: int64 [R], where they lie in the renumbered pool.
        full_pages: int64, renumbered pages that these rows fill.
    """

    rows: Tensor
    slots: Tensor
    full_pages: Tensor


@dataclass(frozen=True, slots=True)
class _Piece:
    """Rows of sequence ``index`` at positions [start, end) of logical page ``page``."""

    index: int
    page: int
    start: int
    end: int


class SegmentedBatch:
    """A batch over the pool of just the pages that its block tables name.

    Attributes:
        batch: as it was.
    """

    def __init__(self, batch: Batch, block_size: int) -> None:
        self.batch, self._block_size = batch, block_size

    @cached_property
    def _seen(self) -> tuple[Tensor, Tensor]:
        """What :attr:`blocks` and the renumbered tables are."""
        blocks, tables = torch.unique(self.batch.block_tables, return_inverse=True)
        return blocks, tables

    @property
    def blocks(self) -> Tensor:
        """The block that each page of the pool is a copy of, int64 [n]."""
        return self._seen[0]

    @cached_property
    def whole(self) -> Layout:
        """The batch's spans with renumbered tables."""
        return Layout(self.batch.spans, self._seen[1])

    @cached_property
    def tails(self) -> Tensor:
        """Each sequence's tail page, int64 [S]."""
        return self._index(self.batch.tails)

    @cached_property
    def first_pages(self) -> Tensor:
        """The page that each sequence's first row lies in, int64 [S]."""
        return self._pages(span.context_len - span.length for span in self.batch.spans)

    @cached_property
    def last_pages(self) -> Tensor:
        """The page that each sequence's last row lies in, int64 [S]."""
        return self._pages(span.context_len - 1 for span in self.batch.spans)

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        """The batch page by page: a sequence's rows of one segment follow those before it."""
        pieces = [list(self._pieces(index)) for index in range(len(self.batch.spans))]
        rounds = max(map(len, pieces))
        return tuple(
            self._segment([own[number] for own in pieces if number < len(own)])
            for number in range(rounds)
        )

    def _pieces(self, index: int) -> Iterator[_Piece]:
        span, size = self.batch.spans[index], self._block_size
        position = span.context_len - span.length
        while position < span.context_len:
            page = position // size
            end = min((page + 1) * size, span.context_len)
            yield _Piece(index, page, position, end)
            position = end

    def _segment(self, pieces: Sequence[_Piece]) -> Segment:
        size, tables = self._block_size, self.whole.block_tables
        spans: list[QuerySpan] = []
        rows: list[int] = []
        for piece in pieces:
            span = self.batch.spans[piece.index]
            length, first = piece.end - piece.start, span.context_len - span.length
            spans.append(QuerySpan(len(rows), length, piece.end))
            begin = span.start + piece.start - first
            rows += range(begin, begin + length)
        indices = self._index([piece.index for piece in pieces])
        pages = tables[indices, self._index([piece.page for piece in pieces])]
        offsets = [
            position % size for piece in pieces for position in range(piece.start, piece.end)
        ]
        lengths = self._index([piece.end - piece.start for piece in pieces])
        full = [number for number, piece in enumerate(pieces) if piece.end % size == 0]
        return Segment(
            spans=tuple(spans),
            block_tables=tables[indices],
            rows=self._index(rows),
            slots=pages.repeat_interleave(lengths) * size + self._index(offsets),
            full_pages=pages[self._index(full)],
        )

    def _pages(self, positions: Iterator[int]) -> Tensor:
        logical = self._index([position // self._block_size for position in positions])
        return self.whole.block_tables[torch.arange(len(logical)), logical]

    def _index(self, numbers: Sequence[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int64, device=self.batch.block_tables.device)
