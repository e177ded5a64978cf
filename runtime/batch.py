"""A scheduled step as device tensors: what one forward pass reads."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import torch
from torch import Tensor

from qtool.runtime.scheduled_step import Chunk
from qtool.runtime.sequence import FORGOTTEN


@dataclass(frozen=True, slots=True)
class QuerySpan:
    """Rows ``[start, start + length)`` of the batch belong to one sequence.

    ``context_len`` counts the tokens that the sequence's blocks hold, up to and with the last of
    these rows; row i of the span stands at slot ``context_len - length + i`` of its table. That is
    its position, unless earlier tokens were evicted (:mod:`qtool.runtime.eviction`).
    """

    start: int
    length: int
    context_len: int


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of all chunks, one after another.

    Attributes:
        token_ids, positions: int64 [T].
        slots: int64 [T]; slot = block * block_size + offset, where a row's K/V are stored.
        spans: one per sequence, in row order.
        block_tables: int64 [S, B], padded with 0; row s belongs to ``spans[s]``. Blocks that
            are forgotten are 0 as well.
        logit_rows: int64 [R]; rows whose logits are wanted.
        tails: each sequence's tail page, where the cache has them.
    """

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    spans: tuple[QuerySpan, ...]
    block_tables: Tensor
    logit_rows: Tensor
    tails: tuple[int, ...] = ()

    @property
    def is_decode(self) -> bool:
        """Whether every sequence has exactly one row."""
        return len(self.spans) == len(self.token_ids)


def build_batch(
    chunks: SequenceOf[Chunk],
    block_size: int,
    device: torch.device,
    all_logits: SequenceOf[bool] | None = None,
) -> Batch:
    """Lay chunks out as rows.

    Args:
        chunks: from the scheduler; their sequences' block tables already have the slots.
        block_size: tokens per block.
        device: where the tensors go.
        all_logits: per chunk, whether logits of all its rows are wanted instead of only the
            last one of a chunk that samples.
    """
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    logit_rows: list[int] = []
    spans: list[QuerySpan] = []
    for index, chunk in enumerate(chunks):
        first = len(token_ids)
        end = chunk.start + chunk.length
        table, evicted = chunk.sequence.block_table, chunk.sequence.num_evicted
        held = range(chunk.start - evicted, end - evicted)
        token_ids += chunk.sequence.token_ids(chunk.start, end)
        positions += range(chunk.start, end)
        slots += [table[p // block_size] * block_size + p % block_size for p in held]
        spans.append(QuerySpan(first, chunk.length, end - evicted))
        if all_logits is not None and all_logits[index]:
            logit_rows += range(first, first + chunk.length)
        elif chunk.samples:
            logit_rows.append(first + chunk.length - 1)
    width = max(len(chunk.sequence.block_table) for chunk in chunks)
    tables = [_padded(chunk.sequence.block_table, width) for chunk in chunks]

    def tensor(values: list[int] | list[list[int]]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64).to(device, non_blocking=True)

    return Batch(
        tensor(token_ids),
        tensor(positions),
        tensor(slots),
        tuple(spans),
        tensor(tables),
        tensor(logit_rows),
        tuple(chunk.sequence.tail for chunk in chunks),
    )


def _padded(table: list[int], width: int) -> list[int]:
    """A block table as numbers that may be read, although not all of them mean anything."""
    if table[0] == FORGOTTEN:
        table = [max(block, 0) for block in table]
    return table + [0] * (width - len(table))
