"""A MODEL and options -> a decoder ready to run, and what was not as asked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from qtool.errors import EngineError, UsageError
from qtool.formats.checkpoint import CheckpointReader
from qtool.formats.kv_plan import DECLARED, KeyExponents, KVPlan, declared_plan
from qtool.formats.kv_scales import KvScales
from qtool.formats.probe import read_probe
from qtool.formats.registry import quantizes_weights
from qtool.formats.scheme import WeightScheme
from qtool.runtime.config import DecoderConfig, parse_decoder_config
from qtool.runtime.kernels import select_backend
from qtool.runtime.kernels.cpu.native_backend import NativeBackend
from qtool.runtime.key_smoothing import SmoothedKeys
from qtool.runtime.kv_cache import CacheForm
from qtool.runtime.kv_fused import fallback_notes, plain_note
from qtool.runtime.kv_schemes import FOLLOW, FP8, FP8_STATIC, WIDE, LayerSchemes, kv_scheme
from qtool.runtime.loader import load_decoder
from qtool.runtime.model import Decoder
from qtool.runtime.native_decoder import compile_decoder, why_not_native
from qtool.runtime.options import ModelOptions
from qtool.runtime.rotary import scaling_notes
from qtool.runtime.self_check import self_check

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
CONFIG_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}

# What stands between eviction and the native step.
EVICTION_OBSTACLE = "it gives no attention of single blocks, by which heavy-hitter eviction chooses"


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A decoder with its origin.

    Attributes:
        reason: why this back end.
        schemes: scheme of every quantized linear by name; empty for a plain model.
        max_model_len: longest sequence it was loaded for.
        notes: what was not as asked or expected, and what a user should know, one sentence each.
        kv_scales: the checkpoint's FP8 scales for the cache, by name of the attention.
        kv_plan: what the checkpoint says of its cache, if anything.
        kv_reason: why keys and values are stored as they are.
        smoothed: layers whose keys are smoothed before they are stored.
    """

    folder: Path
    decoder: Decoder
    reason: str
    schemes: dict[str, WeightScheme]
    max_model_len: int
    notes: tuple[str, ...]
    kv_scales: Mapping[str, KvScales] = field(default_factory=dict)
    kv_plan: KVPlan | None = None
    kv_reason: str = ""
    smoothed: SmoothedKeys = SmoothedKeys()

    @property
    def quantization(self) -> str:
        """Schemes in use, for people: ``W4 asym g64``, or ``none``."""
        names = sorted({scheme.describe() for scheme in self.schemes.values()})
        return " + ".join(names) or "none"


def load_model(
    folder: Path,
    options: ModelOptions,
    max_model_len: int | None = None,
    key_exponents: Sequence[KeyExponents | None] | None = None,
) -> LoadedModel:
    """Load a model folder; ``key_exponents`` stands for those of a plan that is yet to be written.

    Raises:
        UsageError: a device that is not there, or a length the model cannot have.
        ModelError, CheckpointError: see :func:`qtool.runtime.loader.load_decoder`.
        CheckpointError: the model does not answer as its probe says; a plan of the cache is for
            another model.
        EngineError: under ``strict``, when something is not as asked.
    """
    with CheckpointReader(folder) as reader:
        config = parse_decoder_config(reader.config)
        plan = _plan_of(reader, config)
        exponents = key_exponents or (None if plan is None else plan.key_exponents)
        length = _longest(config, max_model_len)
        device = resolve_device(options.device)
        dtype, notes = resolve_dtype(options.dtype, reader.config, device)
        quantized = quantizes_weights(folder, reader.config)
        selection = select_backend(
            options.backend,
            device,
            dtype,
            cpu_compute=options.cpu_compute,
            quantized=quantized,
            batch_invariant=options.batch_invariant,
        )
        # What becomes of 4-bit weights is no concern of a model that has none.
        concerned = (n for n in selection.notes if quantized or "4-bit weights" not in n)
        notes += (*concerned, *scaling_notes(config.ropes, length))
        if options.strict:
            refuse_notes(notes)
        decoder, stored = load_decoder(reader, selection.backend, length, exponents)
    plain = decoder
    asked = options.kv_cache_dtype
    form, cache_notes = choose_cache(asked, stored.kv_scales, decoder, plan)
    decoder, more = (evicting_form if options.evicts else choose_form)(decoder, form)
    notes += stored.notes + more + cache_notes
    if options.strict:
        refuse_notes(notes)
    if options.self_check and (probe := read_probe(folder)) is not None:
        # A coarse cache would hide what the probe looks for: damaged files and wrong products.
        self_check(replace(decoder, kv=plain.kv), probe, coarsest_compute(decoder), length)
    return LoadedModel(
        folder,
        decoder,
        selection.reason,
        stored.schemes,
        length,
        notes + cache_remarks(asked, plan),
        stored.kv_scales,
        plan,
        cache_reason(asked, plan),
        stored.smoothed,
    )


