"""Rules on the model as a whole: layers, embedding, head, scales and plan of the cache, devices."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import torch

from qtool.errors import CheckpointError
from qtool.formats.kv_plan import KV_PLAN_PATH, read_kv_plan
from qtool.formats.kv_scales import promises_kv_scales
from qtool.formats.reader import CONFIG_NAME
from qtool.formats.tensor_parallel import SIZES, obstacles
from qtool.formats.validation.configs import QUANTIZATION
from qtool.formats.validation.facts import Facts, Linear
from qtool.formats.validation.finding import Finding

HEAD = "lm_head"

# GPT-NeoX's on disk; every loader renames it.
NEOX_HEAD = "embed_out"

_LAYER = re.compile(r"\blayers\.(\d+)\.")

# What vLLM takes as kv_cache_scheme.
CACHE_SCHEME: Mapping[str, tuple[object, ...]] = {
    "num_bits": (8,),
    "type": ("float",),
    "symmetric": (True,),
    "strategy": ("tensor", "attn_head"),
}

# Scales of keys and values, as compressed-tensors, ModelOpt and older tools name them.
_CACHE_SCALE = re.compile(
    r"\.(?:attn\.|[kv]_proj\.|qkv_proj\.)?(?:[kv]_scale|kv_scale)$|\.[kv]_proj\.output_scale$"
)


def layers(facts: Facts) -> Iterator[Finding]:
    """No layer is missing; more than the config counts are those of speculative heads."""
    count = facts.decoder.get("num_hidden_layers")
    found = {int(match[1]) for name in facts.reader.entries if (match := _LAYER.search(name))}
    if not isinstance(count, int) or not found:
        return
    missing = sorted(set(range(min(count, 10_000))) - found)
    if missing:
        yield Finding(
            "error",
            f"{CONFIG_NAME}: num_hidden_layers",
            f"{count}, and no tensors of layer {', '.join(map(str, missing[:4]))}",
            "every layer has tensors",
            "copy the missing shards, or correct the number",
        )


def embedding(facts: Facts) -> Iterator[Finding]:
    """The table has the size that the config says."""
    wanted = (facts.decoder.get("vocab_size"), facts.decoder.get("hidden_size"))
    for name, entry in facts.reader.entries.items():
        if name.endswith(("embed_tokens.weight", ".wte.weight")) and entry.shape != wanted:
            yield Finding(
                "error",
                name.removesuffix(".weight"),
                f"shape {list(entry.shape)}",
                f"vocab_size and hidden_size of the config are {list(wanted)}",
                f"use the {CONFIG_NAME} that belongs to the weights",
            )


def head(facts: Facts) -> Iterator[Finding]:
    """A tied head is the embedding; any other has a weight of its own."""
    tied = facts.config.get("tie_word_embeddings", facts.decoder.get("tie_word_embeddings"))
    parts = [name for name in facts.reader.entries if name.startswith(f"{HEAD}.")]
    where = f"{CONFIG_NAME}: tie_word_embeddings"
    if tied is False and not parts and f"{NEOX_HEAD}.weight" not in facts.reader.entries:
        yield Finding(
            "error",
            where,
            f"false, and no {HEAD}",
            "an untied head has a weight",
            "write true, or add the head's weight",
        )
    if tied is True and f"{HEAD}.weight" in parts:
        yield Finding(
            "warning",
            where,
            f"true, and {HEAD}.weight is there",
            "loaders drop it and take the embedding",
            "delete the tensor, or write false",
        )
    elif tied is True and parts:
        yield Finding(
            "error",
            where,
            f"true, and {HEAD} is quantized",
            "a tied head is the embedding, in full precision",
            "write false, and keep embedding and head apart",
        )


def tied_head_ignored(facts: Facts) -> Iterator[Finding]:
    """transformers makes a quantized linear of whatever a target means."""
    tied = facts.config.get("tie_word_embeddings") is True
    if tied and facts.method == "compressed-tensors" and facts.claims(HEAD) is not None:
        yield Finding(
            "error",
            f"{QUANTIZATION}: ignore",
            f"does not name {HEAD}, which is tied",
            "transformers quantizes every linear that is not ignored, and a tied one has no codes",
            f"add {HEAD}",
            ("transformers",),
        )


def cache_scheme(facts: Facts) -> Iterator[Finding]:
    """The one form that vLLM takes."""
    scheme = (facts.block or {}).get("kv_cache_scheme")
    if scheme is None:
        return
    values = scheme if isinstance(scheme, dict) else {}
    for key, allowed in CACHE_SCHEME.items():
        if values.get(key) not in allowed:
            yield Finding(
                "error",
                f"{QUANTIZATION}: kv_cache_scheme.{key}",
                repr(values.get(key)),
                f"vLLM takes {' or '.join(map(str, allowed))}",
                "keep other plans of the cache in the sub-folder qtool, and this key null",
                ("vllm",),
            )


def cache_scales(facts: Facts) -> Iterator[Finding]:
    """Scales are promised and there, or neither."""
    found = [name for name in facts.reader.entries if _CACHE_SCALE.search(name)]
    promised = promises_kv_scales(facts.block or {})
    count = facts.decoder.get("num_hidden_layers")
    if promised and isinstance(count, int) and len(_layers_of(found)) < count:
        yield Finding(
            "error",
            QUANTIZATION,
            f"cache scales in {len(_layers_of(found))} of {count} layers",
            "a static FP8 cache has scales of keys and values in every layer",
            "calibrate them, or set kv_cache_scheme to null",
        )
    if found and not promised:
        yield Finding(
            "warning",
            QUANTIZATION,
            f"{len(found)} scales of keys and values, and no kv_cache_scheme",
            "engines use the scales where the config promises them",
            "set kv_cache_scheme, or delete the scales",
        )


def cache_scale_values(facts: Facts) -> Iterator[Finding]:
    """A scale is one positive number, or one a head."""
    heads = facts.decoder.get("num_key_value_heads")
    for name, entry in facts.reader.entries.items():
        if not _CACHE_SCALE.search(name):
            continue
        count = entry.num_bytes // entry.dtype.itemsize
        if count not in (1, heads) or not entry.dtype.is_floating_point:
            value = f"{str(entry.dtype).removeprefix('torch.')} of shape {list(entry.shape)}"
        else:
            scale = facts.small(name).float()
            if bool((scale.isfinite() & (scale > 0)).all()):
                continue
            value = f"scale {scale.flatten().tolist()[0]}"
        rule = "a cache scale is one positive float, or one for each key-value head"
        yield Finding("error", name, value, rule, "calibrate it again")


def cache_plan(facts: Facts) -> Iterator[Finding]:
    """The plan that our runtime follows is one for this model."""
    try:
        plan = read_kv_plan(facts.reader.folder)
        count = facts.decoder.get("num_hidden_layers")
        if plan is not None and isinstance(count, int):
            plan.check_layers(count)
        if plan is not None and (shape := _key_shape(facts)) is not None:
            plan.check_heads(*shape)
    except CheckpointError as error:
        yield Finding(
            "error",
            KV_PLAN_PATH,
            str(error),
            "the plan of the cache is one for the model's layers, KV heads and channels",
            "write it again with qtool quantize --kv-cache, or delete it",
            ("qtool",),
        )


def tensor_parallel(facts: Facts) -> Iterator[Finding]:
    """Heads and groups that several devices can share."""
    shapes = {linear.name: size for linear, _, size in facts.stored()}
    schemes = {linear.name: claim for linear, claim, _ in facts.stored()}
    if not _whole_heads(facts):
        return
    for size in SIZES[1:]:
        problems = obstacles(shapes, facts.decoder, schemes, size)
        if problems:
            yield Finding(
                "warning",
                f"tensor parallel over {size}",
                ", ".join(problems),
                "every device gets whole heads and whole groups",
                "serve it on fewer devices, or quantize with smaller groups",
                ("vllm",),
            )


def block_multiples(facts: Facts) -> Iterator[Finding]:
    """vLLM's block kernels take whole blocks; transformers leaves such layers out."""
    for linear, claim, (n, k) in facts.stored():
        rows, columns = claim.block
        if claim.layout == "fp8-block" and (n % rows or k % columns):
            yield Finding(
                "warning",
                linear.name,
                f"{n} x {k} in blocks of {rows} x {columns}",
                "block FP8 of transformers and vLLM has whole blocks",
                "ignore this linear",
                ("vllm", "transformers"),
            )


