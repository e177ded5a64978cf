"""Native attention over what is stored page by page: as stored, as computed, in any chunks."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from qtool.runtime.batch import QuerySpan
from qtool.runtime.kernels.backend import AttentionScope
from qtool.runtime.kernels.cpu.kv_attention import LayerCall
from qtool.runtime.kernels.cpu.kv_pages import KvForm, KvPages
from qtool.runtime.kv_schemes import INT4, K8V4, PAGE_SIZE, KVScheme
from support.attention import Layout
from support.caches import ref_stored
from support.native import LEVELS, library_at

pytestmark = pytest.mark.skipif(not LEVELS, reason="no native library here")

# Query heads, KV heads, head size: groups of 1 to 8, widths of one group of values and of several.
SHAPES = [(2, 2, 64), (3, 1, 16), (7, 1, 80), (4, 1, 96), (8, 1, 128), (5, 1, 256)]
SCHEMES = {scheme.name: scheme for scheme in (K8V4, INT4)}
# Relative Frobenius norm: twice that of 8-bit codes (test_native_attention.py), as a code of values
# is one of 15 steps from a minimum.
BOUND = 4e-4


@pytest.fixture(params=SCHEMES)
def scheme(request: pytest.FixtureRequest) -> KVScheme:
    return SCHEMES[request.param]


@dataclass(frozen=True)
class Rows:
    """Whole sequences: queries, keys and values [T, heads, head_dim]."""

    q: Tensor
    keys: Tensor
    values: Tensor

    @classmethod
    def random(cls, length: int, shape: tuple[int, int, int], seed: int = 0) -> Rows:
        generator = torch.Generator().manual_seed(seed)
        heads, kv_heads, head_dim = shape
        sizes = (heads, kv_heads, kv_heads)
        return cls(*(torch.randn(length, n, head_dim, generator=generator) for n in sizes))

    def expected(self, scope: AttentionScope, scheme: KVScheme) -> Tensor:
        """Float64: pages before a row's own as stored, its own as it is."""
        assert scheme.keys is not None and scheme.values is not None
        length, exact, stored = len(self.q), [], []
        for rows, kind in ((self.keys, scheme.keys), (self.values, scheme.values)):
            exact.append(rows.double())
            pages = torch.nn.functional.pad(rows, (0, 0, 0, 0, 0, -length % PAGE_SIZE))
            pages = pages.unflatten(0, (-1, PAGE_SIZE))
            stored.append(ref_stored(pages, kind).flatten(0, 1)[:length])
        out, group = torch.empty(self.q.shape).double(), self.q.shape[1] // self.keys.shape[1]
        for row in range(length):
            own = row // PAGE_SIZE * PAGE_SIZE
            first = 0 if scope.window is None else max(0, row - scope.window + 1)
            keys, values = (
                torch.cat((s[:own], e[own:]))[first : row + 1].repeat_interleave(group, 1)
                for s, e in zip(stored, exact, strict=True)
            )
            scores = torch.einsum("thd,hd->ht", keys, self.q[row].double()) * scope.scale
            if scope.softcap is not None:
                scores = scope.softcap * torch.tanh(scores / scope.softcap)
            out[row] = torch.einsum("ht,thd->hd", scores.softmax(-1), values)
        return out


class Stored:
    """One sequence on poisoned pages of its own: every second block, in falling order."""

    def __init__(
        self,
        library: ctypes.CDLL,
        rows: Rows,
        scope: AttentionScope,
        scheme: KVScheme,
        wide: torch.dtype,
    ) -> None:
        self.library, self.rows, self.scope = library, rows, scope
        _, kv_heads, head_dim = rows.keys.shape
        count = -(-len(rows.q) // PAGE_SIZE)
        self.pages = KvPages(KvForm((scheme,), wide, kv_heads, head_dim), 2 * count, PAGE_SIZE, 3)
        assert self.pages.tails is not None
        for pool in (*self.pages.blocks, self.pages.tails):
            pool.fill_(255)
        self.table = torch.tensor([[2 * i for i in reversed(range(count))]])

    def run(self, start: int, end: int) -> Tensor:
        """Rows [start, end), stored and seen."""
        layout = Layout((QuerySpan(0, end - start, end),), self.table, end - start == 1)
        q, keys, values = (x[start:end] for x in (self.rows.q, self.rows.keys, self.rows.values))
        call = LayerCall(self.pages, 0, q, (keys, values), layout, (2,), self.scope)
        return call.run(self.library).clone()

    def run_all(self, sizes: Sequence[int]) -> Tensor:
        """In chunks of ``sizes``, the last of them repeated."""
        out, start, left = [], 0, list(sizes)
        while start < len(self.rows.q):
            size = left.pop(0) if len(left) > 1 else left[0]
            end = min(start + size, len(self.rows.q))
            out.append(self.run(start, end))
            start = end
        return torch.cat(out)


def _error(out: Tensor, expected: Tensor) -> float:
    return float((out - expected).norm() / expected.norm())


@pytest.mark.parametrize("window", [None, 1, 50, 130])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_row_sees_full_pages_as_stored_and_its_own_as_it_is(
    library: ctypes.CDLL, scheme: KVScheme, shape: tuple[int, int, int], window: int | None
) -> None:
    rows, scope = Rows.random(200, shape), AttentionScope(shape[2] ** -0.5, window)
    out = Stored(library, rows, scope, scheme, torch.float32).run_all([150, 1])
    expected = rows.expected(scope, scheme)
    assert _error(out, expected) < BOUND
    # Nothing is stored yet.
    assert _error(out[:PAGE_SIZE], expected[:PAGE_SIZE]) < 1e-6


def test_scores_are_capped_softly(library: ctypes.CDLL, scheme: KVScheme) -> None:
    """Of stored pages and of the own one, which begin and end splits."""
    rows, scope = Rows.random(270, (4, 2, 64)), AttentionScope(1.0, None, 2.5)
    out = Stored(library, rows, scope, scheme, torch.float32).run_all([120, 140, 1])
    assert _error(out, rows.expected(scope, scheme)) < BOUND


@pytest.mark.parametrize("wide", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 100])
def test_the_bits_do_not_depend_on_chunks_nor_on_threads(
    library: ctypes.CDLL, scheme: KVScheme, window: int | None, wide: torch.dtype
) -> None:
    rows, scope = Rows.random(270, (6, 2, 32)), AttentionScope(0.2, window)
    whole = Stored(library, rows, scope, scheme, wide).run_all([270])
    assert whole.isfinite().all()
    for threads in (1, 3):
        library.qt_pool_start(threads)
        for sizes in ([1], [63, 1, 64, 40], [64], [200, 7]):
            found = Stored(library, rows, scope, scheme, wide).run_all(sizes)
            assert torch.equal(found, whole), (threads, sizes)


