"""Which block of the key/value cache belongs to whom. No torch here.

The cache is ``num_blocks`` blocks of ``block_size`` token slots. A sequence's block table maps
its logical blocks to physical ones; token ``i`` lies in slot
``block_table[i // block_size] * block_size + i % block_size``.

Blocks are counted references: a fork shares its parent's blocks, and a block with more than
one owner is never written. Whoever is about to write one gets a copy of it first.

With a prefix cache, full blocks stay known after their last owner has left, and whoever brings the
same tokens shares them (:mod:`.prefix_cache`). A sequence that has computed what is known already
takes the known block and gives its own back. So the owner of a block owns all those before it, and
as a sequence frees its tail first, a block is never forgotten before those that continue it.

Free blocks are reused in this order: those of unknown contents, then the least recently freed.

Where every layer has a sliding window, blocks that no later token sees are given back while their
sequence runs; :data:`FORGOTTEN` keeps their place in the table. One table serves all layers, so a
single layer that sees everything keeps all blocks.

Some forms of the cache write a block when it is full, and keep an unfinished one aside
(:mod:`.tails`). Then whoever begins to run gets a tail page, and a fork shares an unfinished block
by a copy of its parent's page.

With eviction a sequence holds no more blocks than its budget (:mod:`.eviction`). Its blocks are its
own alone.
"""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable
from itertools import chain

from qtool.errors import EngineError
from qtool.runtime.eviction import Evictor
from qtool.runtime.prefix_cache import PrefixCache
from qtool.runtime.sequence import FORGOTTEN, NO_TAIL, Sequence
from qtool.runtime.tails import BlockCopy, TailPages


