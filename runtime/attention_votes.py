"""How much attention each block of the cache is given, as heavy-hitter eviction counts it.

The last query of every block votes: what it gives to the tokens of each block before it and of its
own, summed over heads and layers. It comes when all these blocks are full and stored, so that its
vote is over whole blocks as the cache decodes them, whatever chunk it came in. One query in 16 is a
sample of those that H2O sums over; a decoding sequence pays for it in one step of 16.

A block's weight is the mean of the votes since it became full. By their sum, as in H2O, the oldest
blocks win for having been there longest, and a sequence keeps its beginning: on SmolLM2-135M, 384
of 1,024 tokens kept, two windows of the built-in text, the KL divergence at positions 768 to 1,023
is .128 by the sum and .055 by the mean (Ren & Zhu 2024 find the same of single tokens).

Each vote is computed alone, in shapes that its position decides, and counted in integers, whose
sums have no order: weights do not depend on the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from qtool.runtime.batch import Batch, QuerySpan
from qtool.runtime.kernels.backend import AttentionScope
from qtool.runtime.kv_layers import CacheLayer

# Votes are counted in 2**-24: 2**39 votes of a whole head's attention fit in 63 bits.
UNITS = 2.0**24


class _Voters(NamedTuple):
    """Rows of a batch that stand last in their block, of one sequence.

    ``blocks`` int64 [n] are those that the last of them sees; ``rows`` and ``counts`` have for each
    voter its row, and how many of the blocks it sees.
    """

    blocks: Tensor
    rows: list[int]
    counts: list[int]


class AttentionVotes:
    """Votes for the blocks of one cache.

    Attributes:
        totals: int64 [num_blocks], in 1 / :data:`UNITS`; of a block that is not full, anything.
        counts: int64 [num_blocks], queries that have voted.
    """

    def __init__(self, num_blocks: int, block_size: int, device: torch.device) -> None:
        self.totals = torch.zeros(num_blocks, dtype=torch.int64, device=device)
        self.counts = torch.zeros_like(self.totals)
        self._block_size = block_size
        self._batch: Batch | None = None
        self._voters: list[_Voters] = []

    def weigh(self, blocks: Sequence[int]) -> list[float]:
        """Mean votes for full blocks."""
        totals, counts = (x[list(blocks)].tolist() for x in (self.totals, self.counts))
        return [total / count for total, count in zip(totals, counts, strict=True)]

    def add(self, q: Tensor, layer: CacheLayer, batch: Batch, scope: AttentionScope) -> None:
        """Count one layer's votes, after its keys are stored.

        Args:
            q: [T, num_heads, head_dim], rotated.
        """
        if self._batch is not batch:
            self._open(batch)
        for voters in self._voters:
            keys = layer.read_keys(voters.blocks)
            for row, count in zip(voters.rows, voters.counts, strict=True):
                votes = block_shares(q[row], keys[:count], scope)
                self.totals.index_add_(0, voters.blocks[:count], (votes * UNITS).round().long())

    def _open(self, batch: Batch) -> None:
        """Find who votes in a batch. Blocks that become full have had no votes yet."""
        self._batch, self._voters = batch, []
        for span, table in zip(batch.spans, batch.block_tables, strict=True):
            if voters := self._find(span, table):
                self._voters.append(voters)
                for tally in (self.totals, self.counts):
                    tally[voters.blocks[[count - 1 for count in voters.counts]]] = 0
                for count in voters.counts:
                    self.counts[voters.blocks[:count]] += 1

    def _find(self, span: QuerySpan, table: Tensor) -> _Voters | None:
        size, first = self._block_size, span.context_len - span.length
        counts = list(range(first // size + 1, span.context_len // size + 1))
        if not counts:
            return None
        rows = [span.start + count * size - 1 - first for count in counts]
        return _Voters(table[: counts[-1]], rows, counts)


def block_shares(q: Tensor, keys: Tensor, scope: AttentionScope) -> Tensor:
    """Attention that one query gives to each block, summed over heads: float32 [n].

    Args:
        q: [num_heads, head_dim], standing at the last slot of the last block.
        keys: float32 [n, block_size, num_kv_heads, head_dim].
    """
    num_blocks, size, num_kv_heads, head_dim = keys.shape
    grouped = q.float().view(num_kv_heads, -1, head_dim) * scope.scale
    scores = grouped @ keys.flatten(0, 1).permute(1, 2, 0)
    if scope.softcap is not None:
        scores = scope.softcap * torch.tanh(scores / scope.softcap)
    if scope.window is not None:
        scores[..., : max(num_blocks * size - scope.window, 0)] = -torch.inf
    shares = torch.softmax(scores, dim=-1).sum((0, 1))
    return shares.view(num_blocks, size).sum(1)