def test_sequences_of_one_batch_keep_apart(library: ctypes.CDLL, scheme: KVScheme) -> None:
    """Three at different places of their pages, in chunks that cross them, against each alone."""
    shape, scope, lengths = (4, 2, 64), AttentionScope(0.2), (200, 65, 130)
    sequences = [Rows.random(n, shape, seed) for seed, n in enumerate(lengths)]
    alone = [Stored(library, r, scope, scheme, torch.bfloat16).run_all([400]) for r in sequences]
    pages = KvPages(KvForm((scheme,), torch.bfloat16, 2, 64), 12, PAGE_SIZE, 4)
    tables = torch.tensor([[9, 1, 5, 0], [2, 8, 0, 0], [3, 7, 6, 0]])
    found: list[list[Tensor]] = [[], [], []]
    for bounds in (((0, 100), (0, 64), (0, 1)), ((100, 200), (64, 65), (1, 130))):
        spans, start = [], 0
        for low, high in bounds:
            spans.append(QuerySpan(start, high - low, high))
            start += high - low
        parts = (
            torch.cat([x[low:high] for x, (low, high) in zip(rows, bounds, strict=True)])
            for rows in zip(*((r.q, r.keys, r.values) for r in sequences), strict=True)
        )
        q, keys, values = parts
        layout = Layout(tuple(spans), tables, False)
        out = LayerCall(pages, 0, q, (keys, values), layout, (3, 0, 2), scope).run(library)
        for own, span in zip(found, spans, strict=True):
            own.append(out[span.start : span.start + span.length].clone())
    for own, expected in zip(found, alone, strict=True):
        assert torch.equal(torch.cat(own), expected)


@pytest.mark.parametrize("spoiled", ["keys", "values"])
def test_a_nan_reaches_rows_before_and_after_its_page_is_stored(
    library: ctypes.CDLL, scheme: KVScheme, spoiled: str
) -> None:
    rows = Rows.random(80, (2, 1, 16))
    getattr(rows, spoiled)[40, 0, 5] = torch.nan
    out = Stored(library, rows, AttentionScope(0.3), scheme, torch.float32).run_all([1, 49, 30])
    assert out[40:, :, 5].isnan().all()
    # Rows of one item share a product, in which a weight of 0 does not hide a value's NaN.
    assert out[: 40 if spoiled == "keys" else 1].isfinite().all()


@pytest.mark.skipif("amx" not in LEVELS, reason="no matrix unit here")
@pytest.mark.parametrize("window", [None, 1, 45, 200])
@pytest.mark.parametrize("shape", [*SHAPES, (9, 3, 64), (4, 2, 48), (6, 2, 32)], ids=str)
def test_the_matrix_unit_gives_the_bits_of_vectors(
    scheme: KVScheme, shape: tuple[int, int, int], window: int | None
) -> None:
    rows, scope = Rows.random(260, shape), AttentionScope(shape[2] ** -0.5, window)
    # Largest and smallest integers, in queries and in weights.
    rows.q[::3] *= 20
    rows.q[1::5] = -rows.q[1::5].abs()
    for sizes in ([260], [17, 100, 1, 37]):
        found = [
            Stored(library_at(level), rows, scope, scheme, torch.float32).run_all(sizes)
            for level in ("amx", "avx512")
        ]
        assert found[0].isfinite().all() and torch.equal(*found)
