"""Which tail page is whose: blocks that are not full yet, kept aside. No torch here.

A form of the cache whose scales span a block's tokens can write a block only when it is full. Until
then it lies in the compute dtype in a tail page, one for each running sequence.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple


class BlockCopy(NamedTuple):
    """Copy the whole of block ``src`` over block ``dst``; likewise of tail pages."""

    src: int
    dst: int


class TailPages:
    """Hands out tail pages, and remembers which to copy."""

    def __init__(self, num_tails: int) -> None:
        self._num_tails = num_tails
        self._free = deque(range(num_tails))
        self._copies: list[BlockCopy] = []

    @property
    def num_free(self) -> int:
        """Pages that nobody has."""
        return len(self._free)

    def take(self) -> int:
        """A page of unknown contents. Ask :attr:`num_free` first."""
        return self._free.popleft()

    def release(self, tail: int) -> None:
        """Take a page back."""
        self._free.append(tail)

    def copy(self, src: int, dst: int) -> None:
        """Copy a page before the next step writes any.

        Either may change hands until then: whoever gets ``src`` writes to it later, and whoever
        gets ``dst`` reads nothing that it has not written, or copied later, itself.
        """
        self._copies.append(BlockCopy(src, dst))

    def take_copies(self) -> list[BlockCopy]:
        """Copies asked for since the last call, to be made in this order."""
        copies, self._copies = self._copies, []
        return copies

    def check_integrity(self, owned: SequenceOf[int]) -> None:
        """Raise :class:`AssertionError` unless each page is free, or one owner's."""
        pages = sorted([*owned, *self._free])
        assert pages == list(range(self._num_tails)), f"tail pages: {pages}"
