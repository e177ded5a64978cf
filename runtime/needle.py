"""Needles in a haystack: what a cache still finds of a text long behind.

Facts of the same form, "Secret number of Oslo: 48213.", lie at several depths of a text, and
are asked for at its end, one after another in an order drawn for each text (many keys, one text:
Hsieh et al. 2024, RULER, section 3). A small model does not follow instructions, but it copies: it
is given the sentence up to the number, and found is a fact whose every digit is the likeliest
token. Answers stand behind their questions, so one pass over a text asks for all its facts, and
questions asked first show those behind them what is wanted.

A fact cannot be guessed and stands nowhere else, so perplexity would not show that it was lost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Protocol

import torch
from torch import Tensor

from qtool.errors import UsageError
from qtool.runtime.evaluate import CHUNK

Encode = Callable[[str], list[int]]

CITIES = (
    "Paris", "Oslo", "Rome", "Madrid", "Berlin", "Vienna", "Dublin", "Athens", "Moscow", "Cairo",
    "Tokyo", "London", "Chicago", "Boston", "Sydney", "Lima", "Havana", "Delhi", "Kiev", "Prague",
)  # fmt: skip
DIGITS = 5
# Of the forms tried this is found most often on SmolLM2-135M, 5 facts in 512 tokens, 6 texts: 28 of
# 30. "The secret number of Oslo is 48213." has 25, sentences with the number before the city 16.
_FACT = "\nSecret number of {city}: {number}.\n"
_QUESTION, _ANSWER = "\nSecret number of {city}:", " {number}"


class Run(Protocol):
    """One window through a decoder (:class:`~qtool.runtime.window_run.WindowRun` is one)."""

    def logits(self, start: int, end: int) -> Tensor:
        """Float32 logits [end - start, vocab]; chunks follow one another."""
        ...

    def skip(self, start: int, end: int) -> None:
        """The same without logits."""
        ...


@dataclass(frozen=True, slots=True)
class Haystack:
    """One text.

    Attributes:
        tokens: facts, text and questions.
        questions: where the first question begins.
        answers: by depth, where the tokens of its answer begin and end.
    """

    tokens: tuple[int, ...]
    questions: int
    answers: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Found:
    """One fact.

    Attributes:
        exact: whether each token of the answer was the likeliest.
        nll: of the answer, in nats a token.
    """

    exact: bool
    nll: float


@dataclass(frozen=True, slots=True)
class NeedleCell:
    """All facts at one depth of texts of one length.

    Attributes:
        length: tokens of a text, questions included.
        depth: 0 at its beginning, 1 before the questions.
        found: share of facts.
        nll: mean of the answers, in nats a token.
    """

    length: int
    depth: float
    found: float
    nll: float


def depths(count: int) -> list[float]:
    """So many, even, from the beginning to the end.

    Raises:
        UsageError: fewer than 1, or more than there are facts.
    """
    if not 1 <= count <= len(CITIES):
        raise UsageError(f"needle_depths={count}: must be 1 to {len(CITIES)}")
    return [index / max(count - 1, 1) for index in range(count)]


def make_haystack(filler: Sequence[int], encode: Encode, count: int, seed: int) -> Haystack:
    """As long as its filler, whose end makes room for ``count`` facts and their questions.

    Args:
        filler: tokens of a text; the first stays first, for it may be a BOS.
        encode: text to tokens, with nothing added.
        seed: of numbers, cities and the order of questions.

    Raises:
        UsageError: the filler is shorter than facts and questions.
    """
    chance = Random(seed)
    places, cities = depths(count), chance.sample(CITIES, count)
    terms = [{"city": c, "number": _number(chance)} for c in cities]
    facts = [encode(_FACT.format(**term)) for term in terms]
    asked = [_split(encode, _QUESTION.format(**t), _ANSWER.format(**t)) for t in terms]
    order = chance.sample(range(count), count)
    taken = sum(map(len, facts)) + sum(len(q) + len(a) for q, a in asked)
    room = len(filler) - taken
    if room < 1:
        raise UsageError(
            f"a needle length of {len(filler)} tokens: {count} facts and their questions take "
            f"{taken}; give a longer one, or fewer depths"
        )
    tokens, start = list[int](), 0
    for place, fact in zip(places, facts, strict=True):
        end = 1 + round(place * (room - 1))
        tokens += [*filler[start:end], *fact]
        start = end
    questions, answers = len(tokens), [(0, 0)] * count
    for index in order:
        question, answer = asked[index]
        tokens += question + answer
        answers[index] = len(tokens) - len(answer), len(tokens)
    return Haystack(tuple(tokens), questions, tuple(answers))


def look(run: Run, hay: Haystack) -> list[Found]:
    """Ask for all facts of a text; by depth."""
    for start in range(0, hay.questions, CHUNK):
        run.skip(start, min(start + CHUNK, hay.questions))
    last = len(hay.tokens) - 1
    logits = run.logits(hay.questions, last)
    log_p = torch.log_softmax(logits.double(), dim=-1).cpu()
    return [_judge(log_p, hay, start, end) for start, end in hay.answers]


def cells(length: int, texts: Sequence[Sequence[Found]]) -> list[NeedleCell]:
    """Means by depth of what was found in texts of one length."""
    places = depths(len(texts[0]))
    return [
        NeedleCell(
            length,
            depth,
            found=sum(fact.exact for fact in facts) / len(facts),
            nll=sum(fact.nll for fact in facts) / len(facts),
        )
        for depth, facts in zip(places, zip(*texts, strict=True), strict=True)
    ]


def _number(chance: Random) -> str:
    return str(chance.randrange(10 ** (DIGITS - 1), 10**DIGITS))


def _split(encode: Encode, question: str, answer: str) -> tuple[list[int], list[int]]:
    """Tokens of both, as they are one behind the other, cut where the answer begins.

    A token may not reach over the cut, and the answer keeps the space before it.
    """
    whole, head = encode(question + answer), encode(question)
    shared = next(
        (i for i, pair in enumerate(zip(whole, head, strict=False)) if pair[0] != pair[1]),
        len(head),
    )
    return whole[:shared], whole[shared:]


def _judge(log_p: Tensor, hay: Haystack, start: int, end: int) -> Found:
    """The answer at ``[start, end)``; row 0 of ``log_p`` is the first question's token's."""
    rows = log_p[start - 1 - hay.questions : end - 1 - hay.questions]
    answer = torch.tensor(hay.tokens[start:end])
    exact = bool((rows.argmax(-1) == answer).all())
    return Found(exact, -float(rows.gather(1, answer.unsqueeze(1)).mean()))
