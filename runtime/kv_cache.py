"""The paged pool of keys and values: buffers, and what a token costs."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from qtool.runtime.blocks import BlockCopy
from qtool.runtime.config import DecoderConfig


class KVCache:
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
        self.block_size = block_size
        # Zeros, not empty: the operating system hands out zero pages on first touch, so unused
        # blocks cost no memory.
        self.keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in config.windows]
        self.values = [torch.zeros(shape, dtype=dtype, device=device) for _ in config.windows]

    def write(self, layer: int, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        """Store rows [T, num_kv_heads, head_dim] at ``slots`` [T]."""
        self.keys[layer].view(-1, *keys.shape[1:]).index_copy_(0, slots, keys)
        self.values[layer].view(-1, *values.shape[1:]).index_copy_(0, slots, values)

    def copy_blocks(self, copies: Iterable[BlockCopy]) -> None:
        """Copy whole blocks, all layers: the copy of copy-on-write."""
        for copy in copies:
            for pool in (*self.keys, *self.values):
                pool[copy.dst].copy_(pool[copy.src])
