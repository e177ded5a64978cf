"""Native paged attention against float64, and the same bits in any company and on any threads."""

from __future__ import annotations

import ctypes

import pytest
import torch
from torch import Tensor

from qtool.runtime.batch import QuerySpan
from qtool.runtime.kernels.backend import AttentionScope
from qtool.runtime.kernels.cpu.kv_attention import LayerCall
from qtool.runtime.kernels.cpu.kv_pages import KvForm, KvPages
from qtool.runtime.kv_schemes import FP8, FP8_STATIC, INT8, WIDE, KVScheme
from support.attention import CASES, Layout, make_case, ref_attention
from support.caches import ref_stored
from support.native import LEVELS, library_at

pytestmark = pytest.mark.skipif(not LEVELS, reason="no native library here")

SPLIT = 128  # tokens; attention.h
# Forms whose rows are stored one by one; test_native_tails.py has the others.
FORMS = {
    "fp32": (WIDE, torch.float32),
    "bf16": (WIDE, torch.bfloat16),
    "int8": (INT8, torch.float32),
    "fp8": (FP8, torch.float32),
    "fp8 static": (FP8_STATIC, torch.float32),
}
# Relative Frobenius norms. Over floats, e4m3 too: products and sums of float32, 7e-7 at most in the
# cases here. Over integer codes queries and weights are integers of 16 bits. A score of 16 to 256
# dimensions then has an error of about sqrt(dimensions) * 3 * 2**-16 / sqrt(12) of a query's
# deviation, and a weight as much of itself: 2e-5 to 1e-4 where scores have a deviation of 1 to 4.
BOUNDS = {"fp32": 1e-6, "bf16": 1e-6, "int8": 2e-4, "fp8": 2e-6, "fp8 static": 2e-6}
SHAPES = [(4, 4, 16), (9, 3, 64), (5, 1, 48), (7, 1, 80), (14, 2, 128), (16, 1, 256), (8, 8, 96)]
STATIC = torch.tensor([0.01]), torch.tensor([0.02])


class Native:
    """One layer's pages in one form, every unused byte poisoned."""

    def __init__(self, library: ctypes.CDLL, keys: Tensor, values: Tensor, name: str) -> None:
        blocks, block_size, kv_heads, head_dim = keys.shape
        self.library, (scheme, wide) = library, FORMS[name]
        scales = (STATIC,) if scheme is FP8_STATIC else ()
        form = KvForm((scheme,), wide, kv_heads, head_dim, scales)
        self.pages = KvPages(form, blocks, block_size, 0)
        # All ones: NaN in every form that has one.
        self.pages.blocks[0].fill_(255)
        self.write(keys, values)

    def write(self, keys: Tensor, values: Tensor) -> None:
        """Store all slots that hold a number."""
        slots = _numbers(keys).nonzero().flatten()
        rows = [x.flatten(0, 1)[slots].float().contiguous() for x in (keys, values)]
        pointers = [ctypes.c_void_p(t.data_ptr()) for t in (*rows, slots)]
        layer = ctypes.byref(self.pages.structs[0])
        self.library.qt_kv_store(layer, *pointers, ctypes.c_int64(len(slots)))

    def attend(self, q: Tensor, layout: Layout, scope: AttentionScope) -> Tensor:
        """[T, heads, head_dim] float32."""
        return LayerCall(self.pages, 0, q, None, layout, (), scope).run(self.library)


def _numbers(pool: Tensor) -> Tensor:
    """Which slots hold a number."""
    return ~pool.flatten(0, 1).isnan().flatten(1).all(1)


def _stored(pool: Tensor, scheme: KVScheme, wide: torch.dtype, part: str) -> Tensor:
    """What a query sees of keys or values once they are stored."""
    stored = getattr(scheme, part)
    if stored is None:
        return pool.to(wide)
    seen, slots = pool.double().flatten(0, 1), _numbers(pool)
    rows = pool.flatten(0, 1)[slots].unsqueeze(0)
    seen[slots] = ref_stored(rows, stored, STATIC[part == "values"]).squeeze(0)
    return seen.view(pool.shape)


