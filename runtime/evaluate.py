"""What quantization cost: perplexity, and the distance from a reference model's predictions.

Windows are token ids of equal length, scored without overlap: tokens 1 .. n-1 of each window
are predicted from those before them in the window (the GPTQ protocol, with the window length
as an argument). The model runs through its paged cache, in chunks, as it does when serving.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from qtool.errors import UsageError
from qtool.runtime.batch import build_batch
from qtool.runtime.model import Decoder
from qtool.runtime.sampling_params import SamplingParams
from qtool.runtime.scheduler import Chunk
from qtool.runtime.sequence import Sequence

# Rows whose logits are in memory at a time: 256 x 128k vocabulary in float32 is 134 MB.
CHUNK = 256
BLOCK_SIZE = 16


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
    model: Decoder,
    windows: Tensor,
    reference: Decoder | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Quality:
    """Score ``windows``, int64 [n, window_len].

    Raises:
        UsageError: there is nothing to predict, or the vocabularies differ.
    """
    if windows.numel() == 0 or windows.shape[1] < 2:
        raise UsageError(f"windows of shape {tuple(windows.shape)}: there is nothing to predict")
    if reference is not None and reference.config.vocab_size != model.config.vocab_size:
        raise UsageError(
            f"the reference has {reference.config.vocab_size} tokens, the model "
            f"{model.config.vocab_size}; they cannot be compared"
        )
    sums = torch.zeros(4, dtype=torch.float64)
    for index, window in enumerate(windows):
        sums += _score_window(model, window.tolist(), reference)
        progress(index + 1, len(windows))
    tokens = windows.shape[0] * (windows.shape[1] - 1)
    nll, reference_nll, kl, agree = (sums / tokens).tolist()
    if reference is None:
        return Quality(tokens, nll)
    return Quality(tokens, nll, kl, agree, reference_nll)


def _score_window(model: Decoder, window: list[int], reference: Decoder | None) -> Tensor:
    """Sums over the window: nll, the reference's nll, KL, agreements; float64 [4]."""
    run = WindowRun(model, window)
    reference_run = None if reference is None else WindowRun(reference, window)
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


def _log_probs(run: WindowRun, start: int, end: int) -> Tensor:
    return functional.log_softmax(run.logits(start, end), dim=-1).cpu()


class WindowRun:
    """One window through a decoder, chunk by chunk, with a cache of its own."""

    def __init__(self, decoder: Decoder, window: list[int]) -> None:
        blocks = -(-len(window) // BLOCK_SIZE)
        self._decoder = decoder
        self._cache = decoder.new_cache(blocks, BLOCK_SIZE)
        self._sequence = Sequence("window", window, SamplingParams())
        self._sequence.block_table = list(range(blocks))

    def logits(self, start: int, end: int) -> Tensor:
        """Float32 logits [end - start, vocab]; chunks must follow one another."""
        chunk = Chunk(self._sequence, start, end - start)
        batch = build_batch([chunk], BLOCK_SIZE, self._decoder.device, [True])
        return self._decoder.forward(batch, self._cache)
