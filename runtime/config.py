"""What the decoder needs to know of a model, read once from ``config.json`` and checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from qtool.errors import ModelError
from qtool.runtime.families import FAMILIES, FULL, SLIDING, Family, rotates
from qtool.runtime.rope_config import RopeConfig, parse_rope

Activation = Literal["silu", "gelu_tanh"]
ACTIVATIONS: Mapping[str, Activation] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}

# Keys that change what a model computes, in ways the decoder does not have.
_REFUSED = ("use_bidirectional_attention", "attn_output_gate", "attention_chunk_size")


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """A mixture of experts.

    Attributes:
        width: intermediate size of an expert.
        top_k: experts a token goes to.
        normalize: whether their weights are made to sum to one.
        shared_width: intermediate size of the expert that sees every token, or ``None``.
        layers: for each layer, whether it has the mixture; the others have a plain MLP.
    """

    num_experts: int
    width: int
    top_k: int
    normalize: bool
    shared_width: int | None
    layers: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Shape of a decoder.

    Attributes:
        family: what no config key says.
        max_position: most tokens of a sequence unless more is asked for.
        longest: most tokens of a sequence.
        ropes: the rotary tables in use.
        rope_of: for each layer its entry of ``ropes``, or ``None``: positions are not rotated.
        windows: for each layer its sliding window in tokens, or ``None``.
        attention_scale: what scores are multiplied by.
        attention_softcap, final_softcap: scores and logits become ``cap * tanh(x / cap)``.
        embedding_scale: what embeddings are multiplied by.
    """

    model_type: str
    family: Family
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    max_position: int
    longest: int
    ropes: tuple[RopeConfig, ...]
    rope_of: tuple[int | None, ...]
    tied_head: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    windows: tuple[int | None, ...]
    activation: Activation
    attention_scale: float
    attention_softcap: float | None
    final_softcap: float | None
    embedding_scale: float
    moe: MoeConfig | None

    @property
    def window(self) -> int | None:
        """Tokens that any layer still reads, if all have a window: older ones can be forgotten."""
        sizes = [window for window in self.windows if window is not None]
        return max(sizes) if len(sizes) == self.num_layers else None

    def kv_bytes_per_token(self, item_size: int) -> int:
        """Bytes of keys and values one token takes: heads x head size x layers x 2 x bytes."""
        return self.num_kv_heads * self.head_dim * self.num_layers * 2 * item_size


