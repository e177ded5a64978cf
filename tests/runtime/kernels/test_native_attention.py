"""Native paged attention against float64, and the same bits in any company and on any threads."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from qtool.runtime.batch import QuerySpan
from qtool.runtime.kernels.backend import AttentionScope
from qtool.runtime.kernels.cpu.step import KV_KINDS, KvShape, declare
from support.attention import CASES, Layout, make_case, ref_attention
from support.native import LEVELS, library_at

pytestmark = pytest.mark.skipif(not LEVELS, reason="no native library here")

SPLIT = 128  # tokens; attention.h
# Relative Frobenius norms. Over float pages: products and sums of float32, 3e-7 at most in the
# cases here. Over 8-bit pages queries and weights are integers of 16 bits. A score of 16 to 256
# dimensions then has an error of about sqrt(dimensions) * 3 * 2**-16 / sqrt(12) of a query's
# deviation, and a weight as much of itself: 2e-5 to 1e-4 where scores have a deviation of 1 to 4.
BOUNDS = {torch.float32: 1e-6, torch.bfloat16: 1e-6, torch.uint8: 2e-4}
SHAPES = [(4, 4, 16), (9, 3, 64), (5, 1, 48), (14, 2, 128), (16, 1, 256)]


class _Call(ctypes.Structure):
    """AttentionLayer of attention.h."""

    _fields_ = [
        ("shape", ctypes.POINTER(KvShape)),
        ("pages", ctypes.c_void_p),
        ("spans", ctypes.c_void_p),
        ("tables", ctypes.c_void_p),
        ("table_width", ctypes.c_int64),
        ("scale", ctypes.c_float),
        ("window", ctypes.c_int64),
    ]


class Native:
    """One layer's pages in one form, every unused byte poisoned."""

    def __init__(
        self, library: ctypes.CDLL, keys: Tensor, values: Tensor, kv_dtype: torch.dtype
    ) -> None:
        blocks, block_size, kv_heads, head_dim = keys.shape
        self.library, self.kv_heads = library, kv_heads
        declare(library)
        self.shape = KvShape(KV_KINDS[kv_dtype], block_size, kv_heads, head_dim)
        tile = library.qt_tile_bytes(self.shape)
        # All ones: NaN in every form.
        self.pages = torch.full((blocks, kv_heads, block_size // 16 * tile), 255, dtype=torch.uint8)
        self.write(keys, values)

    def write(self, keys: Tensor, values: Tensor) -> None:
        """Store all slots that hold a number."""
        flat_keys, flat_values = keys.flatten(0, 1).float(), values.flatten(0, 1).float()
        slots = (~flat_keys.isnan().flatten(1).all(1)).nonzero().flatten()
        used_keys, used_values = flat_keys[slots].contiguous(), flat_values[slots].contiguous()
        pointers = [t.data_ptr() for t in (self.pages, used_keys, used_values, slots)]
        arguments = [ctypes.c_void_p(pointer) for pointer in pointers]
        self.library.qt_kv_store(ctypes.byref(self.shape), *arguments, ctypes.c_int64(len(slots)))

    def attend(self, q: Tensor, layout: Layout, scope: AttentionScope) -> Tensor:
        """[T, heads, head_dim] float32."""
        q, out = q.float().contiguous(), torch.empty(q.shape)
        spans = torch.tensor([(s.start, s.length, s.context_len) for s in layout.spans])
        tables = layout.block_tables.contiguous()
        call = _Call(
            ctypes.pointer(self.shape),
            self.pages.data_ptr(),
            spans.data_ptr(),
            tables.data_ptr(),
            tables.shape[1],
            scope.scale,
            scope.window or 0,
        )
        self.library.qt_attention(
            ctypes.byref(call),
            ctypes.c_int64(len(spans)),
            ctypes.c_int64(q.shape[1]),
            ctypes.c_void_p(q.data_ptr()),
            ctypes.c_void_p(out.data_ptr()),
        )
        return out


@pytest.fixture(params=LEVELS)
def library(request: pytest.FixtureRequest) -> Iterator[ctypes.CDLL]:
    """The library at one instruction set, on two threads."""
    library = library_at(request.param)
    library.qt_pool_start(2)
    yield library
    library.qt_pool_stop()


def _stored(x: Tensor, kv_dtype: torch.dtype) -> Tensor:
    """What a query sees of keys or values once they are stored."""
    if kv_dtype != torch.uint8:
        return x.to(kv_dtype)
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    step = (high - low) * torch.tensor(1 / 255)
    codes = ((x - low) * (1 / step)).round().clamp(0, 255)
    return low + step * codes


def _run(
    library: ctypes.CDLL,
    case: list[tuple[int, int]],
    shape: tuple[int, int, int],
    kv_dtype: torch.dtype,
    window: int | None = None,
) -> tuple[Tensor, Tensor, torch.dtype]:
    """Result, what it must be, and the form it was stored in."""
    q, keys, values, layout = make_case(case, *shape, torch.float32)
    scope = AttentionScope(shape[2] ** -0.5, window)
    out = Native(library, keys, values, kv_dtype).attend(q, layout, scope)
    stored = _stored(keys, kv_dtype), _stored(values, kv_dtype)
    return out, ref_attention(q, *stored, layout, scope), kv_dtype


def _assert_close(out: Tensor, expected: Tensor, kv_dtype: torch.dtype) -> None:
    error = float((out - expected).norm() / expected.norm())
    assert error < BOUNDS[kv_dtype]


@pytest.mark.parametrize("kv_dtype", KV_KINDS, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_attention_equals_float64_over_what_is_stored(
    library: ctypes.CDLL, kv_dtype: torch.dtype, case: str
) -> None:
    _assert_close(*_run(library, CASES[case], (3, 1, 16), kv_dtype))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_shape_of_heads_is_right(library: ctypes.CDLL, shape: tuple[int, int, int]) -> None:
    for kv_dtype in KV_KINDS:
        _assert_close(*_run(library, [(1, 35), (9, 17)], shape, kv_dtype))


@pytest.mark.parametrize("window", [1, 20, 64, 200])
def test_a_window_hides_all_that_is_older(library: ctypes.CDLL, window: int) -> None:
    for kv_dtype in KV_KINDS:
        for case in ([(1, 300), (5, 150)], [(40, 40)], [(17, 290)]):
            _assert_close(*_run(library, case, (2, 1, 16), kv_dtype, window))


def test_splits_of_a_long_context_are_joined_right(library: ctypes.CDLL) -> None:
    _assert_close(*_run(library, [(2, SPLIT * 4 + 1)], (2, 2, 16), torch.float32))
    _assert_close(*_run(library, [(1, SPLIT * 3)], (3, 1, 32), torch.uint8))


@pytest.mark.parametrize("kv_dtype", KV_KINDS, ids=str)
@pytest.mark.parametrize("window", [None, 100])
def test_a_row_has_the_same_bits_in_any_company_chunk_and_number_of_threads(
    library: ctypes.CDLL, kv_dtype: torch.dtype, window: int | None
) -> None:
    length, shape = 2 * SPLIT + 40, (6, 2, 32)
    q, keys, values, layout = make_case([(length, length)], *shape, torch.float32)
    scope = AttentionScope(0.2, window)
    native = Native(library, keys, values, kv_dtype)
    whole = native.attend(q, layout, scope)
    for threads in (1, 2, 3):
        library.qt_pool_start(threads)
        for cuts in ([1], [5], [16, 7], [131, 1, 1, 29]):
            start, sizes = 0, list(cuts)
            while start < min(length, 60) or start < length and cuts != [1]:
                size = min(sizes.pop(0) if len(sizes) > 1 else sizes[0], length - start)
                span = QuerySpan(0, size, start + size)
                chunk = Layout((span,), layout.block_tables, size == 1)
                out = native.attend(q[start : start + size], chunk, scope)
                assert torch.equal(out, whole[start : start + size]), (threads, start, size)
                start += size
        # Its last row among many others, which share its pages.
        spans = [QuerySpan(i, 1, length - 7 * i) for i in range(30)]
        company = Layout(tuple(spans), layout.block_tables.expand(30, -1), True)
        rows = torch.stack([q[length - 7 * i - 1] for i in range(30)])
        assert torch.equal(native.attend(rows, company, scope)[0], whole[-1])
        assert torch.equal(native.attend(rows, company, scope)[29], whole[length - 7 * 29 - 1])


@pytest.mark.parametrize("kv_dtype", KV_KINDS, ids=str)
def test_a_nan_that_a_row_may_see_reaches_its_result(
    library: ctypes.CDLL, kv_dtype: torch.dtype
) -> None:
    q, keys, values, layout = make_case([(1, 20)], 1, 1, 16, torch.float32)
    scope = AttentionScope(1.0)
    sound = Native(library, keys, values, kv_dtype)
    assert not sound.attend(q, layout, scope).isnan().any()
    place = (layout.block_tables[0, 0], 3, 0, 5)
    for spoiled, at in ((0, (0, 0, 5)), (1, place), (2, place)):
        tensors = [q.clone(), keys.clone(), values.clone()]
        tensors[spoiled][at] = torch.nan
        out = Native(library, *tensors[1:], kv_dtype).attend(tensors[0], layout, scope)
        assert out[..., 5].isnan().all(), spoiled


MATRIX_CASES = {
    "prompt": [(150, 150)],
    "ragged": [(3, 3), (37, 37), (1, 90), (5, 133)],
    "chunks": [(17, 290), (64, 129), (2, 128)],
}


@pytest.mark.skipif("amx" not in LEVELS, reason="no matrix unit here")
@pytest.mark.parametrize("window", [None, 1, 45, 200])
@pytest.mark.parametrize("case", MATRIX_CASES)
# A group of 1 gives full tiles, of 3 and 7 ragged ones; widths of one, several and parts of a tile
# register, 16 too narrow for one.
@pytest.mark.parametrize(
    "shape",
    [
        (2, 2, 64),
        (9, 3, 64),
        (7, 1, 80),
        (8, 1, 128),
        (4, 2, 48),
        (6, 2, 32),
        (3, 1, 16),
        (5, 1, 256),
    ],
    ids=str,
)
def test_the_matrix_unit_gives_the_bits_of_vectors(
    shape: tuple[int, int, int], case: str, window: int | None
) -> None:
    q, keys, values, layout = make_case(MATRIX_CASES[case], *shape, torch.float32)
    # Largest and smallest integers, in queries and in weights.
    q[::3] *= 20
    q[1::5] = -q[1::5].abs()
    scope = AttentionScope(shape[2] ** -0.5, window)
    results = [
        Native(library_at(level), keys, values, torch.uint8).attend(q, layout, scope)
        for level in ("amx", "avx512")
    ]
    assert results[0].isfinite().all()
    assert torch.equal(*results)