def _plan_of(reader: CheckpointReader, config: DecoderConfig) -> KVPlan | None:
    """What the checkpoint says of its cache, if anything, held against its shape."""
    plan = declared_plan(reader.folder, reader.config, config.num_layers)
    if plan is not None:
        plan.check_heads(config.num_kv_heads, config.head_dim)
    return plan


def _longest(config: DecoderConfig, asked: int | None) -> int:
    """Tokens of the longest sequence that will run."""
    length = asked or config.max_position
    if length > config.longest:
        raise UsageError(
            f"max_model_len={asked}: the model was made for at most {config.longest} tokens"
        )
    return length


def choose_cache(
    asked: str | LayerSchemes,
    scales: Mapping[str, KvScales],
    decoder: Decoder,
    plan: KVPlan | None = None,
) -> tuple[CacheForm, tuple[str, ...]]:
    """How keys and values are stored, and what of the checkpoint's own scales is not used.

    Args:
        asked: what ``kv_cache_dtype`` takes, or a scheme for each layer.
        scales, plan: the checkpoint's.
    """
    layers = len(decoder.layers)
    schemes = _schemes(asked, plan, layers)
    if set(schemes.layers) != {FP8}:
        count, text = len(scales), "the checkpoint has FP8 scales for the cache of"
        unused = f"{text} {count} layers; they are not used without kv_cache_dtype fp8"
        return CacheForm(schemes), (unused,) if scales else ()
    names = [f"model.layers.{index}.self_attn" for index in range(layers)]
    if missing := [name for name in names if name not in scales]:
        found = f"{len(missing)} layers of the checkpoint have no FP8 scales for the cache"
        found += ": it is not calibrated, and has a scale a token and head"
        return CacheForm.uniform(FP8, layers), (found,)
    notes: tuple[str, ...] = ()
    if any(scales[name].query is not None for name in names):
        notes = ("the checkpoint has FP8 scales for queries; queries are not rounded here",)
    static = tuple(_by_head(scales[name], decoder.device) for name in names)
    return CacheForm(LayerSchemes.uniform(FP8_STATIC, layers), static), notes


def _schemes(asked: str | LayerSchemes, plan: KVPlan | None, num_layers: int) -> LayerSchemes:
    if isinstance(asked, LayerSchemes):
        return asked
    if asked != FOLLOW:
        return LayerSchemes.uniform(kv_scheme(asked), num_layers)
    return LayerSchemes.uniform(WIDE, num_layers) if plan is None else LayerSchemes.of(plan.layers)


def cache_reason(asked: str, plan: KVPlan | None) -> str:
    """Why keys and values are stored as they are."""
    if asked != FOLLOW:
        return f"kv_cache_dtype {asked}"
    return "the checkpoint has no plan" if plan is None else f"the checkpoint's {plan.source}"


