"""What each form of the cache costs in quality, by the engine's own attention over its own pages.

The forms share one decoder's weights. Its layers run one by one for every form, so that nothing
but what the cache holds differs between them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from qtool.errors import UsageError
from qtool.runtime.evaluate import CHUNK
from qtool.runtime.loaded_model import LoadedModel, choose_cache
from qtool.runtime.model import Decoder
from qtool.runtime.window_run import WindowRun

# Where the first of the ranges ends in which results are given by position; each next one ends at
# twice that.
FIRST_RANGE = 128


@dataclass(frozen=True, slots=True)
class RangeQuality:
    """Predictions made at positions ``[start, end)``, from as many tokens before them."""

    start: int
    end: int
    nll: float
    kl: float

    @property
    def perplexity(self) -> float:
        """``exp(nll)``."""
        return math.exp(self.nll)


@dataclass(frozen=True, slots=True)
class CacheQuality:
    """One form of the cache.

    Attributes:
        bytes_per_token: scales included, tail pages not.
        tail_bytes: of a running sequence's unfinished page, where that is kept aside.
        bits: of an element of keys and values, scales included.
        nll, kl, top1: means over all predictions; the latter two against the first form.
        ranges: the same by position.
        notes: what was not as asked.
    """

    name: str
    form: str
    bytes_per_token: int
    tail_bytes: int
    bits: float
    nll: float
    kl: float
    top1: float
    ranges: tuple[RangeQuality, ...]
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        plain = {
            field.name: getattr(self, field.name)
            for field in fields(self)
            if field.name != "ranges"
        }
        ranges = [
            {"start": r.start, "end": r.end, "perplexity": r.perplexity, "nll": r.nll, "kl": r.kl}
            for r in self.ranges
        ]
        return plain | {"perplexity": math.exp(self.nll), "by_position": ranges}


def compare_caches(
    model: LoadedModel,
    names: Sequence[str],
    windows: Tensor,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[CacheQuality]:
    """Score ``windows``, int64 [n, window_len], under each form of the cache.

    Args:
        names: rows of :data:`~qtool.runtime.kv_schemes.SCHEMES`; the others are compared with the
            first.

    Raises:
        UsageError: there is nothing to predict, or no form of a name.
    """
    if windows.numel() == 0 or windows.shape[1] < 2:
        raise UsageError(f"windows of shape {tuple(windows.shape)}: there is nothing to predict")
    chosen = [choose_cache(name, model.kv_scales, model.decoder) for name in names]
    decoders = [replace(model.decoder, kv=form) for form, _ in chosen]
    sums = torch.zeros(len(decoders), 3, windows.shape[1] - 1, dtype=torch.float64)
    for index, window in enumerate(windows):
        _add_window(decoders, window, sums)
        progress(index + 1, len(windows))
    means = sums / len(windows)
    return [
        _quality(name, decoder, rows, notes)
        for name, decoder, rows, (_, notes) in zip(names, decoders, means, chosen, strict=True)
    ]


def _add_window(decoders: Sequence[Decoder], window: Tensor, sums: Tensor) -> None:
    """Add one window's nll, KL and agreement to ``sums`` [decoders, 3, window_len - 1]."""
    runs = [WindowRun(decoder, window.tolist()) for decoder in decoders]
    # The last token predicts nothing that is known.
    for start in range(0, len(window) - 1, CHUNK):
        end = min(start + CHUNK, len(window) - 1)
        targets = window[start + 1 : end + 1].unsqueeze(1)
        log_p: Tensor | None = None
        for run, rows in zip(runs, sums, strict=True):
            log_q = functional.log_softmax(run.logits(start, end), dim=-1).cpu()
            log_p = log_q if log_p is None else log_p
            rows[0, start:end] -= log_q.gather(1, targets).squeeze(1).double()
            rows[1, start:end] += (log_p.exp() * (log_p - log_q)).sum(-1).double()
            rows[2, start:end] += (log_p.argmax(-1) == log_q.argmax(-1)).double()


def _quality(name: str, decoder: Decoder, means: Tensor, notes: tuple[str, ...]) -> CacheQuality:
    """``means`` [3, window_len - 1] over the windows."""
    config = decoder.config
    elements = 2 * config.num_layers * config.num_kv_heads * config.head_dim
    nll, kl, top1 = means.mean(-1).tolist()
    return CacheQuality(
        name=name,
        form=decoder.kv_cache_dtype,
        bytes_per_token=decoder.kv_bytes_per_token,
        tail_bytes=decoder.kv_tail_bytes,
        bits=8 * decoder.kv_bytes_per_token / elements,
        nll=nll,
        kl=kl,
        top1=top1,
        ranges=tuple(_ranges(means)),
        notes=notes,
    )


def _ranges(means: Tensor) -> list[RangeQuality]:
    length = means.shape[1]
    ranges, start, end = list[RangeQuality](), 0, FIRST_RANGE
    while start < length:
        part = means[:, start : min(end, length)].mean(-1).tolist()
        ranges.append(RangeQuality(start, min(end, length), part[0], part[1]))
        start, end = end, 2 * end
    return ranges
