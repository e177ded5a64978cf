"""One row a model family: what its ``config.json`` leaves out, and what no key of it says.

A row is all that a family adds to the decoder; ``docs/structure.md`` shows how to write one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Config = Mapping[str, Any]
SLIDING, FULL = "sliding_attention", "full_attention"


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """Where a mixture of experts lies on disk.

    Attributes:
        module: the mixture's name in a layer.
        projections: gate, up and down of an expert.
        width: config key of an expert's intermediate size.
        always_normalized: whether the weights of the chosen experts sum to one without a
            ``norm_topk_prob`` that says so.
        shared: whether one more expert sees every token, behind a gate of its own.
    """

    module: str
    projections: tuple[str, str, str]
    width: str
    always_normalized: bool = False
    shared: bool = False


def every_layer(config: Config, layer: int) -> str:
    """All layers have the window, if there is one."""
    return SLIDING


def later_layers(config: Config, layer: int) -> str:
    """Full attention in the first ``max_window_layers``."""
    return SLIDING if layer >= config.get("max_window_layers", layer + 1) else FULL


def alternating(config: Config, layer: int) -> str:
    """The window in the first layer, and every second from there."""
    return FULL if layer % 2 else SLIDING


def every_nth_full(config: Config, layer: int) -> str:
    """Full attention in the last of every ``sliding_window_pattern`` layers."""
    return SLIDING if (layer + 1) % config.get("sliding_window_pattern", 6) else FULL


def alternating_up_to(config: Config, layer: int) -> str:
    """As :func:`alternating`, below ``max_window_layers``."""
    return alternating(config, layer) if layer < config["max_window_layers"] else FULL


def unrotated_layers(config: Config, layer: int) -> str:
    """The window where positions are not rotated."""
    return FULL if rotates(config, layer) else SLIDING


def rotates(config: Config, layer: int) -> bool:
    """Whether a layer has rotary positions (``no_rope_layers`` holds a 1 for those that do)."""
    if listed := config.get("no_rope_layers"):
        return bool(listed[layer])
    interval = config.get("no_rope_layer_interval")
    return not interval or (layer + 1) % interval != 0


@dataclass(frozen=True, slots=True)
class Family:
    """How a family differs from Llama.

    Attributes:
        defaults: config keys with the values that files leave out.
        activation_key: the config key of the MLP's activation.
        layer_type: which layers have the sliding window, where ``layer_types`` does not say.
        qkv_bias: whether q, k and v carry a bias without ``attention_bias``.
        fused: projections are stored as ``qkv_proj`` and ``gate_up_proj``.
        qk_norm: queries and keys are normed in each head, before they are rotated.
        norm_offset: a norm multiplies by ``norm_offset + weight``.
        sandwich: what attention and MLP put out is normed too, before it is added.
        scaled_embedding: embeddings are multiplied by ``sqrt(hidden_size)``.
        local_theta: rotary base of layers with a window, if they have one of their own.
        experts: of a mixture of experts.
    """

    defaults: Config = field(default_factory=dict)
    activation_key: str = "hidden_act"
    layer_type: Callable[[Config, int], str] = every_layer
    qkv_bias: bool = False
    fused: bool = False
    qk_norm: bool = False
    norm_offset: float = 0.0
    sandwich: bool = False
    scaled_embedding: bool = False
    local_theta: float | None = None
    experts: ExpertNames | None = None


_QWEN_EXPERTS = ("gate_proj", "up_proj", "down_proj")
_QWEN_WINDOW = {"use_sliding_window": False, "max_window_layers": 28, "sliding_window": 4096}
_GEMMA_WIDTHS = {"head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 4096}
_GEMMA = {
    **_GEMMA_WIDTHS,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
}

FAMILIES: Mapping[str, Family] = {
    "llama": Family(),
    "smollm3": Family(
        defaults={
            "rope_theta": 2_000_000.0,
            "no_rope_layer_interval": 4,
            "use_sliding_window": False,
            "tie_word_embeddings": True,
        },
        layer_type=unrotated_layers,
    ),
    "mistral": Family(defaults={"sliding_window": 4096}),
    "qwen2": Family(defaults=_QWEN_WINDOW, layer_type=later_layers, qkv_bias=True),
    "qwen3": Family(
        defaults={"head_dim": 128} | _QWEN_WINDOW, layer_type=later_layers, qk_norm=True
    ),
    "gemma2": Family(
        defaults=_GEMMA
        | {
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "max_position_embeddings": 8192,
        },
        activation_key="hidden_activation",
        layer_type=alternating,
        norm_offset=1.0,
        sandwich=True,
        scaled_embedding=True,
    ),
    "gemma3_text": Family(
        defaults=_GEMMA | {"rope_theta": 1_000_000.0, "max_position_embeddings": 131_072},
        activation_key="hidden_activation",
        layer_type=every_nth_full,
        qk_norm=True,
        norm_offset=1.0,
        sandwich=True,
        scaled_embedding=True,
        local_theta=10_000.0,
    ),
    "phi3": Family(
        defaults={"original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5}, fused=True
    ),
    "mixtral": Family(
        defaults={
            "rope_theta": 1_000_000.0,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "rms_norm_eps": 1e-5,
        },
        experts=ExpertNames(
            module="block_sparse_moe",
            projections=("w1", "w3", "w2"),
            width="intermediate_size",
            always_normalized=True,
        ),
    ),
    "qwen2_moe": Family(
        defaults=_QWEN_WINDOW,
        layer_type=alternating_up_to,
        qkv_bias=True,
        experts=ExpertNames("mlp", _QWEN_EXPERTS, "moe_intermediate_size", shared=True),
    ),
    "qwen3_moe": Family(
        defaults=_QWEN_WINDOW,
        qk_norm=True,
        experts=ExpertNames("mlp", _QWEN_EXPERTS, "moe_intermediate_size"),
    ),
}
