"""Every sampling parameter against a plain reference, and each row as if it were alone."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from qtool.errors import EngineError
from qtool.runtime.sampler import SamplerRow, make_generator, sample, sample_likeliest
from qtool.runtime.sampling_params import SamplingParams

VOCAB = 37  # odd, so that rows of a batch begin at every alignment


def _row(
    prompt: tuple[int, ...] = (),
    output: tuple[int, ...] = (),
    eos: tuple[int, ...] = (),
    bad_words: tuple[tuple[int, ...], ...] = (),
    **params: object,
) -> SamplerRow:
    settings = SamplingParams(**{"max_tokens": None, **params})
    generator = make_generator(settings.seed if settings.seed is not None else 0)
    return SamplerRow(settings, prompt, output, generator, frozenset(eos), bad_words)


def _greedy(logits: list[float], **settings: object) -> int:
    return sample(torch.tensor([logits]), [_row(temperature=0.0, **settings)])[0].token_id


def _logits(seed: int, rows: int = 1, vocab: int = VOCAB, scale: float = 3.0) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def _draws(logits: Tensor, count: int, **settings: object) -> Counter[int]:
    """How often each token comes; ``count`` draws from one generator."""
    row = _row(**settings)
    batch = logits.expand(count, -1)
    return Counter(s.token_id for s in sample(batch, [row] * count))


def _reference(logits: Tensor, params: SamplingParams) -> Tensor:
    """float64 probabilities [vocab], by sorting and summing."""
    probs = (logits.double() / params.temperature).softmax(-1)
    probs[probs < params.min_p * probs.max()] = 0
    order = probs.argsort(descending=True, stable=True)
    if params.top_k > 0:
        probs[order[params.top_k :]] = 0
    mass, total = 0.0, float(probs.sum())
    for token in order.tolist():
        if mass >= params.top_p * total:
            probs[token] = 0
        mass += float(probs[token])
    return probs / probs.sum()


def _assert_frequencies(counts: Counter[int], probs: Tensor) -> None:
    """Pearson's chi-square, with tokens expected fewer than 5 times in one bin."""
    total = sum(counts.values())
    assert all(probs[token] > 0 for token in counts), "a token that is excluded was drawn"
    expected = (probs * total).tolist()
    common = [t for t, e in enumerate(expected) if e >= 5]
    bins = [(counts[t], expected[t]) for t in common]
    rest = total - sum(e for _, e in bins)
    if rest > 5:
        bins.append((total - sum(c for c, _ in bins), rest))
    statistic = sum((c - e) ** 2 / e for c, e in bins)
    # Mean and variance of chi-square with f degrees of freedom are f and 2 f.
    freedom = len(bins) - 1
    bound = freedom + 4 * math.sqrt(2 * freedom) + 4
    assert statistic <= bound, f"chi-square {statistic:.1f} over the bound {bound:.1f}"


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 3.0},
        {"top_k": 5},
        {"top_p": 0.7},
        {"top_p": 1e-6},
        {"min_p": 0.2},
        {"min_p": 1.0},
        {"temperature": 2.0, "top_k": 20, "top_p": 0.8, "min_p": 0.01},
        {"top_k": 500, "top_p": 0.999},
    ],
)
def test_tokens_come_as_often_as_their_probability_says(settings: dict[str, float]) -> None:
    for seed in range(2):
        logits = _logits(seed)
        counts = _draws(logits, 4_000, seed=seed, **settings)
        _assert_frequencies(counts, _reference(logits[0], SamplingParams(**settings)))


def test_the_nucleus_is_found_beyond_the_first_guess() -> None:
    logits = _logits(5, vocab=1501, scale=0.1)  # nearly flat: 0.9 of it are some 1,330 tokens
    counts = _draws(logits, 3_000, top_p=0.9)
    probs = _reference(logits[0], SamplingParams(top_p=0.9))
    assert 1_300 < int((probs > 0).sum()) < 1_360
    assert all(probs[token] > 0 for token in counts)
    # The draws miss a fraction of exp(-3000 / 1330) = 0.1 of the nucleus.
    assert len(counts) > 1_150


def test_tokens_as_likely_as_the_last_one_kept_are_kept() -> None:
    logits = torch.tensor([[1.0, 2.0, 1.0, 1.0, 0.0]])
    assert set(_draws(logits, 500, top_k=2)) == {0, 1, 2, 3}
    assert set(_draws(logits, 500, top_p=0.5)) == {0, 1, 2, 3}


@given(st.lists(st.integers(-3, 3), min_size=1, max_size=20), st.sampled_from([0.0, 9e-6]))
def test_greedy_takes_the_lowest_id_of_the_likeliest(values: list[int], tiny: float) -> None:
    logits = torch.tensor([values], dtype=torch.float16)
    for settings in ({"temperature": tiny}, {"top_k": 1, "temperature": 5.0}):
        assert sample(logits, [_row(**settings)])[0].token_id == values.index(max(values))


