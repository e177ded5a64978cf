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

Layers that see equally far share a block table, and a sequence has one for each such group
(:mod:`.kv_groups`); all take their blocks from the same cache. Blocks that no later token sees in
any layer of their group are given back while their sequence runs; :data:`FORGOTTEN` keeps their
place in the table.

Some forms of the cache write a block when it is full, and keep an unfinished one aside
(:mod:`.tails`). Then whoever begins to run gets a tail page, and a fork shares an unfinished block
by a copy of its parent's page.

With eviction a sequence holds no more blocks than its budget (:mod:`.eviction`). Its blocks are its
own alone.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from functools import partial
from itertools import chain

from qtool.errors import EngineError
from qtool.runtime.block_refs import BlockRefs
from qtool.runtime.eviction import Evictor
from qtool.runtime.kv_groups import first_seen, longest_table, most_held
from qtool.runtime.prefix_cache import PrefixCache
from qtool.runtime.sequence import FORGOTTEN, NO_TAIL, Sequence
from qtool.runtime.tails import BlockCopy, TailPages

# Block tables, one a group of layers.
Tables = SequenceOf[list[int]]


class BlockManager:
    """Hands out blocks, shares them, takes them back.

    Between steps a table has exactly the blocks that its computed tokens need.

    Args:
        windows: of each group of layers, how many tokens a token sees, itself the last; ``None``
            for all. The first group sees most.
        prefixes: remembers full blocks, if given.
        num_tails: pages for unfinished blocks; ``None`` where the form of the cache has none.
        evictor: bounds what a sequence holds, if given; then there is no prefix cache.
        max_chunk: most tokens that a sequence computes in a step.

    Raises:
        EngineError: there are no blocks, or fewer than a sequence may hold.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        windows: SequenceOf[int | None] = (None,),
        prefixes: PrefixCache | None = None,
        num_tails: int | None = None,
        evictor: Evictor | None = None,
        max_chunk: int = sys.maxsize,
    ) -> None:
        alone = prefixes is None and tuple(windows) == (None,)
        assert evictor is None or alone, "holes in what is shared"
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
        self._windows = tuple(windows)
        # Of each group the first logical block that a token at a position sees.
        self._first_seen = [
            partial(first_seen, window=window, block_size=block_size) for window in windows
        ]
        self._max_chunk = max_chunk
        self._prefixes = prefixes
        self._evictor = evictor
        self._tails = None if num_tails is None else TailPages(num_tails)
        self._refs = BlockRefs(num_blocks, prefixes)

    @property
    def num_free(self) -> int:
        """Blocks that nobody owns."""
        return self._refs.num_free

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
        """Tokens of the longest sequence that can run alone: no end where what it holds has one."""
        return longest_table(self._bounds(self._max_chunk), self.num_blocks) * self.block_size

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
            table[-1]: len(table) * self.block_size - owner.num_held
            for owner in owners
            for table in owner.tables
            if table
        }
        return (self.num_blocks - self.num_free) * self.block_size - sum(ends.values())

    def blocks_needed(self, num_tokens: int) -> int:
        """Blocks of a table that hold this many tokens."""
        return -(-num_tokens // self.block_size)

    def most_blocks(self, num_tokens: int) -> int:
        """Blocks that a sequence of so many tokens holds at most until it has computed them."""
        needed = self.blocks_needed(num_tokens)
        return sum(min(needed, bound) for bound in self._bounds(self._max_chunk))

    def to_come(self, sequence: Sequence, tables: Tables, num_tokens: int) -> int:
        """Blocks that a sequence takes at most beside ``tables``, until it has ``num_tokens``."""
        missing = self.blocks_needed(num_tokens) - len(tables[0])
        bounds = self._bounds(min(self._max_chunk, max(sequence.num_uncomputed, 1)))
        return sum(
            max(min(missing, bound - len(table) + table.count(FORGOTTEN)), 0)
            for bound, table in zip(bounds, tables, strict=True)
        )

    def _bounds(self, chunk: int) -> list[int]:
        """Most blocks that a sequence holds of each group, whatever its length."""
        if self._evictor is not None:
            return [self._evictor.rule.budget]
        return [most_held(window, chunk, self.block_size) for window in self._windows]

    def can_grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Whether :meth:`grow` would find the blocks it takes. Changes nothing."""
        num_shared = len(self._shared(sequence, num_tokens))
        num_missing = len(self._windows) * self._missing(sequence, num_tokens)
        return num_shared + num_missing <= self.num_free

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
        enough = len(shared) + len(self._windows) * missing <= self.num_free
        assert enough, f"{sequence.request_id}: no blocks left"
        copies = [self._make_private(table, index) for table, index in shared]
        if self._prefixes is not None:
            for table, index in self._written(sequence, num_tokens):
                self._prefixes.drop(table[index])
        for table in sequence.tables:
            table.extend(self._refs.take() for _ in range(missing))
        return copies

    def find_prefix(self, sequence: Sequence) -> list[list[int]]:
        """Block tables of what is known of a sequence that owns nothing. Changes nothing."""
        if self._prefixes is None or not sequence.reads_prefix:
            return [[] for _ in self._windows]
        return self._prefixes.find(sequence, self._first_seen)

    def names_computed(self, sequence: Sequence, num_tokens: int) -> list[bytes]:
        """What the prefix cache calls the blocks that its next ``num_tokens`` tokens fill."""
        if self._prefixes is None:
            return []
        first = sequence.num_computed // self.block_size
        end = (sequence.num_computed + num_tokens) // self.block_size
        return self._prefixes.names(sequence, first, end) if end > first else []

    def name_behind(self, sequence: Sequence, prefix: Tables) -> list[bytes]:
        """The same of the block that follows a prefix found for it; empty if it is not full."""
        if self._prefixes is None or not sequence.reads_prefix:
            return []
        return self._prefixes.names(sequence, len(prefix[0]), len(prefix[0]) + 1)

    def num_idle(self, prefix: Tables) -> int:
        """How many of a prefix's blocks are free now, and are not once it is adopted."""
        return sum(map(self._refs.is_idle, chain.from_iterable(prefix)))

    def adopt(self, sequence: Sequence, prefix: Tables) -> None:
        """Let a sequence that owns nothing begin with what :meth:`find_prefix` found."""
        assert not sequence.block_table, f"{sequence.request_id}: has blocks already"
        self._own(sequence, prefix)
        self._take_tail(sequence)
        sequence.num_registered = len(prefix[0])
        sequence.num_computed = sequence.num_registered * self.block_size

    def advance(self, sequence: Sequence, num_tokens: int) -> None:
        """So many more tokens are computed: make full blocks known, give up what is not seen."""
        sequence.num_computed += num_tokens
        if self._prefixes is not None:
            self._register(sequence, self._prefixes)
        self._forget(sequence)
        if self._evictor is not None:
            for block in self._evictor.evict(sequence):
                self._refs.release(block)

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
        count = self.blocks_needed(child.num_computed)
        tables = [table[:count] for table in parent.tables]
        if any(FORGOTTEN in seen for seen in self._seen(tables, child.num_computed)):
            child.num_computed, tables = 0, [[] for _ in tables]
        self._own(child, tables)
        child.num_registered = child.num_computed // self.block_size

    def take_tail_copies(self) -> list[BlockCopy]:
        """Tail pages that forks since the last call begin with; to be copied in this order."""
        return [] if self._tails is None else self._tails.take_copies()

    def _own(self, sequence: Sequence, tables: Tables) -> None:
        for block in chain.from_iterable(tables):
            if block != FORGOTTEN:
                self._refs.share(block)
        sequence.block_table, *more = tables
        sequence.more_tables = tuple(more)

    def _seen(self, tables: Tables, position: int) -> Iterator[list[int]]:
        """What a token at this position sees of each table."""
        for table, first in zip(tables, self._first_seen, strict=True):
            yield table[first(position) :]

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
        """Give up what no token to come will see; tables keep their length."""
        for table, first in zip(sequence.tables, self._first_seen, strict=True):
            for index in reversed(range(first(sequence.num_computed))):
                if table[index] == FORGOTTEN:
                    break
                self._refs.release(table[index])
                table[index] = FORGOTTEN

    def free(self, sequence: Sequence) -> None:
        """Give up all the sequence's blocks, tail first; nothing of it is computed any more."""
        for blocks in reversed(list(zip(*sequence.tables, strict=True))):
            for block in blocks:
                if block != FORGOTTEN:
                    self._refs.release(block)
        if self._tails is not None and sequence.tail != NO_TAIL:
            self._tails.release(sequence.tail)
            sequence.tail = NO_TAIL
        sequence.block_table, sequence.more_tables = [], ()
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
            self._check_tables(sequence)
        self._refs.check_integrity(owners, shares=self.shares)

    def _check_tables(self, sequence: Sequence) -> None:
        name, tables, all_held = sequence.request_id, sequence.tables, _held(sequence)
        length, needed = len(tables[0]), self.blocks_needed(sequence.num_held)
        assert length >= needed, f"{name}: has {length} blocks, computed {needed}"
        assert {len(table) for table in tables} == {length}, f"{name}: {tables} differ in length"
        assert len(set(all_held)) == len(all_held), f"{name}: a block stands twice in {tables}"
        for table, most in zip(tables, self._bounds(self._max_chunk), strict=True):
            held = length - table.count(FORGOTTEN)
            assert held <= most, f"{name}: has {held} blocks, its budget is {most}"
        for seen in self._seen(tables, sequence.num_computed):
            assert FORGOTTEN not in seen, f"{name}: forgot what it will see"

    def check_writable(self, sequence: Sequence, num_tokens: int) -> None:
        """Raise :class:`AssertionError` unless the next tokens have slots no one else reads."""
        missing = self._missing(sequence, num_tokens)
        assert missing == 0, f"{sequence.request_id}: {missing} blocks short of its chunk"
        for table, index in self._shared(sequence, num_tokens):
            raise AssertionError(
                f"block {table[index]}: about to be written by {sequence.request_id}, "
                f"but has {self._refs.num_owners(table[index])} references"
            )
        for table, index in self._written(sequence, num_tokens):
            known = self._refs.knows(table[index])
            assert not known, f"block {table[index]}: about to be written, but known"

    def _missing(self, sequence: Sequence, num_tokens: int) -> int:
        """Blocks that each of its tables lacks."""
        needed = self.blocks_needed(sequence.num_held + num_tokens)
        return max(needed - len(sequence.block_table), 0)

    def _written(self, sequence: Sequence, num_tokens: int) -> Iterator[tuple[list[int], int]]:
        """Places in its tables that the next tokens would be written to."""
        first = sequence.num_held // self.block_size
        end = self.blocks_needed(sequence.num_held + num_tokens)
        for table in sequence.tables:
            for index in range(first, min(end, len(table))):
                yield table, index

    def _shared(self, sequence: Sequence, num_tokens: int) -> list[tuple[list[int], int]]:
        """Those of them whose blocks have other owners."""
        written = self._written(sequence, num_tokens)
        return [(table, i) for table, i in written if self._refs.num_owners(table[i]) > 1]

    def _register(self, sequence: Sequence, prefixes: PrefixCache) -> None:
        num_full = sequence.num_computed // self.block_size
        for index in range(sequence.num_registered, num_full):
            for group, table in enumerate(sequence.tables):
                own = table[index]
                if own == FORGOTTEN:
                    continue
                known = prefixes.register(sequence, index, group)
                if known != own:
                    self._refs.share(known)
                    table[index] = known
                    self._refs.release(own)
        sequence.num_registered = num_full

    def _make_private(self, table: list[int], index: int) -> BlockCopy:
        copy = BlockCopy(src=table[index], dst=self._refs.take())
        self._refs.release(copy.src)
        table[index] = copy.dst
        return copy


def _held(sequence: Sequence) -> list[int]:
    """The blocks of a sequence."""
    return [block for block in chain.from_iterable(sequence.tables) if block != FORGOTTEN]
