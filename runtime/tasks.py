"""Accuracy on short questions: what a model is asked, and what its answers are worth.

A model is asked for log P(choice | context) and nothing else, so no answer has to be parsed.
Plain Python: whoever runs the model gives the :class:`Likelihood` of each :class:`Continuation`.
The conventions are those of lm-evaluation-harness, so that scores can be compared.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

from qtool.errors import CalibrationError, UsageError


@dataclass(frozen=True, slots=True)
class Question:
    """A context, and what may follow it after ``delimiter``.

    One choice makes it a cloze question: it is answered right where greedy decoding writes
    that choice. With more, the likeliest choice is the answer.

    Attributes:
        answer: index of the right choice.
        origin: where it stands, for error messages: ``line 3``.
    """

    context: str
    choices: tuple[str, ...]
    answer: int
    origin: str
    delimiter: str = " "


@dataclass(frozen=True)
class Task:
    """Questions of one kind, at least one.

    Attributes:
        fingerprint: SHA-256 in hex of what the questions were made from.
    """

    name: str
    questions: tuple[Question, ...]
    fingerprint: str

    def __post_init__(self) -> None:
        assert self.questions, f"{self.name} has no questions"

    @property
    def is_cloze(self) -> bool:
        """Whether each question has one choice."""
        return len(self.questions[0].choices) == 1

    def first(self, count: int | None) -> Task:
        """The task cut to ``count`` questions; ``None`` keeps all.

        Raises:
            UsageError: ``count`` is below 1.
        """
        if count is not None and count < 1:
            raise UsageError(f"limit={count}: must be 1 or more")
        return replace(self, questions=self.questions[:count])


@dataclass(frozen=True, slots=True)
class Continuation:
    """Token ids; those from ``start`` (1 or more) on are to be scored, given those before."""

    token_ids: tuple[int, ...]
    start: int

    def last(self, count: int) -> Continuation:
        """Without its first tokens, so that ``count`` are left and one of them comes first."""
        dropped = max(len(self.token_ids) - count, 0)
        return Continuation(self.token_ids[dropped:], max(self.start - dropped, 1))


@dataclass(frozen=True, slots=True)
class Likelihood:
    """What a model says of a continuation.

    Attributes:
        logprob: sum over the scored tokens, in nats.
        greedy: whether each of them is the likeliest at its place.
    """

    logprob: float
    greedy: bool


class TextEncoder(Protocol):
    """The part of a tokenizer that scoring needs."""

    @property
    def bos_token_id(self) -> int | None: ...

    @property
    def eos_token_ids(self) -> frozenset[int]: ...

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...


@dataclass(frozen=True)
class TaskResult:
    """Right and wrong answers of one model.

    Attributes:
        right: per question, whether the answer is right.
        right_normalized: the same with log-probabilities divided by the choices' lengths in
            UTF-8 bytes; ``None`` for cloze questions.
        answers: per question, the index of the chosen choice; a cloze question has 0 for its
            target and -1 for anything else.
        mean_logprob: of the right choices, in nats.
    """

    task: Task
    right: tuple[bool, ...]
    right_normalized: tuple[bool, ...] | None
    answers: tuple[int, ...]
    mean_logprob: float

    @cached_property
    def accuracy(self) -> float:
        """Share of right answers."""
        return sum(self.right) / len(self.right)

    @cached_property
    def acc_norm(self) -> float | None:
        """Accuracy with length-normalized log-probabilities.

        On ASCII choices it is what lm-evaluation-harness calls acc_norm; that one counts
        characters, and its acc_bytes counts bytes.
        """
        right = self.right_normalized
        return None if right is None else sum(right) / len(right)

    @property
    def perplexity(self) -> float | None:
        """Of a whole target, exp(-mean log-probability), as for LAMBADA; cloze only."""
        return math.exp(-self.mean_logprob) if self.task.is_cloze else None

    def agreement(self, other: TaskResult) -> float:
        """Share of questions that both models answer alike, rightly or wrongly."""
        pairs = list(zip(self.answers, other.answers, strict=True))
        return sum(a == b for a, b in pairs) / len(pairs)

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        count = len(self.right)
        return {
            "accuracy": self.accuracy,
            "accuracy_stderr": standard_error(self.accuracy, count),
            "acc_norm": self.acc_norm,
            "acc_norm_stderr": standard_error(self.acc_norm, count),
            "perplexity": self.perplexity,
        }


def standard_error(share: float | None, count: int) -> float | None:
    """Of a share of ``count`` trials: sample standard deviation / sqrt(count), if it has one."""
    if share is None or count < 2:
        return None
    return math.sqrt(share * (1 - share) / (count - 1))


def continuations(task: Task, tokenizer: TextEncoder, max_tokens: int) -> list[Continuation]:
    """Those of all choices of all questions, in order.

    Raises:
        CalibrationError: one has more than ``max_tokens`` tokens. Nothing is cut off, for a
            question without its beginning is another question.
    """
    return [
        _checked(encode_pair(tokenizer, q.context, q.delimiter + choice), q, task, max_tokens)
        for q in task.questions
        for choice in q.choices
    ]


def _checked(
    continuation: Continuation, question: Question, task: Task, max_tokens: int
) -> Continuation:
    length = len(continuation.token_ids)
    if length > max_tokens:
        raise CalibrationError(
            f"{task.name}, {question.origin}: has {length} tokens with its answer, the model can "
            f"score {max_tokens}; shorten the context"
        )
    return continuation


def encode_pair(tokenizer: TextEncoder, context: str, continuation: str) -> Continuation:
    """Tokenize a context and what follows it as one text, and find where the second begins.

    Spaces at the end of the context go to the continuation, since tokenizers join them with the
    next word. A token that holds the end of one and the beginning of the other is scored. An
    empty context becomes the token a text begins with: BOS, or EOS where there is none.
    """
    stripped = context.rstrip()
    text = stripped + context[len(stripped) :] + continuation
    whole = tokenizer.encode(text, add_special_tokens=bool(stripped))
    before = tokenizer.encode(stripped) if stripped else []
    start = min(_common_prefix(before, whole), len(whole) - 1)
    if start > 0:
        return Continuation(tuple(whole), start)
    # Nothing of the text precedes the first token to score.
    return Continuation((text_start(tokenizer), *whole), 1)


def text_start(tokenizer: TextEncoder) -> int:
    """The token that stands for "nothing before".

    Raises:
        UsageError: the tokenizer has neither BOS nor EOS.
    """
    if tokenizer.bos_token_id is not None:
        return tokenizer.bos_token_id
    if not tokenizer.eos_token_ids:
        raise UsageError(
            "the tokenizer has neither BOS nor EOS, so a text without context cannot be scored; "
            "give a context"
        )
    return min(tokenizer.eos_token_ids)


def _common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))


def judge(task: Task, likelihoods: Sequence[Likelihood]) -> TaskResult:
    """Turn the likelihoods of :func:`continuations`, in their order, into answers."""
    values = iter(likelihoods)
    rows = [[next(values) for _ in question.choices] for question in task.questions]
    assert next(values, None) is None, "more likelihoods than choices"
    if task.is_cloze:
        answers = tuple(0 if row[0].greedy else -1 for row in rows)
        normalized = None
    else:
        answers = tuple(_best(item.logprob for item in row) for row in rows)
        normalized = tuple(
            _best(_per_byte(row, question)) == question.answer
            for row, question in zip(rows, task.questions, strict=True)
        )
    pairs = list(zip(answers, task.questions, strict=True))
    right = tuple(answer == question.answer for answer, question in pairs)
    logprobs = [row[q.answer].logprob for row, q in zip(rows, task.questions, strict=True)]
    return TaskResult(task, right, normalized, answers, math.fsum(logprobs) / len(logprobs))


def _per_byte(row: Iterable[Likelihood], question: Question) -> list[float]:
    sizes = [len(choice.encode()) for choice in question.choices]
    return [item.logprob / size for item, size in zip(row, sizes, strict=True)]


def _best(values: Iterable[float]) -> int:
    """Index of the largest value, the first of equals."""
    listed = list(values)
    return listed.index(max(listed))
