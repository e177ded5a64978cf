"""Native pages hold, bit for bit, the codes and grids of the other back ends, in as many bytes."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from qtool.runtime.batch import QuerySpan
from qtool.runtime.kernels.backend import AttentionScope
from qtool.runtime.kernels.cpu.kv_attention import LayerCall
from qtool.runtime.kernels.cpu.kv_pages import KvForm, KvPages
from qtool.runtime.kv_codes import CodePool, pack_halves
from qtool.runtime.kv_schemes import FP8, FP8_STATIC, INT4, INT8, K8V4, PAGE_SIZE, WIDE, KVScheme
from support.attention import Layout
from support.native import LEVELS, library_at
from support.native_pages import Unpacked

pytestmark = pytest.mark.skipif(not LEVELS, reason="no native library here")

CPU = torch.device("cpu")
SCHEMES = {s.name: s for s in (INT8, FP8, FP8_STATIC, K8V4, INT4)}
SHAPES = [(3, 16), (1, 64), (2, 80), (1, 96), (2, 128), (1, 256)]  # KV heads, head size
SCALES = torch.tensor([[0.004], [0.01], [0.02]]), torch.tensor([0.007])


@pytest.fixture(params=LEVELS)
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    library_at(request.param).qt_pool_start(2)
    yield request.param
    library_at(request.param).qt_pool_stop()


def _scales(scheme: KVScheme, heads: int) -> tuple[tuple[Tensor, Tensor], ...]:
    return ((SCALES[0][:heads], SCALES[1]),) if scheme is FP8_STATIC else ()


def _store(
    level: str, scheme: KVScheme, keys: Tensor, values: Tensor, wide: torch.dtype = torch.float32
) -> KvPages:
    """Rows [T, heads, head_dim] of one sequence, on blocks in falling order; the rest is poison."""
    length, heads, head_dim = keys.shape
    size = scheme.block_size(None)
    count = -(-length // size)
    form = KvForm((scheme,), wide, heads, head_dim, _scales(scheme, heads))
    pages = KvPages(form, count, size, 1)
    pages.blocks[0].fill_(255)
    table = torch.arange(count).flip(0).unsqueeze(0)
    layout = Layout((QuerySpan(0, length, length),), table, False)
    call = LayerCall(pages, 0, keys, (keys, values), layout, (0,), AttentionScope(1.0, 1))
    call.run(library_at(level))
    return pages


def _pools(
    scheme: KVScheme, shape: tuple[int, int, int, int], keys: Tensor, values: Tensor
) -> list[CodePool]:
    """What the other back ends make of the same rows."""
    scales = (_scales(scheme, shape[2]) or ((None, None),))[0]
    pools = []
    for stored, rows, scale in zip(
        (scheme.keys, scheme.values), (keys, values), scales, strict=True
    ):
        assert stored is not None
        pool = CodePool(stored, shape, CPU, scale)
        blocks = torch.arange(shape[0]).flip(0)
        if scheme.has_tails:
            pool.seal(blocks, rows.unflatten(0, (-1, shape[1])))
        else:
            pool.write((blocks.unsqueeze(1) * shape[1] + torch.arange(shape[1])).flatten(), rows)
        pools.append(pool)
    return pools


def _assert_same(level: str, scheme: KVScheme, keys: Tensor, values: Tensor) -> None:
    """Rows of whole blocks."""
    size = scheme.block_size(None)
    shape = (len(keys) // size, size, *keys.shape[1:])
    assert len(shape) == 4
    found = Unpacked(_store(level, scheme, keys, values).blocks[0], scheme, shape, level)
    pools = _pools(scheme, shape, keys, values)
    parts = ((found.keys, found.key_grid), (found.values, found.value_grid))
    for (codes, grid), pool, stored in zip(parts, pools, (scheme.keys, scheme.values), strict=True):
        assert stored is not None
        packed = codes if stored.bits == 8 else pack_halves(codes)
        assert torch.equal(packed, pool.codes), (scheme.name, stored)
        # As numbers: of 0 and -0 either may be the lowest.
        assert (grid is None) == (pool.grid is None)
        assert grid is None or pool.grid is None or torch.equal(grid, pool.grid)


def _rows(count: int, heads: int, head_dim: int, seed: int) -> Tensor:
    """Of every size, with rows and channels of zeros, of equals, and of extremes."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(count, heads, head_dim, generator=generator)
    rows *= 10 ** torch.randint(-6, 6, (count, 1, 1), generator=generator)
    rows[:, :, 3] *= 50
    rows[1], rows[2], rows[3, :, ::2], rows[4] = 0.0, -2.5, 1e-30, 3e38
    rows[5, :, 0], rows[6, :, 1] = torch.inf, -torch.inf
    return rows


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", SCHEMES)
def test_codes_and_grids_are_those_of_the_other_back_ends(
    level: str, name: str, shape: tuple[int, int]
) -> None:
    keys, values = (_rows(2 * PAGE_SIZE, *shape, seed=seed) for seed in (1, 2))
    _assert_same(level, SCHEMES[name], keys, values)


