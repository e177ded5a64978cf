"""One layer's keys and values in a paged pool: what is stored, and attention over it.

Codes run on torch here: the pages that a batch sees are decoded to the compute dtype, and the back
end's own attention runs over them. That takes the memory of one layer's context in 16 bits while it
runs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from copy import copy

import torch
from torch import Tensor

from qtool.runtime.kernels.backend import AttentionScope, Backend
from qtool.runtime.kv_codes import CodePool
from qtool.runtime.kv_schemes import KVScheme
from qtool.runtime.kv_segments import SegmentedBatch

Shape = tuple[int, int, int, int]  # num_blocks, block_size, num_kv_heads, head_dim


class CacheLayer(ABC):
    """A layer's part of the cache.

    Attributes:
        pools: tensors [num_blocks, ...]; a block's share is its entry in each.
    """

    pools: list[Tensor]

    @abstractmethod
    def attend(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        batch: SegmentedBatch,
        scope: AttentionScope,
        backend: Backend,
    ) -> Tensor:
        """Store the batch's rows, and let its queries see what is stored.

        Args:
            q: [T, num_heads, head_dim], rotated.
            keys, values: [T, num_kv_heads, head_dim], keys rotated.

        Returns:
            [T, num_heads, head_dim].
        """

    @abstractmethod
    def beside(self, tails: Tensor | None, scales: tuple[Tensor, Tensor] | None) -> CacheLayer:
        """Another layer of the same form, in other blocks of the same pools.

        Args:
            tails, scales: the other's, where the form has them.
        """

    @abstractmethod
    def read_keys(self, blocks: Tensor) -> Tensor:
        """Keys of full blocks int64 [n] as queries see them later.

        Returns:
            Float32 [n, block_size, num_kv_heads, head_dim].
        """


class WideLayer(CacheLayer):
    """Keys and values in the compute dtype (drawn in ``docs/layouts.md``)."""

    def __init__(self, shape: Shape, dtype: torch.dtype, device: torch.device) -> None:
        # Zeros, not empty: the operating system hands out zero pages on first touch, so unused
        # blocks cost no memory.
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        self.pools = [self.keys, self.values]

    def attend(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        batch: SegmentedBatch,
        scope: AttentionScope,
        backend: Backend,
    ) -> Tensor:
        """See :meth:`CacheLayer.attend`."""
        for pool, rows in ((self.keys, keys), (self.values, values)):
            pool.flatten(0, 1).index_copy_(0, batch.batch.slots, rows)
        return backend.attention(q, self.keys, self.values, batch.batch, scope)

    def beside(self, tails: Tensor | None, scales: tuple[Tensor, Tensor] | None) -> CacheLayer:
        """See :meth:`CacheLayer.beside`: nothing here is one layer's own."""
        return self

    def read_keys(self, blocks: Tensor) -> Tensor:
        """See :meth:`CacheLayer.read_keys`."""
        return self.keys[blocks].float()


class CodeLayer(CacheLayer):
    """Codes written row by row: tokens share no scale.

    Args:
        scales: the checkpoint's, of keys and of values, where the scheme takes those.
    """

    def __init__(
        self,
        scheme: KVScheme,
        shape: Shape,
        dtype: torch.dtype,
        device: torch.device,
        scales: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        assert scheme.keys is not None and scheme.values is not None
        key, value = scales or (None, None)
        self._keys = CodePool(scheme.keys, shape, device, key)
        self._values = CodePool(scheme.values, shape, device, value)
        self._dtype = dtype
        self.pools = [*self._keys.pools, *self._values.pools]

    def attend(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        batch: SegmentedBatch,
        scope: AttentionScope,
        backend: Backend,
    ) -> Tensor:
        """See :meth:`CacheLayer.attend`."""
        self._keys.write(batch.batch.slots, keys)
        self._values.write(batch.batch.slots, values)
        return backend.attention(q, *self._decode(batch.blocks), batch.whole, scope)

    def beside(self, tails: Tensor | None, scales: tuple[Tensor, Tensor] | None) -> CacheLayer:
        """See :meth:`CacheLayer.beside`."""
        other = copy(self)
        key, value = scales or (None, None)
        other._keys, other._values = self._keys.beside(key), self._values.beside(value)
        return other

    def read_keys(self, blocks: Tensor) -> Tensor:
        """See :meth:`CacheLayer.read_keys`."""
        return self._keys.read(blocks).to(self._dtype).float()

    def _decode(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [n, block_size, num_kv_heads, head_dim] in the compute dtype."""
        keys, values = self._keys.read(blocks), self._values.read(blocks)
        return keys.to(self._dtype), values.to(self._dtype)


class PageLayer(CodeLayer):
    """Codes written page by page; a page that is not full lies in its sequence's tail page.

    Args:
        tails: [num_tails, keys and values, block_size, num_kv_heads, head_dim], compute dtype.
    """

    def __init__(self, scheme: KVScheme, shape: Shape, tails: Tensor, device: torch.device) -> None:
        super().__init__(scheme, shape, tails.dtype, device)
        self._tails = tails.unbind(1)

    def beside(self, tails: Tensor | None, scales: tuple[Tensor, Tensor] | None) -> CacheLayer:
        """See :meth:`CacheLayer.beside`."""
        assert tails is not None
        other = copy(self)
        other._tails = tails.unbind(1)
        return other

    def attend(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        batch: SegmentedBatch,
        scope: AttentionScope,
        backend: Backend,
    ) -> Tensor:
        """A page at a time: its rows see it as it is, and every page before it as stored."""
        seen = self._decode(batch.blocks)
        for pages, tail in zip(seen, self._tails, strict=True):
            pages.index_copy_(0, batch.first_pages, tail[batch.tails])
        out = torch.empty_like(q)
        for part in batch.segments:
            for pages, rows in zip(seen, (keys, values), strict=True):
                pages.flatten(0, 1).index_copy_(0, part.slots, rows[part.rows])
            out[part.rows] = backend.attention(q[part.rows], *seen, part, scope)
            if len(part.full_pages):
                self._seal(seen, part.full_pages, batch.blocks[part.full_pages])
        for pages, tail in zip(seen, self._tails, strict=True):
            tail.index_copy_(0, batch.tails, pages[batch.last_pages])
        return out

    def _seal(self, seen: tuple[Tensor, Tensor], pages: Tensor, blocks: Tensor) -> None:
        """Store full pages; whoever comes later sees what is stored."""
        self._keys.seal(blocks, seen[0][pages])
        self._values.seal(blocks, seen[1][pages])
        for working, stored in zip(seen, self._decode(blocks), strict=True):
            working.index_copy_(0, pages, stored)
