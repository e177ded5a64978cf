"""Paged attention of every back end against plain einsum in float64, NaN in every unused slot."""

from __future__ import annotations

import pytest
import torch

from qtool.runtime.kernels import select_backend
from qtool.runtime.kernels.backend import AttentionScope
from support.attention import CASES, forget, make_case, ref_attention


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("window", [None, 1, 20, 64])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 4, 16), (6, 2, 24), (5, 1, 8)])
def test_attention_equals_the_reference(
    backend: str, window: int | None, case: str, heads: int, kv_heads: int, head_dim: int
) -> None:
    q, keys, values, layout = make_case(CASES[case], heads, kv_heads, head_dim, torch.float32)
    scope = AttentionScope(head_dim**-0.5, window)
    kernels = select_backend(backend, torch.device("cpu"), torch.float32).backend
    out = kernels.attention(q, keys, values, layout, scope)
    expected = ref_attention(q, keys, values, layout, scope)
    assert float((out - expected).norm() / expected.norm()) < 1e-5


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("case", CASES)
def test_scores_are_capped_before_the_softmax(backend: str, window: int | None, case: str) -> None:
    q, keys, values, layout = make_case(CASES[case], 6, 2, 16, torch.float32)
    scope = AttentionScope(1.0, window, softcap=2.0)
    kernels = select_backend(backend, torch.device("cpu"), torch.float32).backend
    expected = ref_attention(q, keys, values, layout, scope)
    out = kernels.attention(q, keys, values, layout, scope)
    assert float((out - expected).norm() / expected.norm()) < 1e-5
    uncapped = ref_attention(q, keys, values, layout, AttentionScope(1.0, window))
    assert float((uncapped - expected).norm() / expected.norm()) > 0.1


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("window", [1, 20, 64])
@pytest.mark.parametrize("case", CASES)
def test_nothing_behind_the_window_is_read(backend: str, window: int, case: str) -> None:
    q, keys, values, layout = make_case(CASES[case], 4, 2, 16, torch.float32)
    scope = AttentionScope(0.25, window)
    kernels = select_backend(backend, torch.device("cpu"), torch.float32).backend
    before = kernels.attention(q, keys, values, layout, scope)
    for pool in (keys, values):
        forget(pool, layout, window)
    assert torch.equal(kernels.attention(q, keys, values, layout, scope), before)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("case", CASES)
def test_bfloat16_attention_is_right_within_its_rounding(backend: str, case: str) -> None:
    q, keys, values, layout = make_case(CASES[case], 6, 2, 16, torch.bfloat16)
    scope = AttentionScope(0.25)
    kernels = select_backend(backend, torch.device("cpu"), torch.bfloat16).backend
    out = kernels.attention(q, keys, values, layout, scope)
    expected = ref_attention(q, keys, values, layout, scope)
    assert float((out - expected).norm() / expected.norm()) < 1e-2