def cache_remarks(asked: str, plan: KVPlan | None) -> tuple[str, ...]:
    """What a user should know of a cache that is as asked: nothing that ``strict`` refuses."""
    if asked == FOLLOW or (plan is not None and set(plan.layers) == {asked}):
        return ()
    remarks = []
    if plan is not None and plan.name != DECLARED:
        remarks.append(
            f"the checkpoint's plan for the cache ({plan.describe()}) is not followed, as "
            f"kv_cache_dtype {asked} was asked for"
        )
    # What fp8 lacks is a note of choose_cache.
    if asked not in (WIDE.name, FP8.name):
        remarks.append(
            f"kv_cache_dtype {asked} has not been measured on this model; qtool eval --kv-cache "
            f"{asked} says what it costs"
        )
    return tuple(remarks)


def _by_head(scales: KvScales, device: torch.device) -> tuple[Tensor, Tensor]:
    """Keys' and values' scales, float32 [1], or [num_kv_heads, 1]."""
    key, value = (
        scale.to(device, torch.float32) if scale.ndim == 1 else scale.to(device).float().flatten(1)
        for scale in (scales.key, scales.value)
    )
    return key, value


def coarsest_compute(decoder: Decoder) -> str:
    """What rounds most on the way through a decoder with a wide cache: dtype, or products."""
    products = decoder.backend.compute if isinstance(decoder.backend, NativeBackend) else ""
    if products == "int8":
        return "int8"
    return "bfloat16" if products == "bf16" else str(decoder.dtype).removeprefix("torch.")


def choose_form(decoder: Decoder, form: CacheForm) -> tuple[Decoder, tuple[str, ...]]:
    """One native call a step where that is possible, and a note where it was expected."""
    obstacle = why_not_native(decoder)
    if obstacle is None:
        return compile_decoder(decoder, form), ()
    notes = fallback_notes(form.schemes, decoder.backend, decoder.config.head_dim)
    if isinstance(decoder.backend, NativeBackend):
        notes = (f"the decoder does not run as one native call a step: {obstacle}", *notes)
    return replace(decoder, kv=form), notes


def evicting_form(decoder: Decoder, form: CacheForm) -> tuple[Decoder, tuple[str, ...]]:
    """Layer by layer on torch, and a note where something faster would have been possible."""
    counting = replace(decoder, kv=replace(form, counts_votes=True))
    if decoder.backend.fused_kernel:
        return counting, (plain_note(EVICTION_OBSTACLE),)
    # SmolLM2-135M, one request: 74 ms a token, and 21 ms in native calls.
    cost = "a token of a small model then takes 3 to 4 times as long"
    note = f"the decoder does not run as one native call a step: {EVICTION_OBSTACLE}; {cost}"
    return counting, () if why_not_native(decoder) else (note,)


def refuse_notes(notes: Iterable[str]) -> None:
    """Under ``--strict`` a note is an error."""
    if text := "; ".join(notes):
        raise EngineError(f"--strict: {text}")


def resolve_device(name: str) -> torch.device:
    """``auto`` is a GPU if torch sees one.

    Raises:
        UsageError: ``cuda`` without a GPU.
    """
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise UsageError(
            "device cuda: torch sees no GPU; use --device cpu, or install torch for CUDA"
        )
    if name == "auto":
        name = "cuda" if available else "cpu"
    return torch.device(name)


def resolve_dtype(
    name: str, config: dict[str, object], device: torch.device
) -> tuple[torch.dtype, tuple[str, ...]]:
    """Compute dtype, and a note when it is not the checkpoint's."""
    stored = CONFIG_DTYPES.get(
        str(config.get("dtype") or config.get("torch_dtype")), torch.bfloat16
    )
    if name != "auto":
        return DTYPES[name], ()
    if device.type == "cpu" and stored == torch.float16:
        note = "the checkpoint is float16, which CPUs compute slowly: running in bfloat16"
        return torch.bfloat16, (f"{note} (--dtype fp32 keeps every bit)",)
    return stored, ()
