"""Which block of the key/value cache belongs to whom. No torch here.

The cache is ``num_blocks`` blocks of ``block_size`` token slots. A sequence's block table maps
its logical blocks to physical ones; token ``i`` lies in slot
``block_table[i // block_size] * block_size + i % block_size``.

Blocks are counted references: a fork shares its parent's blocks, and a block with more than
one owner is never written. Whoever is about to write one gets a copy of it first.

Free blocks are reused least recently freed first, and a sequence frees its tail first.

Where every layer has a sliding window, blocks that no later token sees are given back while their
sequence runs; :data:`FORGOTTEN` keeps their place in the table. One table serves all layers, so a
single layer that sees everything keeps all blocks.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from typing import NamedTuple

from qtool.errors import EngineError
from qtool.runtime.sequence import Sequence

# In a block table: behind the window of every layer, and given back.
FORGOTTEN = -1


class BlockCopy(NamedTuple):
    """Copy the whole of block ``src`` over block ``dst``."""

    src: int
    dst: int


class BlockManager:
    """Hands out blocks, shares them, takes them back.

    Between steps a table has exactly the blocks that its computed tokens need.

    Args:
        window: how many tokens a token sees in any layer, itself the last; ``None`` for all.
    """

    def __init__(self, num_blocks: int, block_size: int, window: int | None = None) -> None:
        for name, value in (("num_blocks", num_blocks), ("block_size", block_size)):
            if value < 1:
                raise EngineError(f"{name}={value}: must be 1 or more; give the cache more memory")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._window = window
        self._ref_counts = [0] * num_blocks
        self._free = deque(range(num_blocks))

    @property
    def num_free(self) -> int:
        """Blocks that nobody owns."""
        return len(self._free)

    @property
    def num_slots(self) -> int:
        """Tokens that the whole cache holds."""
        return self.num_blocks * self.block_size

    def blocks_needed(self, num_tokens: int) -> int:
        """Blocks that hold this many tokens."""
        return -(-num_tokens // self.block_size)

    def can_grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Whether :meth:`grow` would find the blocks it takes. Changes nothing."""
        shared = self._shared(sequence, num_tokens)
        return len(shared) + self._missing(sequence, num_tokens) <= self.num_free

    def grow(self, sequence: Sequence, num_tokens: int) -> list[BlockCopy]:
        """Give the sequence writable slots for its next ``num_tokens`` tokens.

        These are tokens ``[num_computed, num_computed + num_tokens)``. Ask :meth:`can_grow`
        first.

        Returns:
            Copies to make before anything is written. All sources may be read before the first
            destination is written: no destination of one step is a source later in it.
        """
        assert self.can_grow(sequence, num_tokens), f"{sequence.request_id}: no blocks left"
        shared = self._shared(sequence, num_tokens)
        copies = [self._make_private(sequence, index) for index in shared]
        missing = self._missing(sequence, num_tokens)
        sequence.block_table.extend(self._take() for _ in range(missing))
        return copies

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let a child that owns nothing share what the parent has computed of its tokens.

        These are the tokens up to the first that differs, but the child keeps at least one to
        compute, since only that gives it logits. Nothing is shared where the parent has forgotten
        what the child would see.
        """
        assert not child.block_table, f"{child.request_id}: forked into, but has blocks"
        most = min(parent.num_computed, child.num_tokens - 1)
        pairs = zip(parent.token_ids(0, most), child.token_ids(0, most), strict=True)
        child.num_computed = next((i for i, (a, b) in enumerate(pairs) if a != b), most)
        table = parent.block_table[: self.blocks_needed(child.num_computed)]
        if FORGOTTEN in table[self._first_seen(child) :]:
            child.num_computed, table = 0, []
        child.block_table = table
        for block in _held(child):
            self._ref_counts[block] += 1

    def forget(self, sequence: Sequence) -> None:
        """Give up what no token to come will see; the table keeps its length."""
        for index in reversed(range(self._first_seen(sequence))):
            block = sequence.block_table[index]
            if block == FORGOTTEN:
                break
            self._release(block)
            sequence.block_table[index] = FORGOTTEN

    def free(self, sequence: Sequence) -> None:
        """Give up all the sequence's blocks, tail first; nothing of it is computed any more."""
        for block in reversed(_held(sequence)):
            self._release(block)
        sequence.block_table = []
        sequence.num_computed = 0

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Raise :class:`AssertionError`, naming the block, unless the books are exact.

        Args:
            sequences: everyone who owns a block.
        """
        owners: Counter[int] = Counter()
        for sequence in sequences:
            owners.update(_held(sequence))
            held, needed = len(sequence.block_table), self.blocks_needed(sequence.num_computed)
            assert held >= needed, f"{sequence.request_id}: has {held} blocks, computed {needed}"
            assert len(set(_held(sequence))) == len(_held(sequence)), (
                f"{sequence.request_id}: a block stands twice in {sequence.block_table}"
            )
            seen = sequence.block_table[self._first_seen(sequence) :]
            assert FORGOTTEN not in seen, f"{sequence.request_id}: forgot what it will see"
        free = Counter(self._free)
        for block, count in enumerate(self._ref_counts):
            assert count == owners[block], (
                f"block {block}: {count} references, but in {owners[block]} tables"
            )
            assert free[block] == (count == 0), (
                f"block {block}: {count} references, and {free[block]} times in the free list"
            )

    def check_writable(self, sequence: Sequence, num_tokens: int) -> None:
        """Raise :class:`AssertionError` unless the next tokens have slots no one else reads."""
        missing = self._missing(sequence, num_tokens)
        assert missing == 0, f"{sequence.request_id}: {missing} blocks short of its chunk"
        for index in self._shared(sequence, num_tokens):
            block = sequence.block_table[index]
            raise AssertionError(
                f"block {block}: about to be written by {sequence.request_id}, "
                f"but has {self._ref_counts[block]} references"
            )

    def _first_seen(self, sequence: Sequence) -> int:
        """The first logical block that the sequence's next token sees."""
        if self._window is None:
            return 0
        return max(0, sequence.num_computed - self._window + 1) // self.block_size

    def _missing(self, sequence: Sequence, num_tokens: int) -> int:
        needed = self.blocks_needed(sequence.num_computed + num_tokens)
        return max(needed - len(sequence.block_table), 0)

    def _shared(self, sequence: Sequence, num_tokens: int) -> list[int]:
        """Logical blocks the next tokens would be written to that have other owners."""
        first = sequence.num_computed // self.block_size
        end = self.blocks_needed(sequence.num_computed + num_tokens)
        written = range(first, min(end, len(sequence.block_table)))
        return [i for i in written if self._ref_counts[sequence.block_table[i]] > 1]

    def _make_private(self, sequence: Sequence, index: int) -> BlockCopy:
        copy = BlockCopy(src=sequence.block_table[index], dst=self._take())
        self._ref_counts[copy.src] -= 1
        sequence.block_table[index] = copy.dst
        return copy

    def _take(self) -> int:
        block = self._free.popleft()
        self._ref_counts[block] = 1
        return block

    def _release(self, block: int) -> None:
        self._ref_counts[block] -= 1
        if self._ref_counts[block] == 0:
            self._free.append(block)


def _held(sequence: Sequence) -> list[int]:
    """The blocks of a sequence, in order."""
    return [block for block in sequence.block_table if block != FORGOTTEN]
