"""The paged pools of keys and values: a layer's part each, or the native kernels' pages."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from qtool.runtime.batch import Batch
from qtool.runtime.kernels.backend import AttentionScope, Backend
from qtool.runtime.kernels.cpu.memory import huge_zeros
from qtool.runtime.kv_fused import FusedLayer, fused_layer
from qtool.runtime.kv_layers import CacheLayer, CodeLayer, PageLayer, WideLayer
from qtool.runtime.kv_schemes import WIDE, KVScheme, LayerSchemes
from qtool.runtime.kv_segments import SegmentedBatch
from qtool.runtime.rotary import RotaryRows
from qtool.runtime.tails import BlockCopy


@dataclass(frozen=True, slots=True)
class CacheForm:
    """How a decoder stores keys and values.

    Attributes:
        scales: of a checkpoint, by layer: keys' and values', float32 [1] or [num_kv_heads, 1];
            empty where the schemes have their own.
    """

    schemes: LayerSchemes
    scales: tuple[tuple[Tensor, Tensor], ...] = ()

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


class LayerCache(BlockPools):
    """A cache that a decoder reads layer by layer.

    Args:
        shape: (num_blocks, block_size, num_kv_heads, head_dim).
        num_tails: tail pages, where any layer keeps them.
        dtype: the compute dtype.
        backend: whose own pages are taken where it has them; ``None``: torch's everywhere.
    """

    def __init__(
        self,
        form: CacheForm,
        shape: tuple[int, int, int, int],
        num_tails: int,
        dtype: torch.dtype,
        device: torch.device,
        backend: Backend | None = None,
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
        self.layers = [
            self._layer(*one) for one in zip(range(len(schemes)), schemes, scales, strict=True)
        ]
        self._batch: SegmentedBatch | None = None
        pools = [pool for layer in self.layers for pool in layer.pools]
        super().__init__(shape[1], pools, [tails] if kept else [])

    @property
    def is_fused(self) -> bool:
        """Whether every layer is in the back end's own pages."""
        return all(isinstance(layer, FusedLayer) for layer in self.layers)

    def _layer(
        self, index: int, scheme: KVScheme, scales: tuple[Tensor, Tensor] | None
    ) -> CacheLayer:
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
        """Store the batch's rows of one layer, and let its queries see what is stored.

        Args:
            q: [T, num_heads, head_dim].
            keys, values: [T, num_kv_heads, head_dim].
            rotary: rows to rotate queries and keys by; ``None``: they are, or need not be.

        Returns:
            [T, num_heads, head_dim].
        """
        if self._batch is None or self._batch.batch is not batch:
            self._batch = SegmentedBatch(batch, self.block_size)
        return self.layers[layer].rotate_and_attend(
            q, keys, values, rotary, self._batch, scope, backend
        )


class PagedCache(BlockPools):
    """Keys and values in the form of native kernels.

    Attributes:
        pages: uint8 [layers, num_blocks, bytes of a layer's block].
    """

    def __init__(self, layers: int, num_blocks: int, block_size: int, page_bytes: int) -> None:
        self.pages = huge_zeros(layers * num_blocks * page_bytes).view(layers, num_blocks, -1)
        super().__init__(block_size, list(self.pages))
