"""Keys or values of one layer as codes: the arithmetic of every scheme, and its pools.

Grids are rounded to float16 before codes are computed, so a code and its grid are all there is to
know. ``docs/kv-cache.md`` has the formulas, ``docs/layouts.md`` the bytes.
"""

from __future__ import annotations

from copy import copy

import torch
from torch import Tensor

from qtool.runtime.kv_schemes import Stored, group_size

FP8_MAX = 448.0  # of e4m3fn
HALF_MAX, HALF_TINY = 65504.0, 2.0**-24
CODES_4BIT = 15


def symmetric_scale(x: Tensor, stored: Stored) -> Tensor:
    """The scale that takes the largest of ``x`` [..., n] to the largest code, float16 [..., 1]."""
    largest = FP8_MAX if stored.type == "float" else 127.0
    scale = x.abs().amax(-1, keepdim=True) / largest
    return scale.clamp(HALF_TINY, HALF_MAX).half()


def encode_8bit(x: Tensor, scale: Tensor, stored: Stored) -> Tensor:
    """``x / scale`` as int8 or e4m3fn, in bytes: uint8 of x's shape."""
    scaled = x / scale.float()
    if stored.type == "float":
        return scaled.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
    return scaled.round().clamp(-127, 127).to(torch.int8).view(torch.uint8)


def decode_8bit(codes: Tensor, scale: Tensor, stored: Stored) -> Tensor:
    """Float32 of :func:`encode_8bit`'s bytes."""
    dtype = torch.float8_e4m3fn if stored.type == "float" else torch.int8
    return codes.view(dtype).float() * scale.float()


def asymmetric_grid(x: Tensor, dim: int) -> Tensor:
    """Scale and minimum along ``dim``, float16 [..., 2] with ``dim`` left out of ``...``."""
    low = x.amin(dim).clamp(-HALF_MAX, HALF_MAX).half()
    scale = (x.amax(dim) - low.float()) / CODES_4BIT
    return torch.stack((scale.clamp(HALF_TINY, HALF_MAX).half(), low), dim=-1)


def encode_4bit(x: Tensor, scale: Tensor, low: Tensor) -> Tensor:
    """The nearest of 16 steps from ``low``, uint8 of x's shape."""
    steps = ((x - low.float()) / scale.float()).round()
    return steps.clamp(0, CODES_4BIT).to(torch.uint8)


def decode_4bit(codes: Tensor, scale: Tensor, low: Tensor) -> Tensor:
    """Float32 of :func:`encode_4bit`'s codes."""
    return codes.float() * scale.float() + low.float()


def pack_halves(codes: Tensor) -> Tensor:
    """4-bit codes [..., D] as bytes [..., D / 2]: channel d below, d + D / 2 above."""
    low, high = codes.chunk(2, dim=-1)
    return low | (high << 4)


def unpack_halves(packed: Tensor) -> Tensor:
    """The inverse of :func:`pack_halves`."""
    return torch.cat((packed & 15, packed >> 4), dim=-1)


class CodePool:
    """Keys, or values, of one layer.

    Args:
        stored: how.
        shape: (num_blocks, block_size, num_kv_heads, head_dim).
        scale: the checkpoint's, float32 [1] or [num_kv_heads, 1], where ``stored`` shares those.

    Attributes:
        codes: uint8 [num_blocks, block_size, num_kv_heads, bytes of a token's codes].
        grid: float16; a head: [num_blocks, block_size, num_kv_heads, 1]; a group: [..., groups, 2];
            a channel: [num_blocks, num_kv_heads, head_dim, 2]; ``None`` with the checkpoint's.
    """

    def __init__(
        self,
        stored: Stored,
        shape: tuple[int, int, int, int],
        device: torch.device,
        scale: Tensor | None = None,
    ) -> None:
        num_blocks, block_size, num_heads, head_dim = shape
        self._stored, self._scale = stored, scale
        self._groups = head_dim // group_size(head_dim)
        width = head_dim * stored.bits // 8
        # Zeros, not empty: unused blocks cost no memory.
        self.codes = torch.zeros(
            num_blocks, block_size, num_heads, width, dtype=torch.uint8, device=device
        )
        grids = {
            "head": (num_blocks, block_size, num_heads, 1),
            "group": (num_blocks, block_size, num_heads, self._groups, 2),
            "channel": (num_blocks, num_heads, head_dim, 2),
        }
        grid_shape = grids.get(stored.sharing)
        self.grid = None
        if grid_shape is not None:
            self.grid = torch.zeros(grid_shape, dtype=torch.float16, device=device)

    @property
    def pools(self) -> list[Tensor]:
        """All that is stored, by block."""
        return [self.codes] if self.grid is None else [self.codes, self.grid]

    def beside(self, scale: Tensor | None) -> CodePool:
        """Another layer's keys, or values, in other blocks of the same pools."""
        other = copy(self)
        other._scale = scale
        return other

    def write(self, slots: Tensor, rows: Tensor) -> None:
        """Store rows [T, num_kv_heads, head_dim] at ``slots`` [T]; not where channels share."""
        codes, grid = self._encode(rows.float())
        self.codes.flatten(0, 1).index_copy_(0, slots, codes)
        if self.grid is not None and grid is not None:
            self.grid.flatten(0, 1).index_copy_(0, slots, grid)

    def seal(self, blocks: Tensor, pages: Tensor) -> None:
        """Store whole pages [n, block_size, num_kv_heads, head_dim] as ``blocks`` [n]."""
        if self._stored.sharing != "channel":
            offsets = torch.arange(pages.shape[1], device=blocks.device)
            slots = (blocks.unsqueeze(1) * pages.shape[1] + offsets).flatten()
            self.write(slots, pages.flatten(0, 1))
            return
        assert self.grid is not None
        pages = pages.float()
        grid = asymmetric_grid(pages, dim=1)
        scale, low = grid.unsqueeze(1).unbind(-1)
        self.codes.index_copy_(0, blocks, pack_halves(encode_4bit(pages, scale, low)))
        self.grid.index_copy_(0, blocks, grid)

    def read(self, blocks: Tensor) -> Tensor:
        """Pages of ``blocks`` [n], float32 [n, block_size, num_kv_heads, head_dim]."""
        codes = self.codes[blocks]
        if self.grid is None:
            assert self._scale is not None
            return decode_8bit(codes, self._scale, self._stored)
        grid = self.grid[blocks]
        if self._stored.sharing == "head":
            return decode_8bit(codes, grid, self._stored)
        codes = unpack_halves(codes)
        if self._stored.sharing == "channel":
            scale, low = grid.unsqueeze(1).unbind(-1)
            return decode_4bit(codes, scale, low)
        scale, low = grid.unsqueeze(-2).unbind(-1)
        return decode_4bit(codes.unflatten(-1, (self._groups, -1)), scale, low).flatten(-2)

    def _encode(self, rows: Tensor) -> tuple[Tensor, Tensor | None]:
        """Codes and grid of rows [T, num_kv_heads, head_dim]."""
        if self._stored.sharing == "checkpoint":
            assert self._scale is not None
            return encode_8bit(rows, self._scale, self._stored), None
        if self._stored.sharing == "head":
            scale = symmetric_scale(rows, self._stored)
            return encode_8bit(rows, scale, self._stored), scale
        assert self._stored.sharing == "group", "a channel's elements are written page by page"
        groups = rows.unflatten(-1, (self._groups, -1))
        grid = asymmetric_grid(groups, dim=-1)
        scale, low = grid.unsqueeze(-2).unbind(-1)
        return pack_halves(encode_4bit(groups, scale, low).flatten(-2)), grid
