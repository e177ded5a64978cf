"""Rotary settings of a ``config.json``, in every spelling transformers has had, and checked."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from qtool.errors import ModelError

_EVERY_KIND = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor"})
_ORIGINAL = "original_max_position_embeddings"
# Kind of scaling -> the keys it has beside those that every kind has.
ROPE_KINDS: Mapping[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "dynamic": frozenset({"factor"}),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor", _ORIGINAL}),
    "yarn": frozenset(
        {"factor", "attention_factor", "beta_fast", "beta_slow", _ORIGINAL}
        | {"mscale", "mscale_all_dim", "truncate"}
    ),
    "longrope": frozenset({"factor", "attention_factor", "short_factor", "long_factor", _ORIGINAL}),
}
_OLD_NAMES = {"su": "longrope"}


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding: base, and how positions beyond the training length are scaled.

    Attributes:
        kind: one of :data:`ROPE_KINDS`; the fields below ``factor`` belong to some of them.
        partial: share of a head's channels, from the first, that is rotated.
        original_max_position: length the model was trained for before it was extended.
        attention_factor: what cosines and sines are multiplied by.
        short_factor, long_factor: a divisor for each pair of channels, within the original
            length and beyond it.
    """

    theta: float = 10_000.0
    kind: str = "default"
    partial: float = 1.0
    factor: float = 1.0
    original_max_position: int = 8192
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()

    def rotary_dim(self, head_dim: int) -> int:
        """Channels of a head that are rotated."""
        return int(head_dim * self.partial)

    def longest(self, max_position: int) -> int:
        """Most tokens a sequence may have, where ``config.json`` says ``max_position``.

        Both scalings stretch the length by ``factor`` without a word of it in the config.
        """
        if self.kind not in ("dynamic", "yarn"):
            return max_position
        return max(max_position, int(self.original_max_position * self.factor))


def parse_rope(
    config: Mapping[str, Any], head_dim: int, layer_type: str | None = None
) -> RopeConfig:
    """Read ``rope_parameters`` (transformers 5), or ``rope_theta`` and ``rope_scaling``.

    Args:
        layer_type: kind of layer, where the config has a dictionary for each.

    Raises:
        ModelError: a scaling, or a key of one, that is not known; a list of a wrong length.
    """
    rope = _settings(config, layer_type)
    named = rope.get("rope_type") or rope.get("type") or "default"
    kind = _OLD_NAMES.get(named, named)
    if kind not in ROPE_KINDS:
        raise ModelError(
            f"rotary scaling {kind!r} is not supported; known are {', '.join(ROPE_KINDS)}"
        )
    if unknown := sorted(rope.keys() - _EVERY_KIND - ROPE_KINDS[kind]):
        raise ModelError(f"rotary scaling {kind!r} with {unknown[0]!r}: this key is not supported")
    parsed = _rope_config(kind, rope, config)
    _check_shape(parsed, head_dim)
    return parsed


def _settings(config: Mapping[str, Any], layer_type: str | None) -> dict[str, Any]:
    """Old keys under the new ones, those of one layer type first; what is ``None`` is not said."""
    new = config.get("rope_parameters") or {}
    if layer_type is not None and layer_type in new:
        new = new[layer_type] or {}
    old = {key: config.get(key) for key in ("rope_theta", "partial_rotary_factor")}
    rope = old | dict(config.get("rope_scaling") or {}) | dict(new)
    return {key: value for key, value in rope.items() if value is not None}


def _rope_config(kind: str, rope: Mapping[str, Any], config: Mapping[str, Any]) -> RopeConfig:
    max_position = config["max_position_embeddings"]
    # Phi-3 keeps the original length beside the rotary settings; there it counts first.
    original = int(config.get(_ORIGINAL) or rope.get(_ORIGINAL) or max_position)
    if kind == "dynamic":
        original = max_position
    factor = float(rope.get("factor") or (max_position / original if kind == "longrope" else 1.0))
    return RopeConfig(
        theta=float(rope.get("rope_theta", 10_000.0)),
        kind=kind,
        partial=float(rope.get("partial_rotary_factor", 1.0)),
        factor=factor,
        original_max_position=original,
        low_freq_factor=float(rope.get("low_freq_factor", 1.0)),
        high_freq_factor=float(rope.get("high_freq_factor", 4.0)),
        attention_factor=float(
            rope.get("attention_factor") or _attention_factor(kind, factor, original, rope)
        ),
        beta_fast=float(rope.get("beta_fast") or 32),
        beta_slow=float(rope.get("beta_slow") or 1),
        truncate=bool(rope.get("truncate", True)),
        short_factor=tuple(rope.get("short_factor", ())),
        long_factor=tuple(rope.get("long_factor", ())),
    )


def _attention_factor(kind: str, factor: float, original: int, rope: Mapping[str, Any]) -> float:
    """YaRN: Peng et al. 2023, section 3.4. LongRoPE: Ding et al. 2024, section 3.3."""
    if factor <= 1.0:
        return 1.0
    if kind == "longrope":
        return math.sqrt(1 + math.log(factor) / math.log(original))
    if kind != "yarn":
        return 1.0
    step = 0.1 * math.log(factor)
    mscale, all_dim = float(rope.get("mscale") or 0), float(rope.get("mscale_all_dim") or 0)
    if mscale and all_dim:
        return (step * mscale + 1) / (step * all_dim + 1)
    return step + 1


def _check_shape(rope: RopeConfig, head_dim: int) -> None:
    rotated = rope.rotary_dim(head_dim)
    if rotated < 2 or rotated % 2 or rotated > head_dim:
        raise ModelError(
            f"partial_rotary_factor {rope.partial} of heads of {head_dim} channels rotates "
            f"{rotated}: it must be a positive, even number of them"
        )
    if rope.kind != "longrope":
        return
    for name, factors in (("short_factor", rope.short_factor), ("long_factor", rope.long_factor)):
        if len(factors) != rotated // 2:
            raise ModelError(
                f"rotary scaling 'longrope' has {len(factors)} values in {name!r}; it needs one "
                f"for each of {rotated // 2} pairs of channels"
            )
