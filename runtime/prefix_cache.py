"""Full blocks found again by the tokens they hold. No torch here.

A block is known by a digest: sha256 over its parent's digest and its own tokens. The chain begins
with the form of the cache, the block size and the request's salt, so tenants with different salts
never share a block, nor learn from the time an answer takes what others have asked. On a hit the
tokens are compared as well: a colliding digest is a miss, not somebody else's text.

Layers that have block tables of their own (:mod:`.kv_groups`) have blocks of their own, known
under the same digests.

Who owns a block, and when one that is known is given to somebody else, is
:class:`~qtool.runtime.blocks.BlockManager`'s business.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from functools import cache, partial
from hashlib import sha256
from typing import NamedTuple

from qtool.runtime.sequence import FORGOTTEN, Sequence


class _Known(NamedTuple):
    block: int
    parent: bytes
    tokens: list[int]


def chain_digest(parent: bytes, tokens: list[int]) -> bytes:
    """The digest of a block, given its parent's and its tokens."""
    return sha256(parent + array("q", tokens).tobytes()).digest()


class PrefixCache:
    """Which block holds the keys and values of which prefix.

    Args:
        block_size: tokens of a block; a part of one is never known.
        scheme: how keys and values are stored; caches of different form share nothing.
    """

    def __init__(self, block_size: int, scheme: str = "") -> None:
        self._block_size = block_size
        self._scheme = scheme
        # By group and digest.
        self._known: dict[tuple[int, bytes], _Known] = {}
        self._key_of: dict[int, tuple[int, bytes]] = {}

    def __contains__(self, block: int) -> bool:
        return block in self._key_of

    def __len__(self) -> int:
        """Blocks whose contents are known."""
        return len(self._known)

    def register(self, sequence: Sequence, index: int, group: int = 0) -> int:
        """Make a sequence's full and computed block of one group known.

        Returns:
            The block that holds these tokens: its own, or one that was known before. The
            sequence had better use that one, and give its own back.
        """
        self._extend_digests(sequence, index + 1)
        key = group, sequence.block_digests[index]
        parent, tokens = self._parent(sequence, index), self._tokens(sequence, index)
        entry = _Known(sequence.tables[group][index], parent, tokens)
        known = self._known.get(key)
        if known is not None:
            return known.block if known[1:] == entry[1:] else entry.block
        self._known[key] = entry
        self._key_of[entry.block] = key
        return entry.block

    def drop(self, block: int) -> None:
        """Its contents are about to change. Nothing happens if they were not known."""
        if (key := self._key_of.pop(block, None)) is not None:
            del self._known[key]

    def find(
        self, sequence: Sequence, first_seen: SequenceOf[Callable[[int], int]]
    ) -> list[list[int]]:
        """Block tables of the longest known prefix that leaves a token to compute.

        Args:
            sequence: with any number of tokens.
            first_seen: of each group the first logical block that a token at a position sees.
                Those before it need not be known; in the table they are
                :data:`~.sequence.FORGOTTEN`.
        """
        size, lookup = self._block_size, cache(partial(self._lookup, sequence))
        windows = {g: s for g, s in enumerate(first_seen) if s(sequence.num_tokens) > 0}
        whole = [group for group in range(len(first_seen)) if group not in windows]
        length = (sequence.num_tokens - 1) // size
        known = (all(lookup(i, g) != FORGOTTEN for g in whole) for i in range(length))
        length = next((index for index, is_known in enumerate(known) if not is_known), length)
        # What a prefix sees of a window is seen by all shorter ones that are long enough.
        while (hole := _last_hole(length, size, windows, lookup)) is not None:
            length = hole
        unseen = [min(seen(length * size), length) for seen in first_seen]
        return [
            [FORGOTTEN] * gone + [lookup(index, group) for index in range(gone, length)]
            for group, gone in enumerate(unseen)
        ]

    def names(self, sequence: Sequence, first: int, end: int) -> list[bytes]:
        """What the cache calls a sequence's full blocks ``[first, end)``, known or not."""
        end = min(end, sequence.num_tokens // self._block_size)
        self._extend_digests(sequence, end)
        return sequence.block_digests[first:end]

    def check_integrity(self) -> None:
        """Raise :class:`AssertionError` unless both directions of the book agree."""
        blocks = {entry.block: key for key, entry in self._known.items()}
        assert blocks == self._key_of, "the prefix cache knows a block by two names"

    def _lookup(self, sequence: Sequence, index: int, group: int) -> int:
        self._extend_digests(sequence, index + 1)
        known = self._known.get((group, sequence.block_digests[index]))
        if known is None or known.parent != self._parent(sequence, index):
            return FORGOTTEN
        return known.block if known.tokens == self._tokens(sequence, index) else FORGOTTEN

    def _parent(self, sequence: Sequence, index: int) -> bytes:
        if index > 0:
            return sequence.block_digests[index - 1]
        return sha256(repr((self._scheme, self._block_size, sequence.cache_salt)).encode()).digest()

    def _tokens(self, sequence: Sequence, index: int) -> list[int]:
        return sequence.token_ids(index * self._block_size, (index + 1) * self._block_size)

    def _extend_digests(self, sequence: Sequence, count: int) -> None:
        """Tokens only ever grow, so a digest is computed once."""
        for index in range(len(sequence.block_digests), count):
            parent = self._parent(sequence, index)
            sequence.block_digests.append(chain_digest(parent, self._tokens(sequence, index)))


def _last_hole(
    length: int,
    block_size: int,
    windows: Mapping[int, Callable[[int], int]],
    lookup: Callable[[int, int], int],
) -> int | None:
    """A block that is not known, of those that the token behind a prefix of ``length`` sees."""
    for group, first_seen in windows.items():
        first = min(first_seen(length * block_size), length - 1)
        for index in reversed(range(max(first, 0), length)):
            if lookup(index, group) == FORGOTTEN:
                return index
    return None
