"""What the decoder needs to know of a model, read once from ``config.json`` and checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from qtool.errors import ModelError

# model_type -> whether q, k and v always carry a bias (others say so by ``attention_bias``).
SUPPORTED_TYPES = {"llama": False, "mistral": False, "qwen2": True}
ROPE_TYPES = ("default", "linear", "llama3")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding: base, and how positions beyond the training length are scaled."""

    theta: float = 10_000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Shape of a decoder. ``windows[i]`` is layer i's sliding window in tokens, or ``None``."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    max_position: int
    rope: RopeConfig
    tied_head: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    windows: tuple[int | None, ...]

    @property
    def num_parameters(self) -> int:
        """Weights of the whole model, biases and norms left out."""
        heads = (self.num_heads * 2 + self.num_kv_heads * 2) * self.head_dim
        layer = self.hidden_size * (heads + 3 * self.intermediate_size)
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tied_head else 2)
        return self.num_layers * layer + embeddings

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
    if model_type not in SUPPORTED_TYPES:
        raise ModelError(
            f"model_type {model_type!r} is not supported; supported are "
            f"{', '.join(SUPPORTED_TYPES)} (SmolLM2 is a llama)"
        )
    _refuse_unsupported(config)
    try:
        return _decoder_config(model_type, config)
    except KeyError as error:
        raise ModelError(f"config.json has no {error}, which a {model_type} model needs") from None


def _decoder_config(model_type: str, config: Mapping[str, Any]) -> DecoderConfig:
    hidden_size, num_heads = config["hidden_size"], config["num_attention_heads"]
    attention_bias = bool(config.get("attention_bias", False))
    num_layers = config["num_hidden_layers"]
    return DecoderConfig(
        model_type=model_type,
        vocab_size=config["vocab_size"],
        hidden_size=hidden_size,
        intermediate_size=config["intermediate_size"],
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=config.get("num_key_value_heads") or num_heads,
        head_dim=config.get("head_dim") or hidden_size // num_heads,
        norm_eps=config.get("rms_norm_eps", 1e-6),
        max_position=config["max_position_embeddings"],
        rope=_parse_rope(config),
        tied_head=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=SUPPORTED_TYPES[model_type] or attention_bias,
        o_bias=attention_bias,
        mlp_bias=bool(config.get("mlp_bias", False)),
        windows=_parse_windows(config, num_layers),
    )


def _refuse_unsupported(config: Mapping[str, Any]) -> None:
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise ModelError(f"hidden_act {activation!r}: the decoder has silu only")
    if config.get("partial_rotary_factor", 1.0) != 1.0:
        raise ModelError(
            f"partial_rotary_factor {config['partial_rotary_factor']}: the decoder rotates whole "
            "heads only"
        )


def _parse_rope(config: Mapping[str, Any]) -> RopeConfig:
    """Both spellings: ``rope_parameters`` (transformers 5), ``rope_theta`` + ``rope_scaling``."""
    rope = dict(config.get("rope_scaling") or {}) | dict(config.get("rope_parameters") or {})
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in ROPE_TYPES:
        raise ModelError(
            f"rotary scaling {kind!r} is not supported; known are {', '.join(ROPE_TYPES)}"
        )
    return RopeConfig(
        theta=float(rope.get("rope_theta") or config.get("rope_theta") or 10_000.0),
        kind=kind,
        factor=float(rope.get("factor", 1.0)),
        low_freq_factor=float(rope.get("low_freq_factor", 1.0)),
        high_freq_factor=float(rope.get("high_freq_factor", 4.0)),
        original_max_position=int(
            rope.get("original_max_position_embeddings") or config["max_position_embeddings"]
        ),
    )


def _parse_windows(config: Mapping[str, Any], num_layers: int) -> tuple[int | None, ...]:
    window = config.get("sliding_window")
    if window is None or not config.get("use_sliding_window", True):
        return (None,) * num_layers
    if layer_types := config.get("layer_types"):
        return tuple(window if kind == "sliding_attention" else None for kind in layer_types)
    if config.get("model_type") == "qwen2":
        # Qwen2 keeps full attention in its first layers.
        first = config.get("max_window_layers", num_layers)
        return tuple(window if layer >= first else None for layer in range(num_layers))
    return (window,) * num_layers