class BlockManager:
    """Hands out blocks, shares them, takes them back.

    Between steps a table has exactly the blocks that its computed tokens need.

    Args:
        window: how many tokens a token sees in any layer, itself the last; ``None`` for all.
        prefixes: remembers full blocks, if given.
        num_tails: pages for unfinished blocks; ``None`` where the form of the cache has none.
        evictor: bounds what a sequence holds, if given; then there is no prefix cache.

    Raises:
        EngineError: there are no blocks, or fewer than a sequence may hold.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        window: int | None = None,
        prefixes: PrefixCache | None = None,
        num_tails: int | None = None,
        evictor: Evictor | None = None,
    ) -> None:
        assert evictor is None or (prefixes is None and window is None), "holes in what is shared"
        for name, value in (("num_blocks", num_blocks), ("block_size", block_size)):
            if value < 1:
                raise EngineError(f"{name}={value}: must be 1 or more; give the cache more memory")
        if evictor is not None and evictor.rule.budget > num_blocks:
            raise EngineError(
                f"kv_budget={evictor.rule.max_tokens}: the cache holds {num_blocks * block_size} "
                "tokens; lower the budget, or give the cache more memory"
            )
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._window = window
        self._prefixes = prefixes
        self._evictor = evictor
        self._tails = None if num_tails is None else TailPages(num_tails)
        self._ref_counts = [0] * num_blocks
        self._blank = deque(range(num_blocks))  # nobody's, of unknown contents
        self._idle: OrderedDict[int, None] = OrderedDict()  # nobody's, but known

    @property
    def num_free(self) -> int:
        """Blocks that nobody owns."""
        return len(self._blank) + len(self._idle)

    @property
    def has_tail(self) -> bool:
        """Whether one more sequence can begin to run."""
        return self._tails is None or self._tails.num_free > 0

    @property
    def num_known(self) -> int:
        """Blocks whose contents the prefix cache knows, owned or free."""
        return 0 if self._prefixes is None else len(self._prefixes)

    @property
    def num_evicted(self) -> int:
        """Blocks that sequences had to give up while they ran, so far."""
        return 0 if self._evictor is None else self._evictor.num_evicted

    @property
    def shares(self) -> bool:
        """Whether a fork may begin with blocks of its parent."""
        return self._evictor is None

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence that can run alone: no end where blocks are evicted."""
        return self.num_slots if self._evictor is None else sys.maxsize

    def room(self, sequence: Sequence) -> int:
        """Most tokens that a sequence may compute in a step."""
        return sys.maxsize if self._evictor is None else self._evictor.room(sequence)

    @property
    def num_slots(self) -> int:
        """Tokens that the whole cache holds."""
        return self.num_blocks * self.block_size

    def num_slots_used(self, owners: Iterable[Sequence]) -> int:
        """Slots of owned blocks that hold a token; the rest is at the ends of sequences.

        Args:
            owners: everyone who owns a block.
        """
        ends = {
            owner.block_table[-1]: len(owner.block_table) * self.block_size - owner.num_held
            for owner in owners
            if owner.block_table
        }
        return (self.num_blocks - self.num_free) * self.block_size - sum(ends.values())

    def blocks_needed(self, num_tokens: int) -> int:
        """Blocks that hold this many tokens."""
        return -(-num_tokens // self.block_size)

    def most_blocks(self, num_tokens: int) -> int:
        """Blocks that a sequence of so many tokens holds when it has computed them."""
        needed = self.blocks_needed(num_tokens)
        return needed if self._evictor is None else min(needed, self._evictor.rule.budget)

    def can_grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Whether :meth:`grow` would find the blocks it takes. Changes nothing."""
        num_shared = len(self._shared(sequence, num_tokens))
        return num_shared + self._missing(sequence, num_tokens) <= self.num_free

    def grow(self, sequence: Sequence, num_tokens: int) -> list[BlockCopy]:
        """Give the sequence writable slots for its next ``num_tokens`` tokens.

        These are tokens ``[num_computed, num_computed + num_tokens)``. Ask :meth:`can_grow`
        first.

        Returns:
            Copies to make before anything is written. All sources may be read before the first
            destination is written: no destination of one step is a source later in it.
        """
        shared = self._shared(sequence, num_tokens)
        missing = self._missing(sequence, num_tokens)
        enough = len(shared) + missing <= self.num_free
        assert enough, f"{sequence.request_id}: no blocks left"
        copies = [self._make_private(sequence, index) for index in shared]
        if self._prefixes is not None:
            for block in self._written(sequence, num_tokens):
                self._prefixes.drop(block)
        sequence.block_table.extend(self._take() for _ in range(missing))
        return copies

    def find_prefix(self, sequence: Sequence) -> list[int]:
        """A block table of what is known of a sequence that owns nothing. Changes nothing."""
        if self._prefixes is None or not sequence.reads_prefix:
            return []
        return self._prefixes.find(sequence, self._first_seen)

    def names_computed(self, sequence: Sequence, num_tokens: int) -> list[bytes]:
        """What the prefix cache calls the blocks that its next ``num_tokens`` tokens fill."""
        if self._prefixes is None:
            return []
        first = sequence.num_computed // self.block_size
        end = (sequence.num_computed + num_tokens) // self.block_size
        return self._prefixes.names(sequence, first, end) if end > first else []

    def name_behind(self, sequence: Sequence, prefix: list[int]) -> list[bytes]:
        """The same of the block that follows a prefix found for it; empty if it is not full."""
        if self._prefixes is None or not sequence.reads_prefix:
            return []
        return self._prefixes.names(sequence, len(prefix), len(prefix) + 1)

    def num_idle(self, prefix: list[int]) -> int:
        """How many of a prefix's blocks are free now, and are not once it is adopted."""
        return sum(block in self._idle for block in prefix)

    def adopt(self, sequence: Sequence, prefix: list[int]) -> None:
        """Let a sequence that owns nothing begin with what :meth:`find_prefix` found."""
        assert not sequence.block_table, f"{sequence.request_id}: has blocks already"
        for block in prefix:
            if block != FORGOTTEN:
                self._share(block)
        self._take_tail(sequence)
        sequence.block_table = prefix
        sequence.num_computed = len(prefix) * self.block_size
        sequence.num_registered = len(prefix)

    def advance(self, sequence: Sequence, num_tokens: int) -> None:
        """So many more tokens are computed: make full blocks known, give up what is not seen."""
        sequence.num_computed += num_tokens
        if self._prefixes is not None:
            self._register(sequence, self._prefixes)
        self._forget(sequence)
        if self._evictor is not None:
            for block in self._evictor.evict(sequence):
                self._release(block)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let a child that owns nothing share what the parent has computed of its tokens.

        These are the tokens up to the first that differs, but the child keeps at least one to
        compute, since only that gives it logits. Nothing is shared where the parent has forgotten
        what the child would see.
        """
        assert not child.block_table, f"{child.request_id}: forked into, but has blocks"
        assert self.shares, f"{child.request_id}: a fork, but blocks are evicted"
        most = min(parent.num_computed, child.num_tokens - 1)
        pairs = zip(parent.token_ids(0, most), child.token_ids(0, most), strict=True)
        child.num_computed = next((i for i, (a, b) in enumerate(pairs) if a != b), most)
        self._take_tail(child)
        if self._tails is not None:
            self._share_tail(self._tails, parent, child)
        table = parent.block_table[: self.blocks_needed(child.num_computed)]
        if FORGOTTEN in table[self._first_seen(child.num_computed) :]:
            child.num_computed, table = 0, []
        child.block_table = table
        child.num_registered = child.num_computed // self.block_size
        for block in _held(child):
            self._share(block)

    def take_tail_copies(self) -> list[BlockCopy]:
        """Tail pages that forks since the last call begin with; to be copied in this order."""
        return [] if self._tails is None else self._tails.take_copies()

    def _take_tail(self, sequence: Sequence) -> None:
        if self._tails is not None:
            sequence.tail = self._tails.take()

    def _share_tail(self, tails: TailPages, parent: Sequence, child: Sequence) -> None:
        """Of an unfinished block only the parent's own is there as it was written."""
        child_page, offset = divmod(child.num_computed, self.block_size)
        if offset and child_page != parent.num_computed // self.block_size:
            child.num_computed -= offset
        elif offset:
            tails.copy(parent.tail, child.tail)

    def _forget(self, sequence: Sequence) -> None:
        """Give up what no token to come will see; the table keeps its length."""
        for index in reversed(range(self._first_seen(sequence.num_computed))):
            block = sequence.block_table[index]
            if block == FORGOTTEN:
                break
            self._release(block)
            sequence.block_table[index] = FORGOTTEN

    def free(self, sequence: Sequence) -> None:
        """Give up all the sequence's blocks, tail first; nothing of it is computed any more."""
        for block in reversed(_held(sequence)):
            self._release(block)
        if self._tails is not None and sequence.tail != NO_TAIL:
            self._tails.release(sequence.tail)
            sequence.tail = NO_TAIL
        sequence.block_table = []
        sequence.num_computed = sequence.num_registered = sequence.num_evicted = 0

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Raise :class:`AssertionError`, naming the block, unless the books are exact.

        Args:
            sequences: everyone who owns a block.
        """
        owners: Counter[int] = Counter()
        sequences = list(sequences)
        if self._tails is not None:
            self._tails.check_integrity([sequence.tail for sequence in sequences])
        for sequence in sequences:
            owners.update(_held(sequence))
            held, needed = len(sequence.block_table), self.blocks_needed(sequence.num_held)
            most = self.most_blocks(sys.maxsize)
            assert held <= most, f"{sequence.request_id}: has {held} blocks, its budget is {most}"
            assert held >= needed, f"{sequence.request_id}: has {held} blocks, computed {needed}"
            assert len(set(_held(sequence))) == len(_held(sequence)), (
                f"{sequence.request_id}: a block stands twice in {sequence.block_table}"
            )
            seen = sequence.block_table[self._first_seen(sequence.num_computed) :]
            assert FORGOTTEN not in seen, f"{sequence.request_id}: forgot what it will see"
        free = Counter(chain(self._blank, self._idle))
        for block, count in enumerate(self._ref_counts):
            assert count <= 1 or self.shares, f"block {block}: shared, although blocks are evicted"
            assert count == owners[block], (
                f"block {block}: {count} references, but in {owners[block]} tables"
            )
            assert free[block] == (count == 0), (
                f"block {block}: {count} references, and {free[block]} times in the free list"
            )
        if self._prefixes is not None:
            self._prefixes.check_integrity()
            for block in self._blank:
                assert block not in self._prefixes, f"block {block}: free as blank, but known"
            for block in self._idle:
                assert block in self._prefixes, f"block {block}: free as known, but is not"

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
        for block in self._written(sequence, num_tokens):
            assert not self._knows(block), f"block {block}: about to be written, but known"

    def _first_seen(self, position: int) -> int:
        """The first logical block that a token at this position sees."""
        if self._window is None:
            return 0
        return max(0, position - self._window + 1) // self.block_size

    def _knows(self, block: int) -> bool:
        return self._prefixes is not None and block in self._prefixes

    def _missing(self, sequence: Sequence, num_tokens: int) -> int:
        needed = self.blocks_needed(sequence.num_held + num_tokens)
        return max(needed - len(sequence.block_table), 0)

    def _written(self, sequence: Sequence, num_tokens: int) -> list[int]:
        """Blocks of its own that the next tokens would be written to."""
        first = sequence.num_held // self.block_size
        end = self.blocks_needed(sequence.num_held + num_tokens)
        return sequence.block_table[first:end]

    def _shared(self, sequence: Sequence, num_tokens: int) -> list[int]:
        """Logical blocks the next tokens would be written to that have other owners."""
        first = sequence.num_held // self.block_size
        written = enumerate(self._written(sequence, num_tokens), start=first)
        return [index for index, block in written if self._ref_counts[block] > 1]

    def _register(self, sequence: Sequence, prefixes: PrefixCache) -> None:
        num_full = sequence.num_computed // self.block_size
        for index in range(sequence.num_registered, num_full):
            own = sequence.block_table[index]
            if own == FORGOTTEN:
                continue
            known = prefixes.register(sequence, index)
            if known != own:
                self._share(known)
                sequence.block_table[index] = known
                self._release(own)
        sequence.num_registered = num_full

    def _make_private(self, sequence: Sequence, index: int) -> BlockCopy:
        copy = BlockCopy(src=sequence.block_table[index], dst=self._take())
        self._release(copy.src)
        sequence.block_table[index] = copy.dst
        return copy

    def _take(self) -> int:
        if self._blank:
            block = self._blank.popleft()
        else:
            block, _ = self._idle.popitem(last=False)
            assert self._prefixes is not None
            self._prefixes.drop(block)
        self._ref_counts[block] = 1
        return block

    def _share(self, block: int) -> None:
        if self._ref_counts[block] == 0:
            del self._idle[block]
        self._ref_counts[block] += 1

    def _release(self, block: int) -> None:
        self._ref_counts[block] -= 1
        if self._ref_counts[block] > 0:
            return
        if self._knows(block):
            self._idle[block] = None
        else:
            self._blank.append(block)


def _held(sequence: Sequence) -> list[int]:
    """The blocks of a sequence, in order."""
    return [block for block in sequence.block_table if block != FORGOTTEN]