@pytest.mark.parametrize("name", SCHEMES)
@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=40))
def test_whatever_the_numbers_are(name: str, numbers: list[float]) -> None:
    rows = torch.tensor(numbers).repeat(-(-PAGE_SIZE * 16 // len(numbers)))[: PAGE_SIZE * 16]
    rows = rows.view(PAGE_SIZE, 1, 16)
    _assert_same(LEVELS[0], SCHEMES[name], rows, rows.flip(0))


@pytest.mark.parametrize("scheme", [K8V4, INT4], ids=lambda scheme: scheme.name)
@pytest.mark.parametrize("wide", [torch.float32, torch.bfloat16])
def test_a_page_is_stored_from_what_its_tail_page_held(
    level: str, wide: torch.dtype, scheme: KVScheme
) -> None:
    """Row by row, in the compute dtype, as in one piece."""
    keys, values = (torch.randn(PAGE_SIZE, 2, 32, generator=torch.Generator()) for _ in "kv")
    whole = _store(level, scheme, keys.to(wide).float(), values.to(wide).float())
    pages = KvPages(KvForm((scheme,), wide, 2, 32), 1, PAGE_SIZE, 2)
    assert pages.tails is not None
    for start, end in ((0, 1), (1, 40), (40, 63), (63, 64)):
        layout = Layout((QuerySpan(0, end - start, end),), torch.tensor([[0]]), False)
        rows = keys[start:end], values[start:end]
        LayerCall(pages, 0, rows[0], rows, layout, (1,), AttentionScope(1.0)).run(library_at(level))
    assert torch.equal(pages.blocks[0], whole.blocks[0])
    assert not pages.tails[0].any() and pages.tails[1].any()


@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bytes_are_those_of_the_scheme(level: str, shape: tuple[int, int], block_size: int) -> None:
    library = library_at(level)
    library.qt_block_bytes.restype = ctypes.c_int64
    for scheme in (WIDE, *SCHEMES.values()):
        for wide in (torch.float32, torch.bfloat16):
            form = KvForm((scheme,), wide, *shape)
            size = scheme.block_size(None if scheme.has_tails else block_size)
            found = library.qt_block_bytes(ctypes.byref(form.shape(0, size)))
            assert (
                found == form.block_bytes(0, size) == scheme.page_bytes(size, *shape, wide.itemsize)
            )


def test_capacity_is_what_the_schemes_promise() -> None:
    """Heads of 64 beside bfloat16; a tail page for each of 8 sequences of 4096 tokens."""
    form = {s: KvForm((s,), torch.bfloat16, 3, 64) for s in (WIDE, INT8, INT4)}
    tokens, seqs = 8 * 4096, 8
    sizes = {
        s: tokens // PAGE_SIZE * f.block_bytes(0, PAGE_SIZE) + seqs * s.has_tails * f.tail_bytes
        for s, f in form.items()
    }
    assert sizes[WIDE] / sizes[INT8] >= 1.9
    assert sizes[WIDE] / sizes[INT4] >= 3.3


def test_layers_of_different_schemes_share_nothing() -> None:
    """Each layer's blocks are its own, at a cache line; tail pages only of those that keep them."""
    schemes = (INT4, WIDE, K8V4, INT4)
    pages = KvPages(KvForm(schemes, torch.bfloat16, 1, 80), 3, PAGE_SIZE, 5)
    assert [b.shape[1] for b in pages.blocks] == [s.page_bytes(64, 1, 80, 2) for s in schemes]
    assert pages.tails is not None and pages.tails.shape == (5, 3, 2 * 64 * 80 * 2)
    for index, blocks in enumerate(pages.blocks):
        assert blocks.data_ptr() % 64 == 0
        blocks.fill_(index + 1)
    assert all(bool((b == i + 1).all()) for i, b in enumerate(pages.blocks))
    assert not pages.tails.any()
    assert pages.structs[1].tails is None
    for number, layer in enumerate((0, 2, 3)):
        assert pages.structs[layer].tails == pages.tails[:, number].data_ptr()
