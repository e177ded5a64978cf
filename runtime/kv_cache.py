"""The paged pools of keys and values: a layer's part each, or the native kernels' pages."""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from qtool.errors import UsageError
from qtool.runtime.attention_votes import AttentionVotes
from qtool.runtime.batch import Batch
from qtool.runtime.eviction import EvictionRule, Evictor
from qtool.runtime.kernels.backend import AttentionScope, Backend
from qtool.runtime.kernels.cpu.kv_attention import LayerCall
from qtool.runtime.kernels.cpu.kv_pages import TILE, KvForm, KvPages
from qtool.runtime.kv_fused import FusedLayer, fused_layer
from qtool.runtime.kv_groups import LayerGroups
from qtool.runtime.kv_layers import CacheLayer, CodeLayer, PageLayer, WideLayer
from qtool.runtime.kv_schemes import WIDE, KVScheme, LayerSchemes
from qtool.runtime.kv_segments import SegmentedBatch
from qtool.runtime.rotary import RotaryRows, rotate
from qtool.runtime.tails import BlockCopy


@dataclass(frozen=True, slots=True)
class CacheForm:
    """How a decoder stores keys and values.

    Attributes:
        scales: of a checkpoint, by layer: keys' and values', float32 [1] or [num_kv_heads, 1];
            empty where the schemes have their own.
        counts_votes: how much attention blocks are given is counted, for eviction; native kernels
            cannot.
    """

    schemes: LayerSchemes
    scales: tuple[tuple[Tensor, Tensor], ...] = ()
    counts_votes: bool = False

    @classmethod
    def uniform(cls, scheme: KVScheme, num_layers: int) -> CacheForm:
        """The same scheme in all layers, with its own scales."""
        return cls(LayerSchemes.uniform(scheme, num_layers))


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


class AttentionCache(BlockPools, ABC):
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
        rotary: RotaryRows | None = None,
    ) -> Tensor:
        """Store the batch's rows of one layer, and let its queries see what is stored.

        Args:
            q: [T, num_heads, head_dim].
            keys, values: [T, num_kv_heads, head_dim].
            rotary: rows to rotate queries and keys by; ``None``: they are, or need not be.

        Returns:
            [T, num_heads, head_dim].
        """


