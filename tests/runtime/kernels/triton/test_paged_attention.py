"""Attention over pages of every form, in the interpreter, against float64 row by row.

Every cache is full of NaN wherever nobody has written.
"""

from __future__ import annotations

import pytest
import torch

from qtool.runtime.kernels.backend import AttentionScope
from support.gemm import relative_error

pytest.importorskip("triton")
import triton
import triton.language as tl

from qtool.runtime.kernels.triton.attention import NOTHING, masked, softmax_step
from qtool.runtime.kernels.triton.attention_plan import AttentionPlan
from qtool.runtime.kernels.triton.target import Target
from support.paged_cases import FORMS, Case

BOUND = {torch.float16: 6e-4, torch.bfloat16: 6e-3}
SCOPES = {
    "all": AttentionScope(0.125),
    "window": AttentionScope(0.125, 40),
    "soft cap": AttentionScope(0.3, None, 2.0),
    "window, soft cap": AttentionScope(0.3, 90, 5.0),
}
# Of three sequences: chunks end inside pages, at their ends, and beyond several; then all decode.
LENGTHS = (150, 64, 5)
STEPS = (
    ((0, 70), (0, 60), (0, 0)),
    ((70, 149), (60, 63), (0, 4)),
    ((149, 150), (63, 64), (4, 5)),
)


def _check(case: Case, starts: tuple[int, ...], scope: AttentionScope) -> None:
    """Queries from ``starts`` on."""
    for index, out in enumerate(case.last(starts, scope)):
        expected = case.expected(index, scope, starts[index])
        assert relative_error(out, expected) < BOUND[case.dtype], f"sequence {index}"


@pytest.mark.parametrize("form", FORMS)
def test_a_query_sees_what_is_stored_and_its_own_page_as_it_was(form: str) -> None:
    case = Case(form, LENGTHS, kv_heads=1)
    for index, out in enumerate(case.run(STEPS, SCOPES["all"])):
        expected = case.expected(index, SCOPES["all"])
        assert relative_error(out, expected) < BOUND[case.dtype], f"sequence {index}"


@pytest.mark.parametrize("form", ["wide", "int8", "k8v4", "int4"])
@pytest.mark.parametrize("scope", ["window", "soft cap", "window, soft cap"])
def test_windows_and_soft_caps(form: str, scope: str) -> None:
    _check(Case(form, (140, 20)), (125, 19), SCOPES[scope])


@pytest.mark.parametrize("form", ["wide", "k8v4", "int4"])
def test_what_is_behind_every_window_belongs_to_others(form: str) -> None:
    case, scope = Case(form, (200,)), AttentionScope(0.125, 50)
    expected = case.expected(0, scope, 199)
    case.store([(0, 199)])
    for pool in case.pages.pools:
        pool[case.tables[0][:2]].view(torch.uint8).fill_(255)
    case.tables[0][:2] = [0, 0]
    found = case.run([[(199, 200)]], scope)[0]
    assert relative_error(found, expected) < BOUND[torch.float16]


@pytest.mark.parametrize("group", [1, 2, 3, 5, 6, 7, 8, 20])
@pytest.mark.parametrize("form", ["int8", "k8v4", "int4"])
def test_groups_of_queries_need_not_be_powers_of_two(form: str, group: int) -> None:
    _check(Case(form, (70,), group=group, kv_heads=1), (63,), SCOPES["all"])


@pytest.mark.parametrize("head_dim", [80, 96, 128, 256])
@pytest.mark.parametrize("form", ["wide", "fp8", "k8v4", "int4"])
def test_head_sizes(form: str, head_dim: int) -> None:
    _check(Case(form, (67,), group=2, head_dim=head_dim), (65,), SCOPES["all"])


@pytest.mark.parametrize("page", [16, 32, 128])
@pytest.mark.parametrize("form", ["wide", "int8"])
def test_pages_of_other_sizes(form: str, page: int) -> None:
    _check(Case(form, (130, 9), kv_heads=1, page=page), (120, 8), SCOPES["all"])


@pytest.mark.parametrize("form", FORMS)
def test_bfloat16(form: str) -> None:
    _check(Case(form, (70, 3), dtype=torch.bfloat16), (62, 2), SCOPES["window"])


def test_a_group_that_is_wider_than_a_tile() -> None:
    _check(Case("int8", (20,), group=33, kv_heads=1), (17,), SCOPES["all"])


@pytest.mark.parametrize("form", ["wide", "k8v4", "int4"])
def test_contexts_are_split_by_what_there_is_to_do_and_merged(form: str) -> None:
    case = Case(form, (1100, 30, 600), group=2, kv_heads=1, programs=2)
    starts = (1099, 29, 599)
    found = case.last(starts, SCOPES["all"])
    plan = case.pages._plans._plan
    assert plan is not None
    counts = plan.splits(None).tiles[:, 0].tolist()
    assert counts[0] > counts[2] >= 1 and counts[1] == 1
    for index, out in enumerate(found):
        expected = case.expected(index, SCOPES["all"], starts[index])
        assert relative_error(out, expected) < BOUND[torch.float16]


@pytest.mark.parametrize("form", ["int8", "k8v4", "int4"])
def test_a_row_may_see_nothing_of_a_split(form: str) -> None:
    """The first row's window reaches one page further back than the last row's: a split alone."""
    case = Case(form, (590,), group=1, kv_heads=1, fixed=64)
    _check(case, (576,), AttentionScope(0.125, 330))


