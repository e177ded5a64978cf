"""Scales of an FP8 cache of keys and values, under all the names that writers give them.

    model.layers.0.self_attn.k_scale           compressed-tensors, and what we write
    model.layers.0.self_attn.k_proj.k_scale    ModelOpt; qkv_proj where projections are fused
    model.layers.0.self_attn.attn.k_scale      vLLM's own name for it
    model.layers.0.self_attn.kv_scale          older vLLM: one for both

A scale has one value, or one a KV head ([heads, 1, 1]); what is cached is ``x / scale`` in e4m3fn.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from qtool.errors import CheckpointError
from qtool.formats.reader import CheckpointReader

_NAME = re.compile(
    r"(?P<attention>.+?)(?:\.(?:attn|q_proj|k_proj|v_proj|qkv_proj))?"
    r"\.(?P<what>q|k|v|kv)_(?P<kind>scale|zero_point)"
)


@dataclass(frozen=True, slots=True, eq=False)
class KvScales:
    """Scales of one attention: [1] each, or [num_kv_heads, 1, 1].

    ``query`` is there where the checkpoint wants queries in FP8 too.
    """

    key: Tensor
    value: Tensor
    query: Tensor | None = None

    def __post_init__(self) -> None:
        for name, scale in self.tensors().items():
            heads = scale.shape[1:] == (1, 1) and scale.ndim == 3
            if not scale.dtype.is_floating_point or not (heads or tuple(scale.shape) == (1,)):
                raise CheckpointError(
                    f"{name} is {scale.dtype} of shape {list(scale.shape)}; it is one floating "
                    "value, or one a head"
                )
            if not bool((scale.float().isfinite() & (scale.float() > 0)).all()):
                raise CheckpointError(f"{name} is {scale.flatten().tolist()}; scales are positive")

    @property
    def per_head(self) -> bool:
        """Whether every KV head has scales of its own."""
        return self.key.ndim == 3

    def tensors(self) -> dict[str, Tensor]:
        """The scales under the names compressed-tensors gives them, below the attention's."""
        scales = {"k_scale": self.key, "v_scale": self.value}
        return scales if self.query is None else scales | {"q_scale": self.query}


def kv_scale_names(names: Iterable[str]) -> list[str]:
    """Those of a checkpoint's tensors that belong to the cache."""
    return [name for name in names if _NAME.fullmatch(name)]


def read_kv_scales(reader: CheckpointReader) -> dict[str, KvScales]:
    """Scales of each attention by its full name; empty where the checkpoint has none.

    Raises:
        CheckpointError: a scale is missing, given twice, or no scale; a zero point is not zero.
    """
    found: dict[str, dict[str, Tensor]] = {}
    for name in kv_scale_names(reader.names()):
        match = _NAME.fullmatch(name)
        assert match is not None
        tensor = reader.get(name)
        if match["kind"] == "zero_point":
            _refuse_zero_point(name, tensor)
            continue
        scale = tensor.reshape(1) if tensor.numel() == 1 and tensor.ndim < 2 else tensor
        scales = found.setdefault(match["attention"], {})
        for what in match["what"]:
            if what in scales:
                raise CheckpointError(f"{name} is a second scale of {what}; keep one of them")
            scales[what] = scale
    return {attention: _joined(attention, scales) for attention, scales in found.items()}


def _joined(attention: str, scales: Mapping[str, Tensor]) -> KvScales:
    if missing := [what for what in "kv" if what not in scales]:
        raise CheckpointError(
            f"{attention} has scales of the cache without {missing[0]}_scale; the checkpoint is "
            "incomplete"
        )
    try:
        return KvScales(scales["k"], scales["v"], scales.get("q"))
    except CheckpointError as error:
        raise CheckpointError(f"{attention}: {error}") from None


def _refuse_zero_point(name: str, tensor: Tensor) -> None:
    if bool(tensor.float().any()):
        raise CheckpointError(f"{name} is not zero; an FP8 cache has scales alone")


def promises_kv_scales(block: Mapping[str, Any]) -> bool:
    """Whether a ``quantization_config`` says that the cache is FP8 with the checkpoint's scales."""
    if block.get("quant_method") == "modelopt":
        inner = block.get("quantization")
        values = inner if isinstance(inner, dict) else block
        return values.get("kv_cache_quant_algo") == "FP8" or bool(block.get("kv_cache_scheme"))
    scheme = block.get("kv_cache_scheme")
    return isinstance(scheme, dict) and not scheme.get("dynamic", False)


def kv_cache_scheme(scales: Mapping[str, KvScales]) -> dict[str, Any] | None:
    """``kv_cache_scheme`` of compressed-tensors' config for a checkpoint's scales, if it has any.

    Raises:
        CheckpointError: some are by head and some are not.
    """
    if not scales:
        return None
    ways = {scale.per_head for scale in scales.values()}
    if len(ways) > 1:
        raise CheckpointError("scales of the cache by head and by tensor; a config holds one kind")
    return static_scheme(per_head=ways == {True})


def static_scheme(*, per_head: bool) -> dict[str, Any]:
    """``kv_cache_scheme`` of FP8 scales by head, or by tensor."""
    return {
        "num_bits": 8,
        "type": "float",
        "strategy": "attn_head" if per_head else "tensor",
        "symmetric": True,
        "dynamic": False,
    }
