"""Observers do not care how tokens arrive."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from qtool.calibration.observers import AbsMax, EveryNth, Hessian, MeanAbs, MinMax
from qtool.errors import CalibrationError

OBSERVERS = (MeanAbs, AbsMax, MinMax, Hessian)

REFERENCES: dict[type, Callable[[Tensor], Tensor]] = {
    MeanAbs: lambda x: x.abs().mean(0),
    AbsMax: lambda x: x.abs().max(0).values,
    MinMax: lambda x: torch.stack((x.min(0).values, x.max(0).values)),
    Hessian: lambda x: sum(torch.outer(row, row) for row in x) / len(x),
}


@settings(max_examples=25, deadline=None)
@given(sizes=st.lists(st.integers(0, 9), min_size=1, max_size=6), seed=st.integers(0, 99))
@pytest.mark.parametrize("observer", OBSERVERS)
def test_a_statistic_depends_neither_on_order_nor_on_batch_size(
    observer: type, sizes: list[int], seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(sum(sizes) + 1, 5, generator=generator)
    gathered = observer("m")
    for batch in x[torch.randperm(len(x), generator=generator)].split([*sizes, 1]):
        gathered.update(batch)
    torch.testing.assert_close(gathered.result(), REFERENCES[observer](x), rtol=1e-4, atol=1e-5)
    assert gathered.tokens == len(x)


@pytest.mark.parametrize("observer", OBSERVERS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_input_that_is_not_finite_is_an_error_that_names_the_module(
    observer: type, bad: float
) -> None:
    x = torch.ones(3, 4)
    x[1, 2] = bad
    with pytest.raises(CalibrationError, match="self_attn.q_proj"):
        observer("self_attn.q_proj").update(x)


@pytest.mark.parametrize("observer", OBSERVERS)
def test_a_module_that_saw_nothing_has_no_statistic(observer: type) -> None:
    with pytest.raises(CalibrationError, match="saw no calibration token"):
        observer("experts.3").result()


@pytest.mark.parametrize("observer", OBSERVERS)
def test_results_are_float32_and_the_input_is_left_alone(observer: type) -> None:
    x = torch.randn(6, 3).bfloat16()
    before = x.clone()
    gathered = observer("m")
    gathered.update(x)
    gathered.update(x)
    assert gathered.result().dtype == torch.float32
    assert torch.equal(x, before)


@settings(max_examples=25, deadline=None)
@given(sizes=st.lists(st.integers(0, 9), min_size=1, max_size=6), n=st.integers(1, 7))
def test_every_nth_token_is_kept_however_they_are_batched(sizes: list[int], n: int) -> None:
    x = torch.arange(2.0 * sum(sizes)).reshape(-1, 2)
    kept = EveryNth("m", n)
    for batch in x.split(sizes):
        kept.update(batch)
    assert torch.equal(kept.result(), x[::n])
    assert kept.tokens == len(x)


def test_a_second_moment_wider_than_a_strip_is_whole_and_symmetric() -> None:
    x = torch.randn(90, 600, generator=torch.Generator().manual_seed(2))
    observer = Hessian("linear")
    observer.update(x[:50])
    observer.update(x[50:])
    expected = x.double().T @ x.double() / 90
    torch.testing.assert_close(observer.result().double(), expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(observer.result(), observer.result().T)