@pytest.mark.parametrize("window", [0, 100])
@pytest.mark.parametrize("fixed", [None, 256])
def test_every_page_is_seen_once(fixed: int | None, window: int) -> None:
    """Work items cover each tile's pages exactly, whatever the batch."""
    lengths = (1000, 1, 65, 5000, 64)
    case = Case("wide", (1,), kv_heads=1)
    spans = [(n - 1, n) for n in lengths]
    case.lengths, case.tables = lengths, [list(range(-(-n // 64))) for n in lengths]
    case.rows = [[torch.zeros(n, 1, 64)] * 3 for n in lengths]
    rows, _ = case.batch(spans)
    plan = AttentionPlan(rows, 4, 1, 64, Target("sm_90", 3), fixed)
    splits = plan.splits(window or None)
    seen: dict[int, list[int]] = {}
    for tile, split in splits.work.tolist():
        if tile >= 0:
            count, per, base, _ = splits.tiles[tile].tolist()
            assert split < count
            seen.setdefault(tile, []).extend(range(base + split * per, base + (split + 1) * per))
    for tile, length in enumerate(lengths):
        first = max(0, length - window) // 64 if window else 0
        wanted = set(range(first, -(-length // 64)))
        assert wanted <= set(seen[tile]) and len(seen[tile]) == len(set(seen[tile]))
        if fixed:
            assert splits.tiles[tile][1] == 4 and splits.tiles[tile][2] % 4 == 0
    shared = sum(int(row[0]) for row in splits.tiles if row[0] > 1)
    assert shared <= splits.num_shared


def test_with_fixed_splits_a_rows_bits_do_not_depend_on_its_company() -> None:
    outs = []
    for others in ((0, 0), (40, 170)):
        case = Case("int8", (300, 40, 170), kv_heads=1, fixed=128)
        ends = (300, *others)
        case.store([(0, max(0, end - 1)) for end in ends])
        bounds = [(max(0, end - 1), end) for end in ends]
        rows, parts = case.batch(bounds)
        outs.append(case.pages.attend(*parts, None, rows, SCOPES["all"])[0])
    assert torch.equal(*outs)


@pytest.mark.parametrize("form", ["k8v4", "int4"])
@pytest.mark.parametrize("sizes", [(1, 130), (63, 1, 67), (64, 64, 3)])
def test_what_a_query_sees_does_not_depend_on_chunks(sizes: tuple[int, ...], form: str) -> None:
    whole = Case(form, (131,), kv_heads=1).expected(0, SCOPES["all"])
    bounds = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    steps = [[(a, b)] for a, b in zip(bounds, bounds[1:], strict=False)]
    chunked = Case(form, (131,), kv_heads=1).run(steps, SCOPES["all"])[0]
    assert relative_error(chunked, whole) < 6e-4


@triton.jit
def _weigh_kernel(
    x_ptr: tl.tensor, highest_ptr: tl.tensor, unit: tl.tensor, out_ptr: tl.tensor
) -> None:
    """What 16 rows at position 0 get of keys that come later."""
    rows = tl.arange(0, 16)
    at = rows[:, None] * 16 + rows[None, :]
    x = masked(tl.load(x_ptr + at), rows[None, :] + 1, rows[:, None] * 0, 0, False)
    p, decay, highest = softmax_step(x, tl.load(highest_ptr + rows), unit, 0)
    tl.store(out_ptr + at, p)
    tl.store(out_ptr + 256 + rows, decay)
    tl.store(out_ptr + 272 + rows, highest)


@pytest.mark.parametrize("highest", [-1e30, -3.0, 5.0])
def test_what_is_not_seen_weighs_nothing_even_where_nothing_is_seen_yet(highest: float) -> None:
    """Else a GPU's fused multiply-add leaves what rounding did of 1e30: its power is infinite."""
    assert NOTHING.value == -1e30
    out, tops = torch.full((288,), torch.nan), torch.full((16,), highest)
    _weigh_kernel[(1,)](torch.randn(16, 16), tops, 0.18, out)
    assert not out[:256].any()
    assert (out[256:272] == 1).all() and torch.equal(out[272:], tops)


def test_locks_are_free_again_after_every_launch() -> None:
    case = Case("int8", (600,), kv_heads=1, programs=2)
    first = case.last((599,), SCOPES["all"])[0]
    assert case.pages._workspace.locks.numel() and not case.pages._workspace.locks.any()
    case.pages._workspace.partials.fill_(torch.nan)
    assert torch.equal(case.run([[(599, 600)]], SCOPES["all"])[0], first)


def test_a_tile_without_rows_is_no_work() -> None:
    """What fills up a captured graph's batch."""
    case = Case("int8", (70, 3))
    rows, parts = case.batch([(0, 70), (0, 3)])
    plan = case.pages.plan(rows, 4)
    q, keys = case.pages.write(*parts, None, plan)
    plan.tiles[-1, 2] = 0
    out = case.pages.read(q, keys, parts[2], plan, SCOPES["all"])
    tile = len(plan.tiles) - 1
    assert tile not in plan.splits(None).work[:, 0].tolist()
    assert relative_error(out[:70], case.expected(0, SCOPES["all"])) < 6e-4
