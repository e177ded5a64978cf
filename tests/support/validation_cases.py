"""For every rule of ``qtool validate`` a checkpoint that breaks it, alone where that can be."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from qtool.formats.digests import digests_json
from qtool.formats.reader import CheckpointReader
from qtool.formats.safetensors_file import tensor_digest
from qtool.formats.validation.finding import TARGETS
from support.drafts import HEADS, HIDDEN, Draft, linear_names

Q, K, V = (f"model.layers.0.self_attn.{letter}_proj" for letter in "qkv")
DOWN = "model.layers.1.mlp.down_proj"


@dataclass(frozen=True)
class Case:
    """One edit, and the rule that it breaks.

    ``edit`` changes the draft; ``spoil`` the folder. ``along`` are rules that cannot but speak too.
    """

    rule: str
    layout: str = "pack-quantized"
    level: str = "error"
    targets: tuple[str, ...] = TARGETS
    edit: Callable[[Draft], object] = lambda draft: None
    spoil: Callable[[Path], object] = lambda folder: None
    along: frozenset[str] = frozenset()


def put(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text)


def make_index(folder: Path, **extra: object) -> None:
    """Make the single file a shard of one, with an index."""
    with (folder / "model.safetensors").open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        names = set(json.loads(file.read(length))) - {"__metadata__"}
    shard = "model-00001-of-00001.safetensors"
    (folder / "model.safetensors").rename(folder / shard)
    weight_map = dict.fromkeys(sorted(names), shard)
    put(folder, "model.safetensors.index.json", json.dumps({"weight_map": weight_map, **extra}))


def _reorder(draft: Draft) -> None:
    draft.tensors[f"{Q}.g_idx"] = draft.tensors[f"{Q}.g_idx"].flip(0)


def _resize_groups(draft: Draft, size: int) -> None:
    draft.weights["group_size"] = size
    for name in linear_names():
        n, k = draft.tensors[f"{name}.weight_shape"].tolist()
        draft.tensors[f"{name}.weight_scale"] = torch.ones(n, -(-k // size), dtype=torch.bfloat16)


def _other_group(draft: Draft) -> None:
    """k alone in 8 bits."""
    groups = draft.block["config_groups"]
    args = groups["group_0"]["weights"] | {"num_bits": 8}
    groups["group_1"] = groups["group_0"] | {"targets": [K], "weights": args}
    n, k = draft.tensors[f"{K}.weight_shape"].tolist()
    draft.tensors[f"{K}.weight_packed"] = torch.zeros(n, k // 4, dtype=torch.int32)


def make_plain(draft: Draft, *names: str) -> None:
    for name in names:
        for tensor in [tensor for tensor in draft.tensors if tensor.startswith(f"{name}.")]:
            del draft.tensors[tensor]
        draft.tensors[f"{name}.weight"] = torch.zeros(256, 256, dtype=torch.bfloat16)


def _ignore_one(draft: Draft) -> None:
    make_plain(draft, V)
    draft.block["ignore"].append(V)


def _tie(draft: Draft) -> None:
    draft.config["tie_word_embeddings"] = True
    del draft.tensors["lm_head.weight"]


def _tie_unignored(draft: Draft) -> None:
    _tie(draft)
    draft.block["ignore"] = []


def _cache(draft: Draft, value: float = 1.0, layers: tuple[int, ...] = (0, 1)) -> None:
    for layer in layers:
        for name in ("k_scale", "v_scale"):
            draft.tensors[f"model.layers.{layer}.self_attn.{name}"] = torch.tensor([value])


def _cache_scheme(draft: Draft, **changes: object) -> None:
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True}
    draft.block["kv_cache_scheme"] = scheme | changes


def _cache_plan(folder: Path, layers: int, scheme: str = "int8", digits: str = "") -> None:
    (folder / "qtool").mkdir()
    exponents = [[digits] * HEADS] * layers if digits else None
    plan = {"version": 1, "name": scheme, "layers": [scheme] * layers, "key_exponents": exponents}
    put(folder, "qtool/kv_plan.json", json.dumps(plan))


def _digests(folder: Path, digest: str) -> None:
    """What one tensor was written with; of the others nothing is known but their names."""
    (folder / "qtool").mkdir()
    with CheckpointReader(folder) as reader:
        known = {name: tensor_digest(reader.get(name)) for name in reader.names()}
    written = digests_json(known | {f"{Q}.weight_scale": digest})
    put(folder, "qtool/digests.json", json.dumps(written))


def _both(*edits: Callable[[Draft], object]) -> Callable[[Draft], object]:
    def apply(draft: Draft) -> None:
        for edit in edits:
            edit(draft)

    return apply


def _no_layer(draft: Draft) -> None:
    for name in [name for name in draft.tensors if name.startswith("model.layers.1.")]:
        del draft.tensors[name]


def _odd_blocks(draft: Draft) -> None:
    weight = torch.zeros(256, 192).to(torch.float8_e4m3fn)
    draft.tensors[f"{DOWN}.weight"] = weight
    draft.tensors[f"{DOWN}.weight_scale_inv"] = torch.ones(2, 2)


CASES = (
    Case("index-metadata", targets=("transformers",), spoil=make_index),
    Case(
        "index-metadata",
        level="warning",
        spoil=lambda folder: make_index(folder, metadata={"total_size": 3}),
    ),
    Case(
        "stray-weights",
        targets=("vllm",),
        spoil=lambda folder: (folder / "extra.safetensors").write_bytes(
            (folder / "model.safetensors").read_bytes()
        ),
    ),
    Case(
        "custom-code",
        level="warning",
        targets=("vllm", "transformers"),
        edit=lambda d: d.config.update(auto_map={"AutoConfig": "configuration_x.XConfig"}),
    ),
    Case("json-files", spoil=lambda folder: put(folder, "tokenizer.json", "{")),
    Case("tokenizer", level="warning", edit=lambda d: d.files.pop("tokenizer.json")),
    Case(
        "generation-config",
        level="warning",
        edit=lambda d: d.files.pop("generation_config.json"),
    ),
    Case("generation-config", spoil=lambda f: put(f, "generation_config.json", "[]")),
    Case(
        "generation-config",
        spoil=lambda f: put(f, "generation_config.json", '{"eos_token_id": [2, 99]}'),
    ),
    Case("chat-template", level="warning", edit=lambda d: d.files.pop("chat_template.jinja")),
    Case(
        "chat-template",
        level="warning",
        spoil=lambda f: put(f, "tokenizer_config.json", '{"chat_template": "{{ other }}"}'),
    ),
    Case(
        "architecture",
        level="warning",
        targets=("vllm",),
        edit=lambda d: d.config.pop("architectures"),
    ),
    Case("architecture", edit=lambda d: d.config.pop("model_type")),
    Case("dtype", level="warning", edit=lambda d: d.config.pop("dtype")),
    Case("dtype", targets=("transformers",), edit=lambda d: d.config.update(dtype="int8")),
    Case(
        "place-of-config",
        "modelopt",
        targets=("transformers",),
        edit=lambda d: d.files.update(
            {"hf_quant_config.json": json.dumps(d.config.pop("quantization_config"))}
        ),
    ),
    Case("dtype", level="warning", edit=lambda d: d.config.update(torch_dtype="float16")),
    Case("readable-config", edit=lambda d: d.block.update(ignore=["re:("])),
    Case("readable-config", "awq", edit=lambda d: d.block.update(quant_method="hqq")),
    Case(
        "place-of-config",
        "gptq",
        targets=("vllm", "transformers"),
        edit=lambda d: d.files.update(
            {"quantize_config.json": json.dumps(d.config.pop("quantization_config"))}
        ),
    ),
    Case("required-keys", "gptq", targets=("vllm",), edit=lambda d: d.block.pop("desc_act")),
    Case("required-keys", "awq", targets=("vllm",), edit=lambda d: d.block.pop("zero_point")),
    Case(
        "unknown-keys",
        targets=("vllm", "transformers"),
        edit=lambda d: d.weights.update(rounding="up"),
    ),
    Case("status", targets=("transformers",), edit=lambda d: d.block.pop("quantization_status")),
    Case("patterns", level="warning", edit=lambda d: d.block["ignore"].append("model.visual")),
    Case(
        "schemes",
        "pack-quantized asym",
        level="warning",
        targets=("transformers",),
    ),
    Case(
        "schemes",
        "gptq",
        targets=("vllm",),
        edit=lambda d: d.block.update(sym=False),
        along=frozenset({"gptq-version"}),
    ),
    Case("deprecated-method", "fbgemm_fp8", level="warning", targets=("vllm",)),
    Case("awq-keys", "awq", edit=lambda d: d.block.update(version="gemv")),
    Case(
        "awq-keys",
        "awq",
        level="warning",
        targets=("vllm",),
        edit=lambda d: d.block.update(zero_point=False),
    ),
    Case(
        "kernel-groups",
        level="warning",
        targets=("vllm",),
        edit=lambda d: _resize_groups(d, 16),
    ),
    Case(
        "gptq-version",
        "gptq",
        level="warning",
        edit=lambda d: d.block.update(sym=False),
        along=frozenset({"schemes"}),
    ),
    Case(
        "activation-order",
        "gptq",
        targets=("vllm",),
        edit=_both(_reorder, lambda d: d.block.update(desc_act=True)),
    ),
    Case(
        "activation-order",
        targets=("vllm", "transformers"),
        edit=lambda d: d.weights.update(actorder="group"),
    ),
    Case("config-and-tensors", edit=lambda d: make_plain(d, Q)),
    Case("config-and-tensors", edit=lambda d: d.block["ignore"].append("re:.*mlp.*")),
    Case("config-and-tensors", "awq", edit=lambda d: make_plain(d, Q)),
    Case("config-and-tensors", edit=lambda d: d.config.pop("quantization_config")),
    Case("codes", edit=lambda d: d.tensors.pop(f"{DOWN}.weight_packed")),
    Case("codes", edit=lambda d: d.block.update(format="nvfp4-pack-quantized")),
    Case("missing-tensors", edit=lambda d: d.tensors.pop(f"{DOWN}.weight_scale")),
    Case("missing-tensors", "gptq", edit=lambda d: d.tensors.pop(f"{DOWN}.qzeros")),
    Case("missing-tensors", "float-quantized", edit=lambda d: d.tensors.pop(f"{Q}.input_scale")),
    Case(
        "tensor-dtypes",
        "awq",
        edit=lambda d: d.tensors.update({f"{Q}.scales": d.tensors[f"{Q}.scales"].float()}),
    ),
    Case(
        "tensor-shapes",
        "fp8",
        edit=lambda d: d.tensors.update({f"{Q}.weight_scale_inv": torch.ones(2, 1)}),
    ),
    Case(
        "tensor-shapes",
        edit=lambda d: d.tensors.update({f"{Q}.weight_scale": torch.ones(256, 9).bfloat16()}),
    ),
    Case(
        "weight-shapes",
        targets=("transformers", "qtool"),
        edit=lambda d: d.tensors.update({f"{Q}.weight_shape": torch.tensor([256, 512])}),
    ),
    Case(
        "unknown-tensors",
        targets=("vllm", "qtool"),
        edit=lambda d: d.tensors.update({f"{Q}.act_scales": torch.ones(256)}),
    ),
    Case(
        "whole-groups",
        edit=lambda d: _resize_groups(d, 96),
        along=frozenset({"kernel-groups", "tensor-parallel"}),
    ),
    Case("fused-schemes", targets=("vllm", "qtool"), edit=_other_group),
    Case("fused-ignore", targets=("vllm",), edit=_ignore_one),
    Case(
        "fused-scales",
        "float-quantized",
        level="warning",
        targets=("vllm",),
        edit=lambda d: d.tensors.update({f"{Q}.weight_scale": torch.tensor([2.0]).bfloat16()}),
    ),
    Case("group-index", "gptq", targets=("vllm",), edit=_reorder),
    Case(
        "gptq-zeros",
        "gptq",
        edit=lambda d: d.tensors[f"{Q}.qzeros"].fill_(0x66666666),
    ),
    Case("gptq-zeros", "gptq", edit=lambda d: d.block.update(checkpoint_format="gptq_v2")),
    Case("layers", edit=_no_layer),
    Case("digests", spoil=lambda folder: _digests(folder, "0" * 64)),
    Case("embedding", edit=lambda d: d.config.update(vocab_size=97)),
    Case("head", edit=lambda d: d.tensors.pop("lm_head.weight")),
    Case("head", level="warning", edit=lambda d: d.config.update(tie_word_embeddings=True)),
    Case("tied-head-ignored", targets=("transformers",), edit=_tie_unignored),
    Case(
        "cache-scheme",
        targets=("vllm",),
        edit=_both(_cache, lambda d: _cache_scheme(d, num_bits=4)),
    ),
    Case("cache-scales", edit=_both(lambda d: _cache(d, layers=(0,)), _cache_scheme)),
    Case("cache-scales", level="warning", edit=_cache),
    Case("cache-scale-values", edit=_both(lambda d: _cache(d, value=-1.0), _cache_scheme)),
    Case("cache-plan", targets=("qtool",), spoil=lambda folder: _cache_plan(folder, 3)),
    Case("cache-plan", targets=("qtool",), spoil=lambda folder: _cache_plan(folder, 2, "int3")),
    Case(
        "cache-plan",
        targets=("qtool",),
        spoil=lambda folder: _cache_plan(folder, 2, digits="0" * (HIDDEN // HEADS - 1)),
    ),
    Case(
        "finite-scales",
        "float-quantized",
        edit=lambda d: d.tensors[f"{DOWN}.input_scale"].fill_(float("nan")),
    ),
    Case(
        "block-multiples",
        "fp8",
        level="warning",
        targets=("vllm", "transformers"),
        edit=_odd_blocks,
        along=frozenset({"tensor-parallel"}),
    ),
    Case(
        "tensor-parallel",
        level="warning",
        targets=("vllm",),
        edit=lambda d: d.config.update(num_attention_heads=4, num_key_value_heads=4, head_dim=64),
    ),
)
