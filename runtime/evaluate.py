"""What quantization cost: perplexity, and the distance from a reference model's predictions.

Windows are token ids of equal length, scored without overlap: tokens 1 .. n-1 of each window
are predicted from those before them in the window (the GPTQ protocol, with the window length
as an argument). The model runs through its paged cache, in chunks, as it does when serving.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from qtool.errors import UsageError
from qtool.runtime.model import Decoder
from qtool.runtime.window_run import WindowRun

# Rows whose logits are in memory at a time: 256 x 128k vocabulary in float32 is 134 MB.
CHUNK = 256


class Predictions(Protocol):
    """Logits of the same windows from elsewhere than a decoder."""

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        ...

    def logits(self, window: int, start: int, end: int) -> Tensor:
        """Float32 logits [end - start, vocab] of some positions of one window."""
        ...


@dataclass(frozen=True, slots=True)
class Quality:
    """Means over all predicted tokens.

    Attributes:
        nll: negative log-likelihood, in nats per token.
        kl: Kullback-Leibler divergence of the model from the reference, KL(reference || model),
            in nats per token; ``None`` without a reference.
        top1: share of tokens where both find the same token likeliest.
        reference_nll: the reference's own ``nll``.
    """

    tokens: int
    nll: float
    kl: float | None = None
    top1: float | None = None
    reference_nll: float | None = None

    @property
    def perplexity(self) -> float:
        """exp(nll)."""
        return math.exp(self.nll)

    @property
    def reference_perplexity(self) -> float | None:
        """exp(reference_nll)."""
        return None if self.reference_nll is None else math.exp(self.reference_nll)

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        return {
            "tokens": self.tokens,
            "nll": self.nll,
            "perplexity": self.perplexity,
            "kl": self.kl,
            "top1_agreement": self.top1,
            "reference_nll": self.reference_nll,
            "reference_perplexity": self.reference_perplexity,
        }


def evaluate(
    model: Decoder | Predictions,
    windows: Tensor,
    reference: Decoder | Predictions | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Quality:
    """Score ``windows``, int64 [n, window_len].

    Raises:
        UsageError: there is nothing to predict, or the vocabularies differ.
    """
    if windows.numel() == 0 or windows.shape[1] < 2:
        raise UsageError(f"windows of shape {tuple(windows.shape)}: there is nothing to predict")
    if reference is not None and _vocab_size(reference) != _vocab_size(model):
        raise UsageError(
            f"the reference has {_vocab_size(reference)} tokens, the model {_vocab_size(model)}; "
            "they cannot be compared"
        )
    sums = torch.zeros(4, dtype=torch.float64)
    for index, window in enumerate(windows):
        sums += _score_window(model, index, window.tolist(), reference)
        progress(index + 1, len(windows))
    tokens = windows.shape[0] * (windows.shape[1] - 1)
    nll, reference_nll, kl, agree = (sums / tokens).tolist()
    if reference is None:
        return Quality(tokens, nll)
    return Quality(tokens, nll, kl, agree, reference_nll)


def _vocab_size(source: Decoder | Predictions) -> int:
    return source.config.vocab_size if isinstance(source, Decoder) else source.vocab_size


def window_logits(
    source: Decoder | Predictions, index: int, window: list[int]
) -> Callable[[int, int], Tensor]:
    """Logits of window number ``index`` by start and end; spans must follow one another."""
    if isinstance(source, Decoder):
        return WindowRun(source, window).logits
    return partial(source.logits, index)


def _score_window(
    model: Decoder | Predictions,
    index: int,
    window: list[int],
    reference: Decoder | Predictions | None,
) -> Tensor:
    """Sums over the window: nll, the reference's nll, KL, agreements; float64 [4]."""
    run = window_logits(model, index, window)
    reference_run = None if reference is None else window_logits(reference, index, window)
    sums = torch.zeros(4, dtype=torch.float64)
    # The last token predicts nothing that is known.
    for start in range(0, len(window) - 1, CHUNK):
        end = min(start + CHUNK, len(window) - 1)
        targets = torch.tensor(window[start + 1 : end + 1])
        log_q = _log_probs(run, start, end)
        sums[0] -= log_q.gather(1, targets.unsqueeze(1)).double().sum()
        if reference_run is not None:
            log_p = _log_probs(reference_run, start, end)
            sums[1] -= log_p.gather(1, targets.unsqueeze(1)).double().sum()
            sums[2] += (log_p.exp() * (log_p - log_q)).sum(-1).double().sum()
            sums[3] += (log_p.argmax(-1) == log_q.argmax(-1)).double().sum()
    return sums


def _log_probs(run: Callable[[int, int], Tensor], start: int, end: int) -> Tensor:
    return functional.log_softmax(run(start, end), dim=-1).cpu()
