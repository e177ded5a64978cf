"""What a loaded model does here: which kernel runs what and why, what fits, what is not as asked.

It is made of what was loaded, not of what was meant to be: names of kernels come from the
operations themselves.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby

from qtool.runtime.eviction import EvictionRule
from qtool.runtime.kernels.backend import Backend, LinearOp
from qtool.runtime.kernels.cpu.native_backend import NativeBackend
from qtool.runtime.kv_fused import why_not_fused
from qtool.runtime.kv_groups import LayerGroups, most_held
from qtool.runtime.kv_schemes import WIDE
from qtool.runtime.loaded_model import EVICTION_OBSTACLE, LoadedModel, refuse_notes
from qtool.runtime.model import Decoder
from qtool.runtime.native_decoder import NativeDecoder
from qtool.runtime.options import EngineOptions
from qtool.runtime.request import EngineInfo, PlannedPart

# model.layers.3.self_attn. and the like; experts are told apart by their number only.
_PLACE = re.compile(r"\b(?:model\.|layers\.\d+\.|self_attn\.|mlp\.|experts\.\d+\.)")


def make_plan(
    model: LoadedModel,
    options: EngineOptions,
    block_size: int,
    num_blocks: int,
    num_tails: int = 0,
    eviction: EvictionRule | None = None,
    groups: LayerGroups | None = None,
) -> EngineInfo:
    """The load plan of an engine.

    Raises:
        EngineError: under ``strict``, when something is not as asked.
    """
    decoder = model.decoder
    groups = groups or LayerGroups.single(decoder.config.windows)
    longest = groups.longest(num_blocks, block_size, options.max_num_batched_tokens)
    shortage = () if eviction else _shortage(model, longest)
    if options.loading.strict:
        refuse_notes(shortage)
    return EngineInfo(
        model=options.model,
        served_name=options.served_model_name or options.model,
        device=str(decoder.device),
        dtype=str(decoder.dtype).removeprefix("torch."),
        backend=decoder.backend.name,
        backend_reason=model.reason,
        quantization=model.quantization,
        max_model_len=model.max_model_len,
        block_size=block_size,
        num_blocks=num_blocks,
        kv_bytes_per_token=decoder.kv_bytes_per_token,
        kv_tail_bytes=num_tails * decoder.kv_tail_bytes,
        weight_bytes=decoder.weight_bytes,
        vocab_size=decoder.config.vocab_size,
        notes=(*model.notes, *shortage),
        kv_cache_dtype=decoder.kv_cache_dtype,
        kv_cache_reason=model.kv_reason,
        key_smoothing="" if decoder.kv.schemes.is_wide else model.smoothed.describe(),
        kv_eviction="" if eviction is None else eviction.describe(),
        kv_budget=0 if eviction is None else eviction.max_tokens,
        kv_full_bytes_per_token=_full_bytes(groups, decoder.kv_bytes_per_token),
        kv_window_bytes=_window_bytes(groups, decoder.kv_bytes_per_token, block_size),
        kv_sequence_blocks=_sequence_blocks(groups, model.max_model_len, block_size),
        kv_groups=_describe(groups, decoder.config.windows),
        parts=(*_linears(model), *_operations(model, block_size, evicts=eviction is not None)),
        batch_invariance=invariance_cost(decoder) if options.loading.batch_invariant else "",
        prefix_caching=options.enable_prefix_caching and eviction is None,
        scheduling_policy=options.scheduling_policy,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
    )


def invariance_cost(decoder: Decoder) -> str:
    """What a batch-invariant decoder gives up for it."""
    if isinstance(decoder, NativeDecoder):
        return "nothing where weights are quantized; plain ones run on native kernels, not torch's"
    if isinstance(decoder.backend, NativeBackend):
        return (
            "linears lose nothing; norms, activations and attention run in row tiles, a sequence "
            "at a time"
        )
    return (
        "every product runs in tiles of 16 rows, also a single one, attention a sequence at a "
        "time, and quantized weights are held dense"
    )


def _full_bytes(groups: LayerGroups, bytes_per_token: int) -> int:
    """Of a token, in groups that see everything; 0 where there is one group."""
    if len(groups.windows) == 1:
        return 0
    return groups.windows.count(None) * groups.slot_bytes(bytes_per_token)


def _window_bytes(groups: LayerGroups, bytes_per_token: int, block_size: int) -> int:
    """Of a long sequence, in groups that have a window."""
    windows = [window for window in groups.windows if window is not None]
    blocks = sum(most_held(window, 1, block_size) for window in windows)
    return blocks * block_size * groups.slot_bytes(bytes_per_token)


def _sequence_blocks(groups: LayerGroups, length: int, block_size: int) -> int:
    """Of a sequence; 0 where it holds all blocks that it has filled."""
    return 0 if groups.windows == (None,) else groups.blocks(length, block_size)


def _describe(groups: LayerGroups, windows: Sequence[int | None]) -> str:
    if groups.obstacle:
        return f"one for all layers, those with a window included: {groups.obstacle}"
    if len(groups.windows) == 1:
        return ""
    counts = ", ".join(
        f"{count} see everything" if window is None else f"{count} see {window:,} tokens"
        for window, count in Counter(windows).items()
    )
    return f"layers: {counts}; {len(groups.windows)} tables of {groups.depth} layers each"


def _shortage(model: LoadedModel, longest: int) -> tuple[str, ...]:
    if longest >= model.max_model_len:
        return ()
    return (
        f"the KV cache holds {longest} tokens, so no sequence reaches max_model_len="
        f"{model.max_model_len}; give it more memory, or lower max_model_len",
    )


def _linears(model: LoadedModel) -> Iterator[PlannedPart]:
    """Linears by kind and kernel, in the order of a layer."""

    def kind(item: tuple[str, LinearOp]) -> tuple[str, str, str]:
        name, linear = item
        return _PLACE.sub("", name), linear.kernel, linear.obstacle

    order = {key: index for index, key in enumerate(map(kind, model.decoder.linears.items()))}
    linears = sorted(model.decoder.linears.items(), key=lambda item: order[kind(item)])
    for (part, kernel, obstacle), group in groupby(linears, kind):
        ops = [linear for _, linear in group]
        why = obstacle or model.reason
        yield PlannedPart(part, kernel, len(ops), sum(op.num_bytes for op in ops), why)


def _operations(model: LoadedModel, block_size: int, *, evicts: bool) -> Iterator[PlannedPart]:
    decoder = model.decoder
    backend: Backend = decoder.backend
    why = model.reason
    if isinstance(backend, NativeBackend) and not isinstance(decoder, NativeDecoder):
        backend, why = backend.plain, "the decoder does not run as one native call a step"
    layers = decoder.config.num_layers
    if backend.fused_kernel:
        yield from _paged_attention(decoder, block_size, why)
        yield PlannedPart("norm", backend.norm_kernel, 2 * layers + 1, 0, why)
        return
    attention, reason = backend.attention_kernel, why
    if decoder.has_native_attention and not isinstance(decoder, NativeDecoder):
        attention, reason = "native, paged, a call a layer", model.reason
    elif not decoder.has_native_attention and not decoder.kv.schemes.is_wide:
        attention += ", over pages decoded layer by layer"
        if not evicts:
            reason = (
                f"no native kernel here reads keys and values of the {decoder.kv.schemes.name} form"
            )
    yield PlannedPart("attention", attention, layers, 0, reason)
    yield PlannedPart("norm", backend.norm_kernel, 2 * layers + 1, 0, why)


def _paged_attention(decoder: Decoder, block_size: int, why: str) -> Iterator[PlannedPart]:
    """Attention by what the layers store, where the back end has pages of its own."""
    backend = decoder.backend
    for scheme, count in Counter(decoder.kv.schemes.layers).items():
        name = str(decoder.dtype).removeprefix("torch.") if scheme is WIDE else scheme.name
        obstacle: str | None = EVICTION_OBSTACLE
        if not decoder.kv.counts_votes:
            obstacle = why_not_fused(scheme, backend, decoder.config.head_dim, block_size)
        if obstacle is None:
            yield PlannedPart("attention", f"{backend.fused_kernel}, {name}", count, 0, why)
        else:
            yield PlannedPart(
                "attention", f"{backend.attention_kernel}, {name}", count, 0, obstacle
            )
