"""Needles: where they lie, what is asked, and that one is found only where it can be seen."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from qtool.errors import UsageError
from qtool.runtime.cache_cases import cache_cases
from qtool.runtime.loaded_model import load_model
from qtool.runtime.needle import CITIES, Found, Haystack, cells, depths, look, make_haystack
from qtool.runtime.options import ModelOptions

FILLER = [1000 + i for i in range(2000)]


def _encode(text: str) -> list[int]:
    """A token a character, but a space and the digit behind it are one."""
    return [ord(p[-1]) + 256 * (len(p) - 1) for p in re.findall(r" \d|[\s\S]", text)]


def _text(tokens: tuple[int, ...]) -> str:
    """Filler is a dot each."""
    return "".join("·" if t >= 1000 else chr(t) if t < 256 else f" {chr(t - 256)}" for t in tokens)


class Copier:
    """A decoder that writes what followed the sentence it is in, if it still sees it.

    Args:
        seen: the first token that it has not forgotten.
    """

    def __init__(self, hay: Haystack, seen: int = 0) -> None:
        self._hay, self._seen = hay, seen
        self.calls: list[tuple[int, int]] = []

    def skip(self, start: int, end: int) -> None:
        self.calls.append((start, end))

    def logits(self, start: int, end: int) -> Tensor:
        self.calls.append((start, end))
        out = torch.zeros(end - start, 4096)
        for row in range(start, end):
            # The last place where the same 8 tokens stood; a number's first digits tell it.
            for place in range(row - 1, self._seen + 7, -1):
                if self._tokens(place) == self._tokens(row):
                    out[row - start, self._hay.tokens[place + 1]] = 10.0
                    break
        return out

    def _tokens(self, last: int) -> tuple[int, ...]:
        return self._hay.tokens[last - 7 : last + 1]


def test_a_text_is_as_long_as_its_filler_with_facts_at_even_depths() -> None:
    hay = make_haystack(FILLER, _encode, 5, seed=3)
    text = _text(hay.tokens)
    assert len(hay.tokens) == 2000 and hay.tokens[0] == FILLER[0]
    head = _text(hay.tokens[: hay.questions])
    facts = re.findall(r"\nSecret number of (\w+): (\d{5})\.\n", head)
    assert len(facts) == 5 and len({city for city, _ in facts}) == 5
    filler = [len(part) for part in re.split(r"\nSecret[^\n]*\n", text)]
    assert filler[0] == 1 and max(filler[1:5]) - min(filler[1:5]) <= 1
    kept = [token for token in hay.tokens if token >= 1000]
    assert kept == FILLER[: len(kept)]


def test_every_fact_is_asked_for_once_and_answered_behind_its_question() -> None:
    hay = make_haystack(FILLER, _encode, 5, seed=3)
    facts = re.findall(r"number of (\w+):( \d{5})\.", _text(hay.tokens[: hay.questions]))
    answers = [_text(hay.tokens[start:end]) for start, end in hay.answers]
    assert answers == [number for _, number in facts]
    questions = _text(hay.tokens[hay.questions :])
    for (city, number), (start, _) in zip(facts, hay.answers, strict=True):
        assert f"\nSecret number of {city}:{number}" in questions
        assert _text(hay.tokens[:start]).endswith(f"of {city}:")
    assert [start for start, _ in hay.answers] != sorted(start for start, _ in hay.answers)


def test_seeds_decide_everything() -> None:
    first, again, other = (make_haystack(FILLER, _encode, 3, seed) for seed in (1, 1, 2))
    assert first == again != other


def test_what_is_seen_is_found_and_what_is_forgotten_is_not() -> None:
    hay = make_haystack(FILLER, _encode, 4, seed=0)
    whole = Copier(hay)
    found = look(whole, hay)
    assert [fact.exact for fact in found] == [True] * 4
    assert all(fact.nll < 0.5 for fact in found)
    ends = [end for _, end in whole.calls]
    assert [start for start, _ in whole.calls] == [0, *ends[:-1]] and ends[-1] == 1999
    half = look(Copier(hay, seen=900), hay)
    assert [fact.exact for fact in half] == [False, False, True, True]
    assert half[0].nll > 5


def test_cells_are_means_by_depth() -> None:
    texts = [[Found(True, 1.0), Found(False, 3.0)], [Found(True, 2.0), Found(True, 1.0)]]
    near, far = cells(512, texts)
    assert (near.depth, near.found, near.nll) == (0.0, 1.0, 1.5)
    assert (far.depth, far.found, far.nll) == (1.0, 0.5, 2.0) and far.length == 512


def test_what_cannot_be_asked_is_refused() -> None:
    assert depths(1) == [0.0] and depths(3) == [0.0, 0.5, 1.0]
    with pytest.raises(UsageError, match="needle_depths=21: must be 1 to 20"):
        depths(len(CITIES) + 1)
    with pytest.raises(UsageError, match="a needle length of 300 tokens: 5 facts"):
        make_haystack(FILLER[:300], _encode, 5, seed=0)


def test_a_real_decoder_gives_the_probabilities_of_one_pass(tiny_model_folder: Path) -> None:
    options = ModelOptions(device="cpu", dtype="fp32", backend="reference")
    model = load_model(tiny_model_folder, options)
    hay = make_haystack([1] * 250, lambda text: [ord(c) for c in text], 2, seed=0)
    for case in cache_cases(model, ["auto", "int4"], budget=208, longest=250):
        found = look(case.run(list(hay.tokens)), hay)
        logits = case.run(list(hay.tokens)).logits(0, 250)
        log_p = torch.log_softmax(logits.double(), -1)
        for fact, (start, end) in zip(found, hay.answers, strict=True):
            rows = log_p[range(start - 1, end - 1), list(hay.tokens[start:end])]
            assert fact.nll == pytest.approx(-float(rows.mean()), abs=1e-5)