def finite_scales(facts: Facts) -> Iterator[Finding]:
    """Scales of inputs and of whole tensors: one number that spoils a layer if it is wrong."""
    for linear, claim, _ in facts.stored():
        names = ["input_scale", "activation_scale"]
        names += ["weight_scale", "weight_scale_inv"] if claim.strategy == "tensor" else []
        for name in names:
            entry = linear.tensors.get(name)
            if entry is None or entry.shape not in ((), (1,)):
                continue
            value = facts.small(f"{linear.name}.{name}").float().item()
            if not (value > 0 and torch.tensor(value).isfinite()):
                rule = "a scale is positive and finite"
                yield Finding("error", linear.name, f"{name} {value}", rule, "calibrate again")


def _key_shape(facts: Facts) -> tuple[int, int] | None:
    """KV heads and their channels, by the weight that makes keys; ``None`` if none is by itself."""
    heads = facts.decoder.get("num_key_value_heads")
    rows = [rows for linear in facts.linears if linear.kind == "k_proj" for rows in _rows(linear)]
    if not rows or not isinstance(heads, int) or heads < 1:
        return None
    return heads, rows[0] // heads


def _rows(linear: Linear) -> tuple[int, ...]:
    """Outputs of a linear, where the headers tell."""
    if linear.size is not None:
        return linear.size[:1]
    weight = linear.tensors.get("weight")
    return () if linear.stored or weight is None else weight.shape[:1]


def _layers_of(names: list[str]) -> set[str]:
    return {match[1] for name in names if (match := _LAYER.search(name))}


def _whole_heads(facts: Facts) -> bool:
    """Whether the config's numbers of heads are numbers."""
    keys = ("num_attention_heads", "num_key_value_heads")
    found = [facts.decoder[key] for key in keys if key in facts.decoder]
    return all(isinstance(value, int) and value > 0 for value in found)
