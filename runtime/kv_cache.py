"""The paged pools of keys and values: buffers, and what attention does with them.

Quantized pools run on torch: a layer at a time, the pages that a batch sees are decoded to the
compute dtype, and the back end's own attention runs over them. That takes the memory of one layer's
context in 16 bits while it runs.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from qtool.runtime.batch import Batch
from qtool.runtime.config import DecoderConfig
from qtool.runtime.kernels.backend import AttentionScope, Backend
from qtool.runtime.kernels.cpu.memory import huge_zeros
from qtool.runtime.kv_codes import CodePool
from qtool.runtime.kv_schemes import WIDE, KVScheme
from qtool.runtime.kv_segments import SegmentedBatch
from qtool.runtime.tails import BlockCopy


@dataclass(frozen=True, slots=True)
class CacheForm:
    """How a decoder stores keys and values.

    Attributes:
        scales: of a checkpoint, by layer: keys' and values', float32 [1] or [num_kv_heads, 1];
            empty where the scheme has its own.
    """

    scheme: KVScheme = WIDE
    scales: tuple[tuple[Tensor, Tensor], ...] = ()


class BlockPools:
    """Buffers cut into fixed blocks.

    Attributes:
        block_size: tokens a block.
        pools: tensors [num_blocks, ...]; a block's share of the cache is its entry in each.
        tails: tensors [num_tails, ...]: pages that are not full yet, where the form keeps them
            aside.
    """

    def __init__(
        self, block_size: int, pools: list[Tensor], tails: list[Tensor] | None = None
    ) -> None:
        self.block_size, self.pools, self.tails = block_size, pools, tails or []

    def copy_blocks(self, copies: Iterable[BlockCopy]) -> None:
        """Copy whole blocks, all layers: the copy of copy-on-write."""
        _copy(self.pools, copies)

    def copy_tails(self, copies: Iterable[BlockCopy]) -> None:
        """Copy whole tail pages, all layers, in order: what a fork begins with."""
        _copy(self.tails, copies)


def _copy(pools: list[Tensor], copies: Iterable[BlockCopy]) -> None:
    for copy in copies:
        for pool in pools:
            pool[copy.dst].copy_(pool[copy.src])


class LayerCache(BlockPools):
    """A cache that a decoder reads layer by layer."""

    @abstractmethod
    def attend(
        self,
        layer: int,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        batch: Batch,
        scope: AttentionScope,
        backend: Backend,
    ) -> Tensor:
        """Store the batch's rows of one layer, and let its queries see what is stored.

        Args:
            q: [T, num_heads, head_dim], rotated.
            keys, values: [T, num_kv_heads, head_dim], keys rotated.

        Returns:
            [T, num_heads, head_dim].
        """


class KVCache(LayerCache):
    """Keys and values of all layers in fixed blocks (drawn in ``docs/layouts.md``).

    Attributes:
        keys, values: per layer [num_blocks, block_size, num_kv_heads, head_dim].
    """

    def __init__(
        self,
        config: DecoderConfig,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (num_blocks, block_size, config.num_kv_heads, config.head_dim)
        # Zeros, not empty: the operating system hands out zero pages on first touch, so unused
        # blocks cost no memory.
        self.keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in config.windows]
        self.values = [torch.zeros(shape, dtype=dtype, device=device) for _ in config.windows]
        super().__init__(block_size, [*self.keys, *self.values])

    def attend(
        self,
        layer: int,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        batch: Batch,
        scope: AttentionScope,
        backend: Backend,
    ) -> Tensor:
        """See :meth:`LayerCache.attend`."""
        self.keys[layer].flatten(0, 1).index_copy_(0, batch.slots, keys)
        self.values[layer].flatten(0, 1).index_copy_(0, batch.slots, values)
        return backend.attention(q, self.keys[layer], self.values[layer], batch, scope)


class QuantizedCache(LayerCache):
    """Keys and values as codes, written row by row or page by page."""

    def __init__(
        self,
        form: CacheForm,
        config: DecoderConfig,
        num_blocks: int,
        block_size: int,
        num_tails: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        scheme = form.scheme
        assert scheme.keys is not None and scheme.values is not None
        shape = (num_blocks, block_size, config.num_kv_heads, config.head_dim)
        scales = form.scales or ((None, None),) * config.num_layers
        self._keys = [CodePool(scheme.keys, shape, device, key) for key, _ in scales]
        self._values = [CodePool(scheme.values, shape, device, value) for _, value in scales]
        # [num_tails, layers, keys and values, block_size, heads, head_dim]: a fork copies one run.
        tail = (num_tails if scheme.has_tails else 0, config.num_layers, 2, *shape[1:])
        self._tails = torch.zeros(tail, dtype=dtype, device=device)
        self._batch: SegmentedBatch | None = None
        pools = [pool for part in (*self._keys, *self._values) for pool in part.pools]
        super().__init__(block_size, pools, [self._tails] if scheme.has_tails else [])
        self._dtype = dtype

    def attend(
        self,
        layer: int,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        batch: Batch,
        scope: AttentionScope,
        backend: Backend,
    ) -> Tensor:
        """See :meth:`LayerCache.attend`."""
        if self._batch is None or self._batch.batch is not batch:
            self._batch = SegmentedBatch(batch, self.block_size)
        if self.tails:
            return self._attend_by_page(layer, q, keys, values, self._batch, scope, backend)
        self._keys[layer].write(batch.slots, keys)
        self._values[layer].write(batch.slots, values)
        seen = self._decode(layer, self._batch.blocks)
        return backend.attention(q, *seen, self._batch.whole, scope)

    def _attend_by_page(
        self,
        layer: int,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        batch: SegmentedBatch,
        scope: AttentionScope,
        backend: Backend,
    ) -> Tensor:
        """A page at a time: its rows see it as it is, and every page before it as stored."""
        seen = self._decode(layer, batch.blocks)
        tails = self._tails[:, layer].unbind(1)
        for pages, tail in zip(seen, tails, strict=True):
            pages.index_copy_(0, batch.first_pages, tail[batch.tails])
        out = torch.empty_like(q)
        for part in batch.segments:
            for pages, rows in zip(seen, (keys, values), strict=True):
                pages.flatten(0, 1).index_copy_(0, part.slots, rows[part.rows])
            out[part.rows] = backend.attention(q[part.rows], *seen, part, scope)
            if len(part.full_pages):
                self._seal(layer, seen, part.full_pages, batch.blocks[part.full_pages])
        for pages, tail in zip(seen, tails, strict=True):
            tail.index_copy_(0, batch.tails, pages[batch.last_pages])
        return out

    def _seal(self, layer: int, seen: tuple[Tensor, Tensor], pages: Tensor, blocks: Tensor) -> None:
        """Store full pages; whoever comes later sees what is stored."""
        self._keys[layer].seal(blocks, seen[0][pages])
        self._values[layer].seal(blocks, seen[1][pages])
        for working, stored in zip(seen, self._decode(layer, blocks), strict=True):
            working.index_copy_(0, pages, stored)

    def _decode(self, layer: int, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [n, block_size, num_kv_heads, head_dim] in the compute dtype."""
        keys, values = self._keys[layer].read(blocks), self._values[layer].read(blocks)
        return keys.to(self._dtype), values.to(self._dtype)


class PagedCache(BlockPools):
    """Keys and values in the form of native kernels.

    Attributes:
        pages: uint8 [layers, num_blocks, bytes of a layer's block].
    """

    def __init__(self, layers: int, num_blocks: int, block_size: int, page_bytes: int) -> None:
        self.pages = huge_zeros(layers * num_blocks * page_bytes).view(layers, num_blocks, -1)
        super().__init__(block_size, list(self.pages))
