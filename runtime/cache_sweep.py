"""What each layer's cache costs alone: one layer stored coarsely, all others in the compute dtype.

Layers before the coarse one compute what they would without it, so their outputs are kept and not
computed again: a sweep costs about half of as many runs of the windows as there are layers times
schemes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from qtool.errors import UsageError
from qtool.runtime.batch import Batch
from qtool.runtime.cache_cases import layer_by_layer
from qtool.runtime.evaluate import CHUNK
from qtool.runtime.kernels.backend import Stream
from qtool.runtime.kv_cache import AttentionCache, CacheForm
from qtool.runtime.kv_schemes import WIDE, LayerSchemes, kv_scheme
from qtool.runtime.model import Decoder
from qtool.runtime.window_run import WindowRun


@dataclass(frozen=True, slots=True)
class _Reference:
    """A window with all layers wide, chunk by chunk.

    Attributes:
        inputs: of every layer, by chunk: float32 [chunk, hidden].
        log_probs: float32 [scored, vocab] by chunk.
        every: of so many positions one is scored.
    """

    spans: list[tuple[int, int]]
    inputs: list[list[Tensor]]
    log_probs: list[Tensor]
    every: int


def layer_losses(
    decoder: Decoder,
    windows: Tensor,
    names: Sequence[str],
    every: int = 1,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[dict[str, float]]:
    """KL divergence from all layers wide, in nats per token, by layer and scheme of that layer.

    Args:
        decoder: its own form of the cache does not matter.
        windows: int64 [n, window_len].
        names: rows of :data:`~qtool.runtime.kv_schemes.SCHEMES`.
        every: of so many positions one is scored. Of a small model the head takes as long as all
            layers, and neighbouring positions say much the same.
        progress: told the runs done and their number.

    Raises:
        UsageError: there is nothing to predict, or no scheme of a name.
    """
    if windows.numel() == 0 or windows.shape[1] < 2:
        raise UsageError(f"windows of shape {tuple(windows.shape)}: there is nothing to predict")
    count = len(decoder.layers)
    plain = replace(layer_by_layer(decoder), kv=CacheForm.uniform(WIDE, count))
    losses = [dict.fromkeys(names, 0.0) for _ in range(count)]
    runs = [(layer, name) for layer in range(count) for name in names]
    total = len(windows) * len(runs)
    for index, window in enumerate(windows):
        tokens = window.tolist()
        reference = _run_reference(plain, tokens, every)
        for number, (layer, name) in enumerate(runs):
            coarse = replace(plain, kv=_one_coarse(layer, name, count))
            losses[layer][name] += _loss(coarse, layer, tokens, reference) / len(windows)
            progress(index * len(runs) + number + 1, total)
    return losses


def _one_coarse(layer: int, name: str, count: int) -> CacheForm:
    schemes = [WIDE] * count
    schemes[layer] = kv_scheme(name)
    return CacheForm(LayerSchemes(f"layer {layer} {name}", tuple(schemes)))


def _run_reference(decoder: Decoder, window: list[int], every: int) -> _Reference:
    """The window through all layers, remembering what each was given."""
    # The last token predicts nothing that is known.
    starts = range(0, len(window) - 1, CHUNK)
    spans = [(start, min(start + CHUNK, len(window) - 1)) for start in starts]
    run, inputs, log_probs = WindowRun(decoder, window), list[list[Tensor]](), list[Tensor]()
    assert isinstance(run.cache, AttentionCache)
    for span in spans:
        with run.chunk(*span) as whole:
            batch = _scored(whole, every)
            stream, kept = decoder.embed(batch), list[Tensor]()
            for index in range(len(decoder.layers)):
                rows = decoder.backend.settle(stream, decoder.config.norm_eps)
                kept.append(rows.clone())  # back ends add to the stream in place
                step = range(index, index + 1)
                stream = decoder.run_layers(Stream(rows), step, batch, run.cache)
        inputs.append(kept)
        log_probs.append(_log_probs(decoder.logits(stream, batch)))
    return _Reference(spans, inputs, log_probs, every)


def _loss(decoder: Decoder, layer: int, window: list[int], reference: _Reference) -> float:
    """Mean KL over the window, of a decoder that differs from the reference from ``layer`` on."""
    run, total = WindowRun(decoder, window), 0.0
    assert isinstance(run.cache, AttentionCache)
    rest = range(layer, len(decoder.layers))
    for span, rows, log_p in zip(
        reference.spans, reference.inputs, reference.log_probs, strict=True
    ):
        with run.chunk(*span) as whole:
            batch = _scored(whole, reference.every)
            stream = decoder.run_layers(Stream(rows[layer].clone()), rest, batch, run.cache)
        log_q = _log_probs(decoder.logits(stream, batch))
        total += float((log_p.exp() * (log_p - log_q)).sum(-1).double().sum())
    # Of two equal distributions rounding makes a little less than nothing.
    return max(total / sum(map(len, reference.log_probs)), 0.0)


def _scored(batch: Batch, every: int) -> Batch:
    return replace(batch, logit_rows=batch.logit_rows[::every])


@torch.inference_mode()
def _log_probs(logits: Tensor) -> Tensor:
    return functional.log_softmax(logits, dim=-1)
