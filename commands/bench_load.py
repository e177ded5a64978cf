"""What a benchmark asks of an engine: prompts, and how many tokens each is to be answered with."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qtool.errors import UsageError
from qtool.runtime.tokenizer import Tokenizer

# vLLM's limits for conversations of ShareGPT: too short says nothing, too long is rare.
SHORTEST = 4
LONGEST_PROMPT, LONGEST = 1024, 2048

Conversation = tuple[str, str]  # a question and its answer


@dataclass(frozen=True, slots=True)
class Work:
    """A prompt, and the exact number of tokens to generate after it."""

    token_ids: tuple[int, ...]
    output_len: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomLoad:
    """Random tokens.

    Attributes:
        input_len, output_len: means.
        range_ratio: lengths are uniform within this share of the mean, in [0, 1).
        shared_prefix: tokens that all prompts begin with, beside ``input_len``.
    """

    input_len: int = 128
    output_len: int = 128
    range_ratio: float = 0.5
    shared_prefix: int = 0

    def __post_init__(self) -> None:
        for name in ("input_len", "output_len"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name}={getattr(self, name)}: must be 1 or more")
        if not 0 <= self.range_ratio < 1:
            raise UsageError(f"range_ratio={self.range_ratio}: must be 0 or more, and below 1")
        if self.shared_prefix < 0:
            raise UsageError(f"shared_prefix={self.shared_prefix}: must be 0 or more")

    def make(self, count: int, vocab_size: int, seed: int) -> list[Work]:
        """``count`` pieces of work, the same ones for the same seed."""
        chance = random.Random(seed)

        def tokens(length: int) -> tuple[int, ...]:
            return tuple(chance.randrange(vocab_size) for _ in range(length))

        def around(mean: int) -> int:
            spread = int(mean * self.range_ratio)
            return max(chance.randint(mean - spread, mean + spread), 1)

        prefix = tokens(self.shared_prefix)
        return [
            Work(prefix + tokens(around(self.input_len)), around(self.output_len))
            for _ in range(count)
        ]


def read_sharegpt(path: Path) -> list[Conversation]:
    """The first question of each conversation of two turns, and its answer.

    Args:
        path: a JSON list of ``{"conversations": [{"value": ...}, {"value": ...}, ...]}``.

    Raises:
        UsageError: the file cannot be read, or has no such conversation.
    """
    found = [pair for item in _read_list(path) if (pair := _first_turns(item)) is not None]
    if not found:
        raise UsageError(
            f"{path}: has no conversation of two turns; ShareGPT's form is a list of "
            '{"conversations": [{"value": TEXT}, ...]}'
        )
    return found


def sharegpt_work(
    conversations: Sequence[Conversation], tokenizer: Tokenizer, count: int, seed: int
) -> list[Work]:
    """Questions, each answered as long as its answer is.

    Args:
        tokenizer: the model's, which decides the lengths.
        count: conversations to take; fewer if there are no more that fit.
        seed: which ones.

    Raises:
        UsageError: none fits.
    """
    work: list[Work] = []
    for question, answer in random.Random(seed).sample(conversations, len(conversations)):
        if len(work) == count:
            break
        prompt = tuple(tokenizer.encode(question))
        output_len = len(tokenizer.encode(answer, add_special_tokens=False))
        fits = len(prompt) <= LONGEST_PROMPT and len(prompt) + output_len <= LONGEST
        if fits and min(len(prompt), output_len) >= SHORTEST:
            work.append(Work(prompt, output_len))
    if not work:
        raise UsageError(
            f"none of {len(conversations)} conversations has {SHORTEST} to {LONGEST_PROMPT} tokens "
            f"of a question and at most {LONGEST} with the answer; use another dataset"
        )
    return work


def _read_list(path: Path) -> list[Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(content, list):
        raise UsageError(f"{path}: must be a JSON list of conversations")
    return content


def _first_turns(item: Any) -> Conversation | None:
    turns = item.get("conversations") if isinstance(item, dict) else None
    if not isinstance(turns, list) or len(turns) < 2:
        return None
    texts = [turn.get("value") for turn in turns[:2] if isinstance(turn, dict)]
    if len(texts) < 2:
        return None
    question, answer = texts
    return (question, answer) if isinstance(question, str) and isinstance(answer, str) else None
