"""How many owners each block has, and which free one is used next. No torch here.

Free blocks are reused in this order: those of unknown contents, then the least recently freed.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from itertools import chain

from qtool.runtime.prefix_cache import PrefixCache


class BlockRefs:
    """Counted references to ``num_blocks`` blocks.

    Args:
        prefixes: knows contents of blocks, if given: those stay known while nobody owns them.
    """

    def __init__(self, num_blocks: int, prefixes: PrefixCache | None) -> None:
        self._prefixes = prefixes
        self._counts = [0] * num_blocks
        self._blank = deque(range(num_blocks))  # nobody's, of unknown contents
        self._idle: OrderedDict[int, None] = OrderedDict()  # nobody's, but known

    @property
    def num_free(self) -> int:
        """Blocks that nobody owns."""
        return len(self._blank) + len(self._idle)

    def num_owners(self, block: int) -> int:
        """Who has it in a table."""
        return self._counts[block]

    def is_idle(self, block: int) -> bool:
        """Whether nobody owns it, and its contents are known."""
        return block in self._idle

    def knows(self, block: int) -> bool:
        """Whether its contents are known."""
        return self._prefixes is not None and block in self._prefixes

    def take(self) -> int:
        """A free block, whose contents are unknown from now on."""
        if self._blank:
            block = self._blank.popleft()
        else:
            block, _ = self._idle.popitem(last=False)
            assert self._prefixes is not None
            self._prefixes.drop(block)
        self._counts[block] = 1
        return block

    def share(self, block: int) -> None:
        """One more owner, of a block that has some or is known."""
        if self._counts[block] == 0:
            del self._idle[block]
        self._counts[block] += 1

    def release(self, block: int) -> None:
        """One owner less."""
        self._counts[block] -= 1
        if self._counts[block] > 0:
            return
        if self.knows(block):
            self._idle[block] = None
        else:
            self._blank.append(block)

    def check_integrity(self, owners: Counter[int], *, shares: bool) -> None:
        """Raise :class:`AssertionError`, naming the block, unless the books are exact.

        Args:
            owners: in how many tables each block is.
            shares: whether a block may be in several.
        """
        free = Counter(chain(self._blank, self._idle))
        for block, count in enumerate(self._counts):
            assert count <= 1 or shares, f"block {block}: shared, although blocks are evicted"
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
