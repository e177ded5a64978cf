"""Native pages taken apart with torch alone: the codes and grids of ``runtime/kv_codes.py``."""

from __future__ import annotations

import torch
from torch import Tensor

from qtool.runtime.kv_schemes import KVScheme, Stored, group_size

TILE = 16
# Columns of a vector, by instruction set: halves of one become floats, so e4m3 depends on it.
WIDTHS = {"amx": 16, "avx512": 16, "avx2": 8, "plain": 4}
# Neighbours in the order of a word's bytes; of 4-bit codes those above them lie 4 further.
ORDER = [0, 2, 1, 3]


def _half(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.float16)


def _columns(words: Tensor, stored: Stored, width: int) -> Tensor:
    """Words [..., rows, columns * 4 bytes] as codes [..., rows * neighbours, columns]."""
    if stored.type == "float":
        parts = words.unflatten(-1, (-1, 2, width, 2))  # columns / width, odd, column, upper
        codes = parts.movedim((-1, -3), (-4, -3)).flatten(-4, -3).flatten(-2)
    else:
        parts = words.unflatten(-1, (-1, 4)).movedim(-1, -2)
        parts = parts[..., ORDER, :]
        codes = parts if stored.bits == 8 else torch.cat((parts & 15, parts >> 4), dim=-2)
    return codes.flatten(-3, -2)


class Unpacked:
    """Codes uint8 [blocks, tokens, heads, head_dim], and grids as a CodePool has them."""

    def __init__(
        self, blocks: Tensor, scheme: KVScheme, shape: tuple[int, int, int, int], level: str
    ) -> None:
        num_blocks, block_size, heads, head_dim = shape
        assert scheme.keys is not None and scheme.values is not None
        pages = blocks.view(num_blocks, heads, -1)
        self.key_grid = self.value_grid = None
        if scheme.keys.sharing == "channel":
            head = 4 * head_dim
            grid = _half(pages[..., :head]).view(num_blocks, heads, 2, head_dim)
            self.key_grid, pages = grid.transpose(-1, -2), pages[..., head:]
        tiles = pages.unflatten(-1, (block_size // TILE, -1))
        values_at = tiles.shape[-1] - head_dim * TILE * scheme.values.bits // 8
        keys_at = values_at - head_dim * TILE * scheme.keys.bits // 8
        if scheme.values.sharing == "group":
            groups = head_dim // group_size(head_dim)
            grid = _half(tiles[..., : 4 * groups * TILE]).unflatten(-1, (groups, 2, TILE))
            self.value_grid = grid.permute(0, 2, 5, 1, 3, 4).flatten(1, 2)
        elif scheme.values.sharing == "head":
            self.value_grid = self._by_token(tiles[..., : 2 * TILE])
        if scheme.keys.sharing == "head":
            self.key_grid = self._by_token(tiles[..., keys_at - 2 * TILE : keys_at])
        keys = tiles[..., keys_at:values_at].unflatten(-1, (-1, TILE * 4))
        values = tiles[..., values_at:].unflatten(-1, (-1, head_dim * 4))
        keys = _columns(keys, scheme.keys, WIDTHS[level]).transpose(-1, -2)
        values = _columns(values, scheme.values, WIDTHS[level])
        self.keys, self.values = (x.permute(0, 2, 3, 1, 4).flatten(1, 2) for x in (keys, values))

    def _by_token(self, grid: Tensor) -> Tensor:
        """[blocks, heads, tiles, 32 bytes] -> float16 [blocks, tokens, heads, 1]."""
        return _half(grid).permute(0, 2, 3, 1).flatten(1, 2).unsqueeze(-1)
