"""What is written into pages is what torch's pools hold, to the bit."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from qtool.runtime.kv_codes import CodePool, unpack_halves
from qtool.runtime.kv_schemes import Stored
from qtool.runtime.rotary import RotaryRows, rotate
from support.gemm import fenced

pytest.importorskip("triton")
from qtool.runtime.kernels.triton.kv_pages import Pool
from support.paged_cases import CPU, FORMS, Case, codes_of, e4m3_of

CODES = [name for name in FORMS if name != "wide"]


def _rotary(rows: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(width)
    angles = torch.rand(rows, width // 2, generator=generator) * 6.3
    angles = torch.cat((angles, angles), dim=1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def _truth(case: Case, kind: Stored, rows: Tensor, place: int) -> CodePool:
    """Torch's pool of one sequence that fills its pages in order."""
    count = len(rows) // case.page
    shape = (count, case.page, case.kv_heads, case.head_dim)
    pool = CodePool(kind, shape, CPU, None if case.scales is None else case.scales[place])
    pool.seal(torch.arange(count), rows.unflatten(0, (count, case.page)))
    return pool


def _assert_equal(pool: Pool, truth: CodePool, kind: Stored, table: Sequence[int]) -> None:
    if kind.type == "float":
        assert torch.equal(e4m3_of(pool)[table], truth.codes)
    elif kind.bits == 8:
        signed = codes_of(pool, 2)[table].to(torch.int16) - 128
        assert torch.equal(signed, truth.codes.view(torch.int8).to(torch.int16))
    else:
        assert torch.equal(codes_of(pool, 4)[table], unpack_halves(truth.codes))
    if truth.grid is None:
        assert pool.grid is None
        return
    assert pool.grid is not None
    grid = pool.grid[table]
    if kind.sharing == "head":
        expected = truth.grid.squeeze(-1).transpose(1, 2)
    elif kind.sharing == "channel":
        expected = truth.grid.transpose(2, 3)
    else:
        expected = truth.grid.permute(0, 2, 3, 4, 1)
    assert torch.equal(grid, expected)


@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize("form", CODES)
def test_codes_and_grids_have_the_bits_of_torchs_pools(form: str, head_dim: int) -> None:
    case = Case(form, (128,), group=2, head_dim=head_dim)
    values = case.rows[0][2]
    values[3, 0], values[4, 1], values[5, 0] = 0.0, 7.0, 1e-7  # all equal, and nearly nothing
    values[6, 1, 5] = 40000.0
    case.rows[0][1][:, 0, 7] = 2.5  # a channel that is constant
    for bounds in ([(0, 70)], [(70, 128)]):
        rows, parts = case.batch(bounds)
        case.pages.attend(*parts, None, rows, _NOTHING_ELSE)
    scheme = FORMS[form][1]
    assert scheme.keys is not None and scheme.values is not None
    kinds = (scheme.keys, scheme.values)
    pools = (case.pages.keys, case.pages.values)
    for place, (pool, kind) in enumerate(zip(pools, kinds, strict=True)):
        truth = _truth(case, kind, case.rows[0][1 + place], place)
        _assert_equal(pool, truth, kind, case.tables[0])


@pytest.fixture(autouse=True)
def _no_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what is written is looked at here."""
    from qtool.runtime.kernels.triton.kv_pages import TritonPages

    monkeypatch.setattr(TritonPages, "read", lambda self, q, *_: q)


_NOTHING_ELSE = None  # the scope, which nobody asks for


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [64, 32])
def test_queries_and_keys_are_rotated_and_rounded_once(width: int, dtype: torch.dtype) -> None:
    for form in ("wide", "int8", "k8v4", "int4"):
        case = Case(form, (64,), group=3, dtype=dtype)
        cos, sin = _rotary(64, width, dtype)
        rows, (q, keys, values) = case.batch([(0, 64)])
        exact = RotaryRows(cos.float(), sin.float())
        turned_q, turned = (rotate(x.float(), exact).to(dtype) for x in (q, keys))
        found = case.pages.attend(fenced(q), fenced(keys), values, (cos, sin), rows, _NOTHING_ELSE)
        assert torch.equal(found, turned_q)
        if form == "wide":
            stored = case.pages.keys.words[case.tables[0][0]]
            assert torch.equal(stored.transpose(0, 1), turned)
            continue
        kind = FORMS[form][1].keys
        assert kind is not None
        _assert_equal(case.pages.keys, _truth(case, kind, turned, 0), kind, case.tables[0])


@pytest.mark.parametrize("form", ["wide", "int8", "fp8"])
@pytest.mark.parametrize("count", [3, 40])
def test_rows_without_a_slot_are_not_stored(form: str, count: int) -> None:
    case = Case(form, (count,))
    before = [pool.clone() for pool in case.pages.pools]
    rows, parts = case.batch([(0, count)])
    rows.slots.fill_(-1)
    case.pages.attend(*parts, None, rows, _NOTHING_ELSE)
    for pool, old in zip(case.pages.pools, before, strict=True):
        assert torch.equal(pool.view(torch.uint8), old.view(torch.uint8))


def test_strided_rows_of_a_fused_projection_are_read_in_place() -> None:
    case = Case("int8", (64,), group=2)
    rows, parts = case.batch([(0, 64)])
    fused = torch.cat(parts, dim=1)
    views = fused.split((4, 2, 2), dim=1)
    case.pages.attend(*views, None, rows, _NOTHING_ELSE)
    kind = FORMS["int8"][1].keys
    assert kind is not None
    _assert_equal(case.pages.keys, _truth(case, kind, parts[1], 0), kind, case.tables[0])


@pytest.mark.parametrize("form", ["k8v4", "int4"])
def test_only_full_pages_are_sealed_and_the_rest_waits_in_the_tail_page(form: str) -> None:
    case = Case(form, (100,), group=1)
    rows, parts = case.batch([(0, 100)])
    case.pages.attend(*parts, None, rows, _NOTHING_ELSE)
    unsealed = case.pages.keys.words[case.tables[0][1]]
    assert (unsealed == -1).all(), "nobody has written there"
    assert case.pages._tails is not None
    for place in (0, 1):
        assert torch.equal(case.pages._tails[0, place, :36], parts[1 + place][64:])
