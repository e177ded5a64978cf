"""Reported log-probabilities are the model's own, finite, ranked, and equal for every batch."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from qtool.errors import EngineError
from qtool.runtime.logprobs import MIN_LOGPROB, report
from qtool.runtime.outputs import Logprobs
from qtool.runtime.sampler import SamplerRow, make_generator, prompt_logprobs, sample
from qtool.runtime.sampling_params import SamplingParams


def _reference(logits: Tensor, token: int, count: int) -> tuple[list[tuple[int, int]], Tensor]:
    """(token, rank) of the chosen and the top ones, and float64 log-probabilities [vocab]."""
    values = logits.tolist()
    order = sorted(range(len(values)), key=lambda i: (-values[i], i))
    chosen = (token, order.index(token) + 1)
    top = [(t, rank) for rank, t in enumerate(order[:count], start=1)]
    return [chosen, *top], logits.double().log_softmax(-1)


def _assert_matches(found: Logprobs, logits: Tensor, token: int, count: int) -> None:
    expected, logprobs = _reference(logits, token, count)
    entries = [found.chosen, *found.top]
    assert [(e.token_id, e.rank) for e in entries] == expected
    for entry in entries:
        assert entry.logprob == pytest.approx(float(logprobs[entry.token_id]), abs=1e-5)
        assert entry.logprob <= 0


@given(
    st.lists(st.sampled_from([-2.0, 0.0, 0.5, 3.0]), min_size=1, max_size=12),
    st.integers(0, 11),
    st.integers(0, 20),
)
def test_entries_are_ranked_by_logit_and_then_by_id(
    values: list[float], token: int, count: int
) -> None:
    logits, token = torch.tensor([values]), token % len(values)
    _assert_matches(report(logits, [token], count)[0], logits[0], token, count)


def test_sampled_logprobs_ignore_temperature_penalties_and_masks() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 0.0]])
    params = SamplingParams(
        temperature=0.1,
        top_k=2,
        logit_bias={1: -50.0},
        presence_penalty=2.0,
        allowed_token_ids=[0, 1, 3],
        logprobs=3,
    )
    row = SamplerRow(params, (), (2,), make_generator(0))
    result = sample(logits, [row])[0]
    assert result.token_id == 0
    assert result.logprobs is not None
    _assert_matches(result.logprobs, logits[0], 0, 3)


def test_only_rows_that_ask_get_logprobs_and_as_many_as_they_ask() -> None:
    logits = torch.randn(3, 9, generator=torch.Generator().manual_seed(0))
    rows = [
        SamplerRow(SamplingParams(logprobs=count), (), (), make_generator(0))
        for count in (None, 0, 4)
    ]
    none, zero, four = (sampled.logprobs for sampled in sample(logits, rows))
    assert none is None
    assert zero is not None and zero.top == ()
    assert four is not None and len(four.top) == 4


def test_an_impossible_token_has_a_finite_logprob() -> None:
    logits = torch.tensor([[0.0, -math.inf, -1e30]])
    found = report(logits, [1], 3)[0]
    assert found.chosen.logprob == MIN_LOGPROB
    assert [e.logprob for e in found.top] == [0.0, MIN_LOGPROB, MIN_LOGPROB]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_prompt_logprobs_score_each_token_in_its_own_row(dtype: torch.dtype) -> None:
    positions, vocab = 300, 23  # more positions than are reported at once
    generator = torch.Generator().manual_seed(1)
    logits = (torch.randn(positions, vocab, generator=generator) * 4).to(dtype)
    tokens = torch.randint(vocab, (positions,), generator=generator).tolist()
    found = prompt_logprobs(logits, tokens, 5)
    assert len(found) == positions
    for row, token, entry in zip(logits.float(), tokens, found, strict=True):
        _assert_matches(entry, row, token, 5)


def test_prompt_logprobs_do_not_depend_on_how_the_prompt_is_cut() -> None:
    logits = torch.randn(41, 31, generator=torch.Generator().manual_seed(2))
    tokens = [i % 31 for i in range(41)]
    whole = prompt_logprobs(logits, tokens, 3)
    for size in (1, 7, 40):
        parts = [
            entry
            for start in range(0, 41, size)
            for entry in prompt_logprobs(
                logits[start : start + size], tokens[start : start + size], 3
            )
        ]
        assert parts == whole


def test_no_positions_give_no_logprobs() -> None:
    assert prompt_logprobs(torch.empty(0, 7), [], 2) == []


def test_broken_prompt_logits_are_an_error() -> None:
    with pytest.raises(EngineError, match="row 1"):
        prompt_logprobs(torch.tensor([[0.0, 1.0], [math.nan, 0.0]]), [0, 0], 1)
