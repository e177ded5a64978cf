"""How far an engine's predictions lie from the unquantized model's. Needs numpy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Sums:
    """Added over predicted tokens: negative log-likelihood and KL(reference || engine) in nats."""

    tokens: int = 0
    nll: float = 0.0
    kl: float = 0.0
    agreements: int = 0

    def __add__(self, other: Sums) -> Sums:
        return Sums(
            self.tokens + other.tokens,
            self.nll + other.nll,
            self.kl + other.kl,
            self.agreements + other.agreements,
        )

    def means(self) -> dict[str, float]:
        """Perplexity, mean KL and the share of tokens where both find the same one likeliest."""
        return {
            "perplexity": math.exp(self.nll / self.tokens),
            "kl": self.kl / self.tokens,
            "top1": self.agreements / self.tokens,
        }


def log_softmax(logits: Floats) -> Floats:
    """Log-probabilities of rows of logits [n, vocab]."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    rows: Floats = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return rows


def score(logits: Floats, reference: Floats, window: Sequence[int]) -> Sums:
    """Score one window.

    Args:
        logits: [n, vocab], row i predicting token i + 1 of the window; the last is not used.
        reference: log-probabilities of the unquantized model [n - 1, vocab].
        window: n token ids.
    """
    ours = log_softmax(logits[: len(window) - 1])
    targets = np.asarray(window[1:])
    return Sums(
        tokens=len(targets),
        nll=-float(ours[np.arange(len(targets)), targets].sum(dtype=np.float64)),
        kl=float((np.exp(reference) * (reference - ours)).sum(dtype=np.float64)),
        agreements=int((ours.argmax(-1) == reference.argmax(-1)).sum()),
    )