class LayerCache(AttentionCache):
    """A part a layer, each in a form of its own, on torch.

    Args:
        shape: (num_blocks, block_size, num_kv_heads, head_dim).
        num_tails: tail pages, where any layer keeps them.
        dtype: the compute dtype.
        backend: whose own pages are taken where it has them; ``None``: torch's everywhere.
        groups: which layers share blocks; all of them if ``None``.

    Attributes:
        votes: how much attention blocks are given, once :meth:`count_votes` is called.
        num_groups: of layers; a batch has block tables for each.
    """

    votes: AttentionVotes | None = None

    def __init__(
        self,
        form: CacheForm,
        shape: tuple[int, int, int, int],
        num_tails: int,
        dtype: torch.dtype,
        device: torch.device,
        backend: Backend | None = None,
        groups: LayerGroups | None = None,
    ) -> None:
        schemes = form.schemes.layers
        kept = [index for index, scheme in enumerate(schemes) if scheme.has_tails]
        # [num_tails, layers that keep one, keys and values, block_size, heads, head_dim]: a fork
        # copies one run.
        tails = torch.zeros(
            num_tails if kept else 0, len(kept), 2, *shape[1:], dtype=dtype, device=device
        )
        self._tail_of = {layer: tails[:, number] for number, layer in enumerate(kept)}
        self._shape, self._dtype, self._device = shape, dtype, device
        self._backend = backend
        scales = form.scales or (None,) * len(schemes)
        groups = groups or LayerGroups.single((None,) * len(schemes))
        at_place: dict[int, CacheLayer | FusedLayer] = {}
        self.layers: list[CacheLayer | FusedLayer] = []
        for index, (_, place) in enumerate(groups.places):
            if place in at_place:
                tail = self._tail_of.get(index)
                self.layers.append(at_place[place].beside(tail, scales[index]))
            else:
                self.layers.append(self._layer(index, schemes[index], scales[index]))
                at_place[place] = self.layers[-1]
        self._group_of = [group for group, _ in groups.places]
        self.num_groups = len(groups.windows)
        self._batches: list[SegmentedBatch] = []
        pools = [pool for layer in at_place.values() for pool in layer.pools]
        super().__init__(shape[1], pools, [tails] if kept else [])

    @property
    def is_fused(self) -> bool:
        """Whether every layer is in the back end's own pages."""
        return all(isinstance(layer, FusedLayer) for layer in self.layers)

    def _layer(
        self, index: int, scheme: KVScheme, scales: tuple[Tensor, Tensor] | None
    ) -> CacheLayer | FusedLayer:
        tails = self._tail_of.get(index)
        if self._backend is not None:
            fused = fused_layer(scheme, self._backend, self._shape, tails, scales)
            if fused is not None:
                return fused
        if scheme is WIDE:
            return WideLayer(self._shape, self._dtype, self._device)
        if tails is not None:
            return PageLayer(scheme, self._shape, tails, self._device)
        return CodeLayer(scheme, self._shape, self._dtype, self._device, scales)

    def attend(
        self,
        layer: int,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        batch: Batch,
        scope: AttentionScope,
        backend: Backend,
        rotary: RotaryRows | None = None,
    ) -> Tensor:
        """See :meth:`AttentionCache.attend`."""
        if not self._batches or self._batches[0].batch is not batch:
            parts = (batch, *batch.more)
            self._batches = [SegmentedBatch(part, self.block_size) for part in parts]
        part, seen = self.layers[layer], self._batches[self._group_of[layer]]
        if isinstance(part, FusedLayer):
            return part.attend(q, keys, values, seen.batch, scope, rotary)
        q, keys = rotate(q, rotary), rotate(keys, rotary)
        out = part.attend(q, keys, values, seen, scope, backend)
        if self.votes is not None:
            self.votes.add(q, part, batch, scope)
        return out

    def count_votes(self) -> AttentionVotes:
        """Count from now on how much attention each block is given."""
        self.votes = AttentionVotes(self._shape[0], self.block_size, self._device)
        return self.votes


def new_evictor(rule: EvictionRule, cache: BlockPools) -> Evictor:
    """One that drops what is given the least attention, which ``cache`` counts from now on."""
    assert isinstance(cache, LayerCache), "its form counts no votes"
    return Evictor(rule, cache.count_votes().weigh)


class PagedCache(AttentionCache):
    """Keys and values in the pages of native CPU kernels: for a whole step, or layer by layer.

    Args:
        shape: (num_blocks, block_size, num_kv_heads, head_dim).
        num_tails: tail pages, where any layer keeps them.
        wide: the dtype of what is kept as it was computed: float32 or bfloat16.
        groups: which layers share blocks; all of them if ``None``.

    Raises:
        UsageError: a block that is not made of whole tiles.
    """

    def __init__(
        self,
        form: CacheForm,
        shape: tuple[int, int, int, int],
        num_tails: int,
        wide: torch.dtype,
        library: ctypes.CDLL,
        groups: LayerGroups | None = None,
    ) -> None:
        num_blocks, block_size, kv_heads, head_dim = shape
        if block_size % TILE:
            raise UsageError(f"block_size={block_size}: native CPU kernels need a multiple of 16")
        stored = KvForm(form.schemes.layers, wide, kv_heads, head_dim, form.scales)
        groups = groups or LayerGroups.single((None,) * len(form.schemes.layers))
        self.pages = KvPages(stored, num_blocks, block_size, num_tails, groups)
        self._library = library
        tails = [] if self.pages.tails is None else [self.pages.tails]
        super().__init__(block_size, self.pages.blocks, tails)

    def attend(
        self,
        layer: int,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        batch: Batch,
        scope: AttentionScope,
        backend: Backend,
        rotary: RotaryRows | None = None,
    ) -> Tensor:
        """See :meth:`AttentionCache.attend`."""
        q, keys = rotate(q, rotary), rotate(keys, rotary)
        seen = batch.of_group(self.pages.structs[layer].group)
        call = LayerCall(self.pages, layer, q, (keys, values), seen, batch.tails, scope)
        return call.run(self._library).to(q.dtype)
