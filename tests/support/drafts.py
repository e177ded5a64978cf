"""Small checkpoints of every format as plain values: change one thing, write, and look at it.

Tensors have the right names, dtypes and shapes, and mean nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

HIDDEN, WIDE, LAYERS, HEADS, VOCAB, GROUP = 256, 512, 2, 8, 96, 32

LINEARS = {
    **{f"self_attn.{letter}_proj": (HIDDEN, HIDDEN) for letter in "qkvo"},
    "mlp.gate_proj": (WIDE, HIDDEN),
    "mlp.up_proj": (WIDE, HIDDEN),
    "mlp.down_proj": (HIDDEN, WIDE),
}


@dataclass
class Draft:
    """A checkpoint before it is written."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    files: dict[str, str] = field(default_factory=dict)

    @property
    def block(self) -> dict[str, Any]:
        """Its quantization_config."""
        found: dict[str, Any] = self.config["quantization_config"]
        return found

    @property
    def weights(self) -> dict[str, Any]:
        """Arguments of the weights of its only group."""
        found: dict[str, Any] = self.block["config_groups"]["group_0"]["weights"]
        return found

    def write(self, folder: Path) -> Path:
        """Write a folder."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        for name, text in self.files.items():
            (folder / name).write_text(text)
        save_file(self.tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder


def linear_names() -> list[str]:
    """Full names of all linears but the head."""
    return [f"model.layers.{layer}.{name}" for layer in range(LAYERS) for name in LINEARS]


def make_draft(layout: str) -> Draft:
    """A Llama with an untied head that stays as it was; its linears are stored as ``layout``."""
    block, parts = _LAYOUTS[layout]
    half = torch.bfloat16
    norms = [
        f"model.layers.{layer}.{name}"
        for layer in range(LAYERS)
        for name in ("input_layernorm", "post_attention_layernorm")
    ]
    tensors = {f"{name}.weight": torch.ones(HIDDEN, dtype=half) for name in (*norms, "model.norm")}
    tensors["model.embed_tokens.weight"] = torch.zeros(VOCAB, HIDDEN, dtype=half)
    tensors["lm_head.weight"] = torch.zeros(VOCAB, HIDDEN, dtype=half)
    for name in linear_names():
        n, k = LINEARS[name.partition(".layers.")[2].partition(".")[2]]
        tensors |= {f"{name}.{part}": tensor for part, tensor in parts(n, k).items()}
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": WIDE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "vocab_size": VOCAB,
        "dtype": "bfloat16",
        "tie_word_embeddings": False,
    }
    if block:
        config["quantization_config"] = json.loads(json.dumps(block))
    return Draft(
        config,
        tensors,
        {
            "generation_config.json": json.dumps({"eos_token_id": 2}),
            "tokenizer.json": "{}",
            "tokenizer_config.json": "{}",
            "chat_template.jinja": "{{ messages }}",
        },
    )


def _compressed(
    layout: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None
) -> dict[str, Any]:
    args = {"symmetric": True, "dynamic": False, "group_size": None, "actorder": None}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": args | weights,
                "input_activations": inputs and args | inputs,
                "output_activations": None,
            }
        },
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }


def _half(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.bfloat16)


def _words(*shape: int, word: int = 0) -> Tensor:
    return torch.full(shape, word, dtype=torch.int32)


def _packed(n: int, k: int) -> dict[str, Tensor]:
    return {
        "weight_packed": _words(n, k // 8),
        "weight_scale": _half(n, k // GROUP),
        "weight_shape": torch.tensor([n, k]),
    }


def _packed_zeros(n: int, k: int) -> dict[str, Tensor]:
    return _packed(n, k) | {"weight_zero_point": _words(n // 8, k // GROUP)}


def _int8(n: int, k: int) -> dict[str, Tensor]:
    return {"weight": torch.zeros(n, k, dtype=torch.int8), "weight_scale": _half(n, 1)}


def _float8(n: int, k: int) -> Tensor:
    return torch.zeros(n, k).to(torch.float8_e4m3fn)


def _static(n: int, k: int) -> dict[str, Tensor]:
    return {"weight": _float8(n, k), "weight_scale": _half(1), "input_scale": _half(1)}


def _awq(n: int, k: int) -> dict[str, Tensor]:
    return {
        "qweight": _words(k, n // 8),
        "qzeros": _words(k // GROUP, n // 8),
        "scales": _half(k // GROUP, n).half(),
    }


def _gptq(n: int, k: int) -> dict[str, Tensor]:
    return {
        "qweight": _words(k // 8, n),
        "qzeros": _words(k // GROUP, n // 8, word=0x77777777),
        "scales": _half(k // GROUP, n).half(),
        "g_idx": (torch.arange(k) // GROUP).int(),
    }


def _blocks(n: int, k: int) -> dict[str, Tensor]:
    return {"weight": _float8(n, k), "weight_scale_inv": torch.ones(-(-n // 128), -(-k // 128))}


def _fbgemm(n: int, k: int) -> dict[str, Tensor]:
    return {"weight": _float8(n, k), "weight_scale": torch.ones(n, 1)}


def _plain(n: int, k: int) -> dict[str, Tensor]:
    return {"weight": _half(n, k)}


_INT8_ARGS = {"num_bits": 8, "type": "int"}
_FLOAT_ARGS = {"num_bits": 8, "type": "float"}
_W4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP}
_HEAD = {"modules_to_not_convert": ["lm_head"]}
_GROUPS = {"bits": 4, "group_size": GROUP}

_LAYOUTS: dict[str, tuple[dict[str, Any], Callable[[int, int], dict[str, Tensor]]]] = {
    "plain": ({}, _plain),
    "pack-quantized": (_compressed("pack-quantized", _W4), _packed),
    "pack-quantized asym": (
        _compressed("pack-quantized", _W4 | {"symmetric": False}),
        _packed_zeros,
    ),
    "int-quantized": (
        _compressed(
            "int-quantized",
            _INT8_ARGS | {"strategy": "channel"},
            _INT8_ARGS | {"strategy": "token", "dynamic": True},
        ),
        _int8,
    ),
    "float-quantized": (
        _compressed(
            "float-quantized",
            _FLOAT_ARGS | {"strategy": "tensor"},
            _FLOAT_ARGS | {"strategy": "tensor"},
        ),
        _static,
    ),
    "awq": ({"quant_method": "awq", "version": "gemm", "zero_point": True} | _GROUPS | _HEAD, _awq),
    "gptq": (
        {"quant_method": "gptq", "desc_act": False, "sym": True, "checkpoint_format": "gptq"}
        | _GROUPS,
        _gptq,
    ),
    "fp8": (
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
        | _HEAD,
        _blocks,
    ),
    "fbgemm_fp8": ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0} | _HEAD, _fbgemm),
    "modelopt": (
        {
            "quant_method": "modelopt",
            "quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]},
        },
        _static,
    ),
}

LAYOUTS = tuple(_LAYOUTS)