def parse_decoder_config(config: Mapping[str, Any]) -> DecoderConfig:
    """Read ``config.json``.

    Raises:
        ModelError: an architecture or a feature the decoder does not have, by name, or a key
            that is missing.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise ModelError(
            f"model_type {model_type!r} is not supported; supported are "
            f"{', '.join(FAMILIES)} (SmolLM2 is a llama, Phi-4 a phi3)"
        )
    family = FAMILIES[model_type]
    _refuse_unsupported(config)
    try:
        return _decoder_config(model_type, family, {**family.defaults, **config})
    except KeyError as error:
        raise ModelError(f"config.json has no {error}, which a {model_type} model needs") from None


def _decoder_config(model_type: str, family: Family, config: Mapping[str, Any]) -> DecoderConfig:
    hidden_size, num_heads = config["hidden_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or hidden_size // num_heads
    attention_bias = bool(config.get("attention_bias", False))
    layer_types = _layer_types(family, config)
    ropes, rope_of = _ropes(family, config, head_dim, layer_types)
    max_position = config["max_position_embeddings"]
    return DecoderConfig(
        model_type=model_type,
        family=family,
        vocab_size=config["vocab_size"],
        hidden_size=hidden_size,
        intermediate_size=config["intermediate_size"],
        num_layers=config["num_hidden_layers"],
        num_heads=num_heads,
        num_kv_heads=config.get("num_key_value_heads") or num_heads,
        head_dim=head_dim,
        norm_eps=config.get("rms_norm_eps", 1e-6),
        max_position=max_position,
        longest=min(rope.longest(max_position) for rope in ropes),
        ropes=ropes,
        rope_of=rope_of,
        tied_head=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=bool(config.get("qkv_bias", family.qkv_bias)) or attention_bias,
        o_bias=attention_bias,
        mlp_bias=bool(config.get("mlp_bias", False)),
        windows=_windows(config, layer_types),
        activation=_activation(family, config),
        attention_scale=float(config.get("query_pre_attn_scalar") or head_dim) ** -0.5,
        attention_softcap=config.get("attn_logit_softcapping"),
        final_softcap=config.get("final_logit_softcapping"),
        embedding_scale=hidden_size**0.5 if family.scaled_embedding else 1.0,
        moe=_moe(family, config),
    )


def _refuse_unsupported(config: Mapping[str, Any]) -> None:
    for key in _REFUSED:
        if config.get(key):
            raise ModelError(f"{key} {config[key]!r}: the decoder does not have it")


def _activation(family: Family, config: Mapping[str, Any]) -> Activation:
    key = family.activation_key
    name = config.get(key, "silu")
    if name not in ACTIVATIONS:
        raise ModelError(f"{key} {name!r}: the decoder has {', '.join(ACTIVATIONS)} only")
    return ACTIVATIONS[name]


def _layer_types(family: Family, config: Mapping[str, Any]) -> tuple[str, ...]:
    count = config["num_hidden_layers"]
    given = config.get("layer_types")
    types = given or [family.layer_type(config, layer) for layer in range(count)]
    if len(types) != count:
        raise ModelError(f"layer_types has {len(types)} entries for {count} layers")
    if other := sorted(set(types) - {SLIDING, FULL}):
        raise ModelError(f"layer_types has {other[0]!r}: the decoder has {SLIDING} and {FULL} only")
    return tuple(types)


def _windows(config: Mapping[str, Any], layer_types: tuple[str, ...]) -> tuple[int | None, ...]:
    window = config.get("sliding_window")
    if not window or not config.get("use_sliding_window", True):
        return (None,) * len(layer_types)
    return tuple(window if kind == SLIDING else None for kind in layer_types)


def _ropes(
    family: Family, config: Mapping[str, Any], head_dim: int, layer_types: tuple[str, ...]
) -> tuple[tuple[RopeConfig, ...], tuple[int | None, ...]]:
    """The distinct rotary tables, and which of them each layer takes."""
    by_type = {kind: _rope(family, config, head_dim, kind) for kind in dict.fromkeys(layer_types)}
    ropes = tuple(dict.fromkeys(by_type.values()))
    layers = enumerate(layer_types)
    return ropes, tuple(
        ropes.index(by_type[kind]) if rotates(config, layer) else None for layer, kind in layers
    )


def _rope(family: Family, config: Mapping[str, Any], head_dim: int, layer_type: str) -> RopeConfig:
    """Where layers with a window have a base of their own, scalings are for the others."""
    if family.local_theta is None or layer_type != SLIDING:
        return parse_rope(config, head_dim, layer_type)
    settings = dict((config.get("rope_parameters") or {}).get(SLIDING) or {})
    settings.setdefault("rope_theta", config.get("rope_local_base_freq", family.local_theta))
    local = {**config, "rope_parameters": settings, "rope_scaling": None, "rope_theta": None}
    return parse_rope(local, head_dim)


def _moe(family: Family, config: Mapping[str, Any]) -> MoeConfig | None:
    names = family.experts
    if names is None:
        return None
    step, plain = config.get("decoder_sparse_step") or 1, config.get("mlp_only_layers") or ()
    return MoeConfig(
        # Transformers writes the first name for what hub files of Qwen call by the second.
        num_experts=config.get("num_local_experts") or config["num_experts"],
        width=config[names.width],
        top_k=config["num_experts_per_tok"],
        normalize=names.always_normalized or bool(config.get("norm_topk_prob", False)),
        shared_width=config["shared_expert_intermediate_size"] if names.shared else None,
        layers=tuple(
            layer not in plain and (layer + 1) % step == 0
            for layer in range(config["num_hidden_layers"])
        ),
    )
