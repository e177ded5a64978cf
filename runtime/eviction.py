"""Which blocks of a long sequence are given up, and which are heavy hitters. No torch here.

H2O (Zhang et al. 2023, section 4): a few tokens get most of the attention, so a sequence that keeps
those, and its latest, loses little. Here it is whole blocks. A sequence fills its budget; then, of
the blocks that are neither its first (attention sinks, Xiao et al. 2024) nor its latest, those that
have been given the least attention are dropped from all layers. It fills up again, and so on.

So blocks are dropped when a sequence has computed as many tokens as its budget, and then whenever
it has computed as many as were dropped: at positions that nothing but the rule decides. A chunk
never goes beyond the next of them, whence what a query sees, and what it gives to other blocks,
depends on the tokens of its sequence alone, and not on chunks, batches or preemptions. For the same
reason nothing is shared with other sequences: a block found in the prefix cache would lack the
attention it was given.

Attention over a table with holes needs no other mask. Keys keep the rotation of the position they
were written at. The blocks left keep their order, and each query still comes after all keys that
were written before it, so "up to my own slot" is the causal mask in slots as it is in positions.
A sliding window is a distance, and slots are nearer than positions, but only beyond a hole: the
recent blocks are at least as many as the widest window of any layer reaches, so within a window
there is no hole, and a key is ``window`` slots away exactly where it is ``window`` positions away.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from qtool.errors import UsageError
from qtool.runtime.sequence import Sequence as Tokens

KV_EVICTIONS = ("off", "heavy-hitter")

# Attention that blocks have been given, in any unit; a number for each.
Weigh = Callable[[Sequence[int]], Sequence[float]]


@dataclass(frozen=True, slots=True)
class EvictionRule:
    """What a sequence keeps.

    Attributes:
        block_size: tokens of a block.
        budget: blocks that it holds at most.
        recent: of these its latest, which stay.
    """

    block_size: int
    budget: int
    recent: int

    @property
    def max_tokens(self) -> int:
        """Tokens that a sequence holds at most."""
        return self.budget * self.block_size

    @property
    def num_dropped(self) -> int:
        """Blocks dropped at a time.

        A quarter of those that may be: dropped one by one, the next block would be chosen with
        fresher knowledge, but a long prompt would be computed a block a step.
        """
        return max((self.budget - 1 - self.recent) // 4, 1)

    def choose(self, weights: Sequence[float]) -> list[int]:
        """Places in a full table to give up, in order; of equal weights the earliest."""
        candidates = range(1, self.budget - self.recent)
        return sorted(sorted(candidates, key=lambda place: weights[place])[: self.num_dropped])

    def describe(self) -> str:
        """For people."""
        return (
            f"heavy-hitter, a sequence keeps {self.max_tokens:,} tokens at most: the first "
            f"{self.block_size}, the last {self.recent * self.block_size:,}, and of those between "
            f"the blocks given most attention; nothing is shared between requests"
        )


class Evictor:
    """Takes blocks from sequences that have filled their budget.

    Attributes:
        num_evicted: blocks so far.
    """

    def __init__(self, rule: EvictionRule, weigh: Weigh) -> None:
        self.rule, self._weigh = rule, weigh
        self.num_evicted = 0

    def room(self, sequence: Tokens) -> int:
        """Tokens that a sequence may compute before blocks of it are dropped."""
        return self.rule.max_tokens - sequence.num_held

    def evict(self, sequence: Tokens) -> list[int]:
        """Blocks that a sequence gives up; those behind them move up in its table."""
        if self.room(sequence) > 0:
            return []
        table = sequence.block_table
        places = self.rule.choose(self._weigh(table))
        sequence.num_evicted += len(places) * self.rule.block_size
        self.num_evicted += len(places)
        return [table.pop(place) for place in reversed(places)]


def eviction_rule(
    kv_eviction: str,
    kv_budget: int | None,
    block_size: int,
    windows: Sequence[int | None],
    max_model_len: int,
) -> EvictionRule | None:
    """The rule of an engine, or ``None`` where nothing is evicted.

    Half of the budget is for the latest tokens, more where a sliding window reaches further.

    Args:
        kv_budget: tokens; whole blocks of them count.
        windows: of each layer, in tokens, itself the last; ``None`` for all.
        max_model_len: tokens of the longest sequence.

    Raises:
        UsageError: the budget has no room for a choice, or is never reached, or every layer has a
            window.
    """
    if kv_eviction == "off":
        return None
    assert kv_budget is not None
    sizes = [window for window in windows if window is not None]
    widest = max(sizes, default=1)
    if len(sizes) == len(windows):
        raise UsageError(
            f"kv_eviction={kv_eviction!r}: no layer of this model sees more than {widest} tokens, "
            "and older ones are given up anyhow; leave it out"
        )
    budget, reach = kv_budget // block_size, -(-(widest - 1) // block_size)
    least = max(reach + 2, 3)
    if budget < least:
        why = f", as sliding windows reach back {widest} tokens" if reach > 1 else ""
        raise UsageError(
            f"kv_budget={kv_budget}: must be {least * block_size} or more: a first block of "
            f"{block_size} tokens, a recent window, and a block to choose{why}; raise it"
        )
    if budget * block_size >= max_model_len:
        raise UsageError(
            f"kv_budget={kv_budget}: no sequence here is longer than {max_model_len} tokens, so "
            "nothing would ever be evicted; lower it, or leave kv_eviction out"
        )
    return EvictionRule(block_size, budget, max(budget // 2, reach))