@pytest.mark.parametrize("temperature", [1.1e-5, 1e-3, 1e20, 1e300])
def test_extreme_temperatures_neither_overflow_nor_draw_a_masked_token(temperature: float) -> None:
    logits = torch.tensor([[3e4, -3e4, 2.9e4, 0.0]])
    counts = _draws(logits, 200, temperature=temperature, allowed_token_ids=[1, 2, 3])
    assert set(counts) == ({2} if temperature < 1 else {1, 2, 3})


MIXED = [
    {"temperature": 0.0},
    {"seed": 1},
    {"seed": 2, "top_p": 0.8, "temperature": 0.7},
    {"seed": 3, "top_k": 4, "logprobs": 3},
    {"seed": 4, "min_p": 0.1, "repetition_penalty": 1.3, "output": (1, 2, 2)},
    {"seed": 5, "logit_bias": {7: 5.0}, "presence_penalty": 1.0, "output": (7, 7), "logprobs": 0},
    {"temperature": 0.0, "allowed_token_ids": [3, 9, 30], "logprobs": 20},
    {"seed": 6, "min_tokens": 4, "eos": (0, 1), "bad_words": ((5, 6), (8,)), "output": (5,)},
]


def test_a_row_gets_the_same_alone_and_among_others() -> None:
    logits = _logits(11, rows=len(MIXED))
    together = [_row(**settings) for settings in MIXED]
    alone = [_row(**settings) for settings in MIXED]
    backwards = [_row(**settings) for settings in MIXED]
    for _ in range(50):  # the generators advance
        batch = sample(logits, together)
        single = [sample(logits[i : i + 1], [row])[0] for i, row in enumerate(alone)]
        reverse = sample(logits.flip(0), backwards[::-1])[::-1]
        assert batch == single == reverse
        logits = _logits(int(logits.abs().sum()), rows=len(MIXED))


def test_a_seed_gives_the_same_tokens_again_and_another_seed_others() -> None:
    logits = _logits(12, rows=1)

    def run(seed: int | None) -> list[int]:
        row = replace(_row(), generator=make_generator(seed))
        return [sample(logits, [row])[0].token_id for _ in range(40)]

    assert run(7) == run(7)
    assert run(7) != run(8)
    assert run(None) != run(None)
    assert run(-1) == run(2**64 - 1)


@pytest.mark.parametrize(("chance", "token"), [(0.0, 1), (1 - 2**-53, 3)])
def test_the_least_and_the_greatest_chance_draw_a_possible_token(
    chance: float, token: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "rand", lambda *_, **kw: torch.tensor(chance, dtype=kw["dtype"]))
    logits = torch.tensor([[0.0, 1.0, 0.3, 1.0, 9.0]])
    assert set(_draws(logits, 1, allowed_token_ids=[1, 2, 3])) == {token}


def test_the_global_generator_is_neither_used_nor_moved() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    _draws(_logits(13), 10, temperature=1.0)
    assert torch.equal(torch.get_rng_state(), before)


def test_logits_stay_as_they_are() -> None:
    logits = _logits(14, rows=len(MIXED))
    before = logits.clone()
    sample(logits, [_row(**settings) for settings in MIXED])
    assert torch.equal(logits, before)


def test_repetition_penalty_weakens_tokens_of_prompt_and_output_whatever_their_sign() -> None:
    settings = {"repetition_penalty": 2.0, "prompt": (0,), "output": (2, 2)}
    assert _greedy([4.0, 2.5, 1.0], **settings) == 1  # 2, 2.5, 0.5
    assert _greedy([4.0, 1.5, 3.0], **settings) == 0  # 2, 1.5, 1.5
    assert _greedy([-1.0, -1.9, -5.0], **settings) == 1  # -2, -1.9, -10
    assert _greedy([0.0, -1.0, 0.0], **settings) == 0


def test_presence_and_frequency_penalties_count_generated_tokens_only() -> None:
    logits = [2.0, 1.0, 0.0]
    assert _greedy(logits, presence_penalty=1.5, prompt=(0, 0)) == 0
    assert _greedy(logits, presence_penalty=1.5, output=(0, 0)) == 1  # 0.5
    assert _greedy(logits, presence_penalty=0.9, output=(0, 0)) == 0  # 1.1
    assert _greedy(logits, frequency_penalty=0.6, output=(0, 0)) == 1  # 0.8
    assert _greedy(logits, frequency_penalty=0.6, output=(0,)) == 0  # 1.4
    assert _greedy(logits, frequency_penalty=-1.0, output=(2, 2, 2)) == 2  # 3
    both = {"presence_penalty": 0.5, "frequency_penalty": 0.4}
    assert _greedy(logits, output=(0,), **both) == 0  # 1.1
    assert _greedy(logits, output=(0, 0), **both) == 1  # 0.7


