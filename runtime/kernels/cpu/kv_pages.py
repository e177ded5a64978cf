"""The cache of keys and values in the native kernels' own pages: memory, and C structs over it.

Mirrors ``native/kv_pages.h`` and ``native/attention.h`` field by field; ``docs/layouts.md`` draws
the pages. Codes, scales and sizes are those of every other back end.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qtool.runtime.kernels.cpu.memory import huge_zeros
from qtool.runtime.kv_groups import LayerGroups
from qtool.runtime.kv_schemes import (
    FP8,
    FP8_STATIC,
    INT4,
    INT8,
    K8V4,
    PAGE_SIZE,
    WIDE,
    KVScheme,
)

TILE = 16  # tokens of a tile, and lanes of a vector
MAX_HEAD_DIM = 256
ALIGNMENT = 64

# enum KvKind of kv_pages.h.
WIDE_KINDS = {torch.float32: 0, torch.bfloat16: 1}
KINDS = {INT8: 2, FP8: 3, FP8_STATIC: 4, K8V4: 5, INT4: 6}


def takes_heads(head_dim: int) -> bool:
    """Whether the kernels take heads of this size."""
    return head_dim % TILE == 0 and head_dim <= MAX_HEAD_DIM


def takes(schemes: Sequence[KVScheme], head_dim: int) -> bool:
    """Whether the kernels take layers of these schemes, with heads of this size."""
    return takes_heads(head_dim) and all(s is WIDE or s in KINDS for s in schemes)


class KvShape(ctypes.Structure):
    """Shape and form of a layer's pages."""

    _fields_ = [
        (name, ctypes.c_int64)
        for name in ("kind", "tail_kind", "block_size", "kv_heads", "head_dim")
    ]


class KvLayer(ctypes.Structure):
    """A layer's part of the cache."""

    _fields_ = (
        ("shape", KvShape),
        ("pages", ctypes.c_void_p),
        ("tails", ctypes.c_void_p),
        ("tail_stride", ctypes.c_int64),
        ("key_scales", ctypes.c_void_p),
        ("value_scales", ctypes.c_void_p),
        ("group", ctypes.c_int64),
    )


@dataclass(frozen=True, slots=True)
class KvForm:
    """How layers are stored by native kernels.

    Attributes:
        schemes: of each layer.
        wide: the compute dtype: float32 or bfloat16.
        scales: a checkpoint's, by layer: keys' and values', [1] or [num_kv_heads, 1]; empty where
            no layer takes them.
    """

    schemes: tuple[KVScheme, ...]
    wide: torch.dtype
    num_kv_heads: int
    head_dim: int
    scales: tuple[tuple[Tensor, Tensor], ...] = ()

    def shape(self, layer: int, block_size: int) -> KvShape:
        """What the kernels are told of a layer's pages."""
        wide = WIDE_KINDS[self.wide]
        kind = KINDS.get(self.schemes[layer], wide)
        return KvShape(kind, wide, block_size, self.num_kv_heads, self.head_dim)

    def block_bytes(self, layer: int, block_size: int) -> int:
        """Bytes of one layer's block: keys and values of all heads."""
        return self.schemes[layer].page_bytes(
            block_size, self.num_kv_heads, self.head_dim, self.wide.itemsize
        )

    @property
    def tail_bytes(self) -> int:
        """Bytes of one layer's tail page."""
        return WIDE.page_bytes(PAGE_SIZE, self.num_kv_heads, self.head_dim, self.wide.itemsize)


class KvPages:
    """Zeroed pages of all layers, and what the kernels are told of them.

    Args:
        block_size: tokens a block, whole tiles.
        num_tails: tail pages, where any layer keeps them.
        groups: which layers share blocks; those at one place are of one form.

    Attributes:
        blocks: uint8 [num_blocks, bytes of a layer's page], one for each place in a block.
        tails: uint8 [num_tails, layers that keep one, bytes of a tail page]: a fork copies one run.
        structs: a :class:`KvLayer` each, valid as long as this object lives.
    """

    def __init__(
        self,
        form: KvForm,
        num_blocks: int,
        block_size: int,
        num_tails: int,
        groups: LayerGroups | None = None,
    ) -> None:
        assert block_size % TILE == 0
        self.form, self.block_size = form, block_size
        layers = range(len(form.schemes))
        self._groups = groups or LayerGroups.single((None,) * len(layers))
        sizes = [form.block_bytes(i, block_size) for i in self._groups.first_of_place()]
        self.blocks = _places(sizes, num_blocks)
        kept = [i for i in layers if form.schemes[i].has_tails]
        size = num_tails * len(kept) * form.tail_bytes
        self.tails = huge_zeros(size).view(-1, len(kept), form.tail_bytes) if size else None
        self._scales = [_by_head(pair, form.num_kv_heads) for pair in form.scales]
        self.structs = (KvLayer * len(layers))(*map(self._struct, layers))
        for number, layer in enumerate(kept):
            assert self.tails is not None, "layers that keep tail pages, and room for none"
            self.structs[layer].tails = self.tails[:, number].data_ptr()
            self.structs[layer].tail_stride = len(kept) * form.tail_bytes

    def tail_numbers(self, tails: Sequence[int]) -> Tensor | None:
        """Tail pages of a batch's sequences, int64 [S]; ``None`` where layers keep none."""
        if self.tails is None:
            return None
        assert all(0 <= tail < len(self.tails) for tail in tails), tails
        return torch.tensor(tails, dtype=torch.int64)

    def _struct(self, layer: int) -> KvLayer:
        group, place = self._groups.places[layer]
        struct = KvLayer(self.form.shape(layer, self.block_size), self.blocks[place].data_ptr())
        struct.group = group
        if self._scales:
            keys, values = self._scales[layer]
            struct.key_scales, struct.value_scales = keys.data_ptr(), values.data_ptr()
        return struct


def _places(sizes: Sequence[int], num_blocks: int) -> list[Tensor]:
    """uint8 [num_blocks, size] for each of ``sizes``, in one run, each at a cache line."""
    padded = [-(-size * num_blocks // ALIGNMENT) * ALIGNMENT for size in sizes]
    parts = huge_zeros(sum(padded)).split(padded)
    return [
        part[: size * num_blocks].view(num_blocks, size)
        for part, size in zip(parts, sizes, strict=True)
    ]


def _by_head(scales: tuple[Tensor, Tensor], num_kv_heads: int) -> tuple[Tensor, Tensor]:
    """Float32 [num_kv_heads] each."""
    keys, values = (s.float().flatten().expand(num_kv_heads).contiguous() for s in scales)
    return keys, values
