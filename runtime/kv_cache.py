"""The paged pool of keys and values: buffers, and what a token costs."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from qtool.runtime.blocks import BlockCopy
from qtool.runtime.config import DecoderConfig
from qtool.runtime.kernels.cpu.memory import huge_zeros


class BlockPools:
    """Buffers cut into fixed blocks.

    Attributes:
        block_size: tokens a block.
        pools: tensors [num_blocks, ...]; a block's share of the cache is its entry in each.
    """

    def __init__(self, block_size: int, pools: list[Tensor]) -> None:
        self.block_size, self.pools = block_size, pools

    def copy_blocks(self, copies: Iterable[BlockCopy]) -> None:
        """Copy whole blocks, all layers: the copy of copy-on-write."""
        for copy in copies:
            for pool in self.pools:
                pool[copy.dst].copy_(pool[copy.src])


class KVCache(BlockPools):
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

    def write(self, layer: int, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        """Store rows [T, num_kv_heads, head_dim] at ``slots`` [T]."""
        self.keys[layer].view(-1, *keys.shape[1:]).index_copy_(0, slots, keys)
        self.values[layer].view(-1, *values.shape[1:]).index_copy_(0, slots, values)


class PagedCache(BlockPools):
    """Keys and values in the form of native kernels.

    Attributes:
        pages: uint8 [layers, num_blocks, bytes of a layer's block].
    """

    def __init__(self, layers: int, num_blocks: int, block_size: int, page_bytes: int) -> None:
        self.pages = huge_zeros(layers * num_blocks * page_bytes).view(layers, num_blocks, -1)
        super().__init__(block_size, list(self.pages))