def test_logit_bias_is_added_before_the_penalties() -> None:
    assert _greedy([0.0, 1.0], logit_bias={0: 1.5}) == 0
    assert _greedy([0.0, 1.0], logit_bias={0: 1.5}, repetition_penalty=2.0, prompt=(0,)) == 1
    assert _greedy([0.0, 1.0, 0.5], logit_bias={1: -100.0}) == 2


def test_only_allowed_tokens_are_sampled() -> None:
    logits = torch.tensor([[9.0, 1.0, 2.0, 8.0]])
    assert _greedy(logits[0].tolist(), allowed_token_ids=[1, 2, 2]) == 2
    assert set(_draws(logits, 300, allowed_token_ids=[1, 2])) == {1, 2}


def test_no_end_comes_before_min_tokens() -> None:
    logits = [9.0, 8.0, 7.0, 6.0]
    settings = {"eos": (0, 99), "stop_token_ids": (1,), "min_tokens": 2}
    assert _greedy(logits, **settings) == 2
    assert _greedy(logits, output=(3,), **settings) == 2
    assert _greedy(logits, output=(3, 3), **settings) == 0


def test_a_bad_word_is_stopped_at_its_last_token_only() -> None:
    logits = [3.0, 2.0, 1.0]
    settings = {"bad_words": ((1, 2, 0),)}
    assert _greedy(logits, **settings) == 0
    assert _greedy(logits, output=(1, 2), **settings) == 1
    assert _greedy(logits, output=(0, 1, 2), **settings) == 1
    assert _greedy(logits, output=(2,), prompt=(1,), **settings) == 0  # begun in the prompt
    assert _greedy(logits, output=(1, 2, 1), **settings) == 0
    assert _greedy(logits, bad_words=((0,), (1,))) == 2
    assert _greedy(logits, bad_words=((0,),), output=(1, 2)) == 1


def test_allowed_tokens_outrank_minimum_and_bad_words_when_nothing_else_is_left() -> None:
    logits = [1.0, 2.0, 3.0]
    assert _greedy(logits, allowed_token_ids=[0], eos=(0,), min_tokens=5) == 0
    assert _greedy(logits, allowed_token_ids=[0, 1], bad_words=((0,), (1,))) == 1
    both = {"eos": (1,), "min_tokens": 5, "bad_words": ((0,),)}
    assert _greedy(logits, allowed_token_ids=[0, 1], **both) == 0
    assert _greedy(logits, bad_words=((0,), (1,), (2,))) == 2


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_broken_logits_are_an_error_that_names_the_row(value: float, temperature: float) -> None:
    logits = _logits(15, rows=3)
    logits[1, 4] = value
    with pytest.raises(EngineError, match=r"row 1 .*dtype"):
        sample(logits, [_row(temperature=temperature)] * 3)


def test_a_vocabulary_of_a_quarter_million_is_drawn_to_its_end() -> None:
    size = 2**18
    logits = torch.zeros(1, size)
    counts = _draws(logits, 50, seed=3)
    assert max(counts) > 0.8 * size and min(counts) < 0.2 * size
    logits[0, :-1] = -20.0  # the others together weigh 0.0005
    assert _draws(logits, 50, seed=3)[size - 1] >= 48


class TestWithoutLogits:
    """Rows that ask for the likeliest token only."""

    def test_their_tokens_are_those_of_the_logits(self) -> None:
        logits = _logits(5, rows=9).round()  # with ties
        best, tokens = logits.max(dim=-1)
        assert sample_likeliest(best, tokens) == sample(logits, [_row(temperature=0.0)] * 9)

    @pytest.mark.parametrize(
        ("needs_none", "settings"),
        [
            (True, {"temperature": 0.0}),
            (True, {"top_k": 1}),
            (False, {}),
            (False, {"temperature": 0.0, "logprobs": 0}),
            (False, {"temperature": 0.0, "min_tokens": 1}),
            (False, {"temperature": 0.0, "frequency_penalty": 0.1}),
            (False, {"temperature": 0.0, "logit_bias": {3: 1.0}}),
            (False, {"temperature": 0.0, "bad_words": ((4,),)}),
        ],
    )
    def test_whoever_asks_for_more_needs_them(
        self, needs_none: bool, settings: dict[str, object]
    ) -> None:
        words = settings.pop("bad_words", ())
        assert _row(bad_words=words, **settings).needs_no_logits == needs_none  # type: ignore[arg-type]

    def test_a_nan_is_an_error(self) -> None:
        with pytest.raises(EngineError, match=r"row 1 .*dtype"):
            sample_likeliest(torch.tensor([1.0, torch.nan]), torch.tensor([3, 4]))
