"""Codes of keys and values against a plain loop, and the bytes they take."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from qtool.runtime.kv_codes import CodePool, pack_halves, unpack_halves
from qtool.runtime.kv_schemes import FP8_STATIC, SCHEMES, Stored
from support.caches import ref_stored

CPU = torch.device("cpu")
PARTS = {
    "fp8": SCHEMES["fp8"].keys,
    "fp8 static": FP8_STATIC.keys,
    "int8": SCHEMES["int8"].keys,
    "int4 keys": SCHEMES["int4"].keys,
    "int4 values": SCHEMES["int4"].values,
}


def _pages(head_dim: int = 64, num_heads: int = 2) -> Tensor:
    """Three pages with what is hard: a large mean, a constant channel, zeros, an outlier."""
    x = torch.randn(3, 16, num_heads, head_dim, generator=torch.Generator().manual_seed(1))
    x[..., 3] += 300.0
    x[..., 5] = -7.25
    x[..., 6] = 0.0
    x[1, 9] = 0.0
    x[2, :, 0, 1] *= 1e-6
    x[0, 7, 1, 2] = 1000.0
    return x


def _pool(stored: Stored, pages: Tensor, scale: Tensor | None = None) -> CodePool:
    """The pages as blocks 4, 0 and 2 of a poisoned pool."""
    pool = CodePool(stored, (5, *pages.shape[1:]), CPU, scale)  # type: ignore[arg-type]
    for tensor in pool.pools:
        tensor.view(torch.uint8).fill_(255)
    pool.seal(torch.tensor([4, 0, 2]), pages)
    return pool


@pytest.mark.parametrize("head_dim", [64, 128, 24])
@pytest.mark.parametrize("name", PARTS)
def test_pages_come_back_as_a_plain_loop_says(name: str, head_dim: int) -> None:
    stored, pages = PARTS[name], _pages(head_dim)
    assert stored is not None
    scale = torch.tensor([[0.75], [3.0]]) if stored.sharing == "checkpoint" else None
    found = _pool(stored, pages, scale).read(torch.tensor([4, 0, 2]))
    expected = ref_stored(pages, stored, scale)
    assert found.dtype == torch.float32 and torch.isfinite(found).all()
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["fp8", "int8", "int4 values"])
def test_rows_written_in_any_pieces_have_the_bits_of_whole_pages(name: str) -> None:
    stored, pages = PARTS[name], _pages()
    assert stored is not None
    whole, pieces = _pool(stored, pages), _pool(stored, torch.zeros_like(pages))
    rows = pages.flatten(0, 1)
    slots = torch.cat([torch.arange(block * 16, block * 16 + 16) for block in (4, 0, 2)])
    order = torch.randperm(len(slots), generator=torch.Generator().manual_seed(2))
    for part in order.split([1, 30, 17]):
        pieces.write(slots[part], rows[part])
    for ours, theirs in zip(pieces.pools, whole.pools, strict=True):
        for block in (4, 0, 2):
            assert torch.equal(ours[block].view(torch.uint8), theirs[block].view(torch.uint8))


@pytest.mark.parametrize("name", PARTS)
def test_a_pool_takes_the_bytes_that_the_table_says(name: str) -> None:
    stored = PARTS[name]
    assert stored is not None
    scale = torch.ones(1) if stored.sharing == "checkpoint" else None
    pool = CodePool(stored, (7, 64, 3, 128), CPU, scale)
    assert sum(tensor.nbytes for tensor in pool.pools) == 7 * 3 * stored.page_bytes(64, 128)


def test_the_largest_element_is_on_the_grid_and_none_is_further_off_than_half_a_step() -> None:
    pages = _pages()
    for name in ("int8", "int4 keys", "int4 values"):
        stored = PARTS[name]
        assert stored is not None
        found = _pool(stored, pages).read(torch.tensor([4, 0, 2]))
        if stored.sharing == "channel":
            step = (pages.amax(1, keepdim=True) - pages.amin(1, keepdim=True)) / 15
        else:
            step = pages.abs().amax(-1, keepdim=True) / (127 if stored.bits == 8 else 7)
        # A float16 grid is off by 2^-11 of its scale, minimum included.
        slack = 2.0**-10 * pages.abs().amax() + 1e-6
        assert bool(((found - pages).abs() <= 0.5 * step + slack).all()), name


def test_halves_are_packed_channel_d_below_and_d_plus_half_above() -> None:
    codes = torch.tensor([[1, 2, 3, 12, 13, 14]], dtype=torch.uint8)
    assert pack_halves(codes).tolist() == [[0xC1, 0xD2, 0xE3]]
    assert torch.equal(unpack_halves(pack_halves(codes)), codes)