def _run(
    library: ctypes.CDLL,
    case: list[tuple[int, int]],
    shape: tuple[int, int, int],
    name: str,
    scope: AttentionScope | None = None,
) -> tuple[Tensor, Tensor, str]:
    """Result, what it must be, and the form it was stored in."""
    q, keys, values, layout = make_case(case, *shape, torch.float32)
    scope = scope or AttentionScope(shape[2] ** -0.5)
    out = Native(library, keys, values, name).attend(q, layout, scope)
    stored = (
        _stored(pool, *FORMS[name], part) for pool, part in ((keys, "keys"), (values, "values"))
    )
    return out, ref_attention(q, *stored, layout, scope), name


def _assert_close(out: Tensor, expected: Tensor, name: str) -> None:
    error = float((out - expected).norm() / expected.norm())
    assert error < BOUNDS[name]


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("case", CASES)
def test_attention_equals_float64_over_what_is_stored(
    library: ctypes.CDLL, name: str, case: str
) -> None:
    _assert_close(*_run(library, CASES[case], (3, 1, 16), name))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_shape_of_heads_is_right(library: ctypes.CDLL, shape: tuple[int, int, int]) -> None:
    for name in FORMS:
        _assert_close(*_run(library, [(1, 35), (9, 17)], shape, name))


@pytest.mark.parametrize("window", [1, 20, 64, 200])
def test_a_window_hides_all_that_is_older(library: ctypes.CDLL, window: int) -> None:
    for name in FORMS:
        for case in ([(1, 300), (5, 150)], [(40, 40)], [(17, 290)]):
            _assert_close(*_run(library, case, (2, 1, 16), name, AttentionScope(0.25, window)))


@pytest.mark.parametrize("name", FORMS)
def test_scores_are_capped_softly(library: ctypes.CDLL, name: str) -> None:
    scope = AttentionScope(1.0, None, 2.5)
    _assert_close(*_run(library, [(1, 35), (9, 17)], (4, 2, 64), name, scope))


def test_splits_of_a_long_context_are_joined_right(library: ctypes.CDLL) -> None:
    _assert_close(*_run(library, [(2, SPLIT * 4 + 1)], (2, 2, 16), "fp32"))
    _assert_close(*_run(library, [(1, SPLIT * 3)], (3, 1, 32), "int8"))
    _assert_close(*_run(library, [(2, SPLIT * 2 + 9)], (3, 1, 128), "int8"))


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("window", [None, 100])
def test_a_row_has_the_same_bits_in_any_company_chunk_and_number_of_threads(
    library: ctypes.CDLL, name: str, window: int | None
) -> None:
    length, shape = 2 * SPLIT + 40, (6, 2, 32)
    q, keys, values, layout = make_case([(length, length)], *shape, torch.float32)
    scope = AttentionScope(0.2, window)
    native = Native(library, keys, values, name)
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


@pytest.mark.parametrize("name", FORMS)
def test_a_nan_that_a_row_may_see_reaches_its_result(library: ctypes.CDLL, name: str) -> None:
    q, keys, values, layout = make_case([(1, 20)], 1, 1, 16, torch.float32)
    scope = AttentionScope(1.0)
    sound = Native(library, keys, values, name)
    assert not sound.attend(q, layout, scope).isnan().any()
    place = (layout.block_tables[0, 0], 3, 0, 5)
    for spoiled, at in ((0, (0, 0, 5)), (1, place), (2, place)):
        tensors = [q.clone(), keys.clone(), values.clone()]
        tensors[spoiled][at] = torch.nan
        out = Native(library, *tensors[1:], name).attend(tensors[0], layout, scope)
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
        Native(library_at(level), keys, values, "int8").attend(q, layout, scope)
        for level in ("amx", "avx512")
    ]
    assert results[0].isfinite().all()
    assert torch.equal(*results)
