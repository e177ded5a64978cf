"""``qtool/probe.json``: what a checkpoint answered when it was made, for whoever loads it later.

A few prompts as token ids, the likeliest tokens after each with their logits, and how far they may
lie apart. Distances are the root mean square over those logits, in units of their ``spread``, the
standard deviation of the logits of a prompt: so one bound serves models with large logits and
with small ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qtool.errors import CheckpointError
from qtool.formats.reader import read_json

PROBE_PATH = "qtool/probe.json"

# Grows with the layout of the file.
VERSION = 1

NUM_TOKENS = 16

# By compute dtype; int8 is activations or a cache rounded to 8 bits.
TOLERANCE: Mapping[str, float] = {"float32": 0.02, "float16": 0.05, "bfloat16": 0.1, "int8": 0.3}


@dataclass(frozen=True, slots=True)
class ProbePrompt:
    """One prompt: its ids, and the likeliest next tokens with their float32 logits."""

    ids: tuple[int, ...]
    tokens: tuple[int, ...]
    logits: tuple[float, ...]
    spread: float

    def __post_init__(self) -> None:
        if not self.ids or not self.tokens or len(self.tokens) != len(self.logits):
            raise ValueError(f"{len(self.ids)} ids, {len(self.tokens)} tokens")
        if not (self.spread > 0 and math.isfinite(self.spread)):
            raise ValueError(f"spread {self.spread}")

    def distance(self, logits: Tensor) -> float:
        """How far logits [vocab] lie from these; infinite where they are not finite."""
        if max(self.tokens) >= logits.numel():
            return math.inf
        found = logits[list(self.tokens)].double().cpu()
        difference = found - torch.tensor(self.logits, dtype=torch.float64)
        distance = float(difference.square().mean().sqrt()) / self.spread
        return distance if math.isfinite(distance) else math.inf


@dataclass(frozen=True, slots=True)
class Probe:
    """All prompts of a checkpoint, and the distance allowed in each compute dtype."""

    prompts: tuple[ProbePrompt, ...]
    tolerance: Mapping[str, float]

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        return {
            "version": VERSION,
            "tolerance": dict(self.tolerance),
            "prompts": [asdict(prompt) for prompt in self.prompts],
        }


def make_probe(prompts: Sequence[Sequence[int]], logits: Callable[[int], Tensor]) -> Probe:
    """Ask a model for its answers.

    Args:
        prompts: token ids.
        logits: float32 logits [vocab] after a prompt, by its number.
    """
    answers = (logits(index).float().cpu() for index in range(len(prompts)))
    return Probe(tuple(map(_answer, prompts, answers)), TOLERANCE)


def _answer(ids: Sequence[int], logits: Tensor) -> ProbePrompt:
    values, tokens = logits.topk(min(NUM_TOKENS, logits.numel()))
    spread = float(logits.std())
    return ProbePrompt(tuple(ids), tuple(tokens.tolist()), tuple(values.tolist()), spread)


def read_probe(folder: Path) -> Probe | None:
    """The probe of a checkpoint, or ``None`` if it has none of a kind we know.

    Raises:
        CheckpointError: it has one that cannot be read.
    """
    path = folder / PROBE_PATH
    if not path.is_file():
        return None
    values = read_json(path)
    if values.get("version") != VERSION:
        return None
    try:
        return Probe(tuple(_parse(values["prompts"])), dict(values["tolerance"]))
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path} is damaged ({error}); copy the checkpoint again, or delete this file to load "
            "without its check"
        ) from None


def _parse(prompts: list[dict[str, Any]]) -> Iterator[ProbePrompt]:
    for prompt in prompts:
        ids, tokens, logits = (tuple(prompt[name]) for name in ("ids", "tokens", "logits"))
        yield ProbePrompt(ids, tokens, logits, float(prompt["spread"]))
