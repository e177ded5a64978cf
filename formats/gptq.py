"""GPTQ's format, versions 1 and 2: codes packed along the input features.

Per quantized linear of N out and K in features, group size g, b bits (docs/layouts.md):

    qweight   int32    [K * b / 32, N]      codes, packed along K
    qzeros    int32    [K / g, N * b / 32]  zeros, packed along N; version 1 stores zero - 1
    scales    float16  [K / g, N]
    g_idx     int32    [K]                  group of each input feature

``weight = scale * (code - zero)``. Version 1 cannot express a zero of 0, so asymmetric grids are
written as version 2. A ``g_idx`` other than ``k // g`` is read and never written: engines raise on
it or drop it without a word.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from qtool import __version__
from qtool.errors import CheckpointError
from qtool.formats import packing
from qtool.formats.group_order import REORDERED, group_order
from qtool.formats.linears import (
    Shape,
    StoredLinears,
    check_dtype,
    check_scales,
    group_width,
    require,
)
from qtool.formats.reader import TensorEntry
from qtool.formats.scheme import WeightScheme, weight_scheme
from qtool.formats.tensor import QuantizedTensor

NAME = QUANT_METHOD = "gptq"
ONE_SCHEME = True
SCALE_DTYPE: torch.dtype | None = torch.float16
HOLDS_KV_SCALES = False
SIDE_FILE: str | None = "quantize_config.json"

BITS = (2, 4, 8)
# Versions by their name in a config; what version 1 takes off a zero.
V1, V2 = "gptq", "gptq_v2"
ZERO_OFFSET = {V1: 1, V2: 0}

# Codes of 2 bits are held in 4; this takes the middle of one range to that of the other.
WIDENED = 6


class GptqLinears(StoredLinears):
    """A linear with a ``qweight`` is quantized; the config says the rest."""

    names = ("qweight", "qzeros", "scales", "g_idx")
    marks = ("qweight",)

    def __init__(self, block: Mapping[str, Any], entries: Mapping[str, TensorEntry]) -> None:
        super().__init__(entries)
        _check_rules(block.get("dynamic") or {})
        self._block = block
        self._version = str(block.get("checkpoint_format") or block.get("format") or V1)
        if self._version not in ZERO_OFFSET or block.get("pack_dtype", "int32") != "int32":
            raise CheckpointError(
                f"GPTQ in format {self._version!r}, packed in {block.get('pack_dtype', 'int32')}: "
                f"this version reads {V1} and {V2} in int32; quantize the original model with qtool"
            )

    def unpack(self, module: str, tensors: Mapping[str, Tensor]) -> QuantizedTensor:
        require(tensors, ["qweight", "qzeros", "scales"], "GPTQ")
        check_dtype(tensors, ["qweight", "qzeros"], torch.int32)
        check_scales(tensors["scales"], "scales")
        settings = settings_for(module, self._block)
        bits = settings.get("bits")
        if bits not in BITS:
            raise CheckpointError(
                f"{bits} bits: this version reads GPTQ of {', '.join(map(str, BITS))}; quantize "
                "the original model with qtool"
            )
        columns = tensors["qweight"].shape[0] * packing.codes_per_word(bits)
        codes = packing.unpack_rows(tensors["qweight"].t().contiguous(), bits, columns)
        zeros = self._zeros(module, tensors["qzeros"], bits, codes.shape[0], settings)
        symmetric = bool(settings.get("sym", True))
        if bits == 2 and symmetric:
            codes, zeros = codes + WIDENED, zeros + WIDENED
        group = group_width(settings.get("group_size"))
        scheme = weight_scheme(max(bits, 4), symmetric, group)
        groups = scheme.grid_shape((codes.shape[0], columns))[1]
        order = self._order(module, tensors, groups, columns)
        if order is not None:
            codes = codes[:, order].contiguous()
        scales = tensors["scales"].t().contiguous()
        return QuantizedTensor(codes, scales, zeros.t().contiguous(), scheme, order=order)

    def _zeros(
        self, module: str, words: Tensor, bits: int, rows: int, settings: Mapping[str, Any]
    ) -> Tensor:
        """True zeros [groups, rows], whatever the version is said to be."""
        stored = packing.unpack_rows(words, bits, rows)
        if settings.get("sym", True):
            return self._symmetric_zeros(module, stored, 2 ** (bits - 1))
        largest = 2**bits - 1
        if self._version == V1 and bool((stored == largest).any()):
            self._remark(
                module,
                f"GPTQ version 1 has no zero of 0 and stores it as {largest}; these are read as 0",
            )
        return (stored + ZERO_OFFSET[self._version]).bitwise_and(largest)

    def _symmetric_zeros(self, module: str, stored: Tensor, middle: int) -> Tensor:
        """The middle; what the file has decides which version it is, not what it says it is."""
        low, high = int(stored.min()), int(stored.max())
        found = next((v for v, offset in ZERO_OFFSET.items() if low == middle - offset), None)
        if low != high or found is None:
            raise CheckpointError(
                f"zeros from {low} to {high} in a file that says sym: true, where all are "
                f"{middle - 1} ({V1}) or {middle} ({V2}); correct sym in config.json, or quantize "
                "the original model with qtool"
            )
        if found != self._version:
            self._remark(
                module,
                f"the config says {self._version}, but zeros are stored as in {found} and are read "
                f"so: engines that trust the label are one step off",
            )
        return torch.full_like(stored, middle)

    def _order(
        self, module: str, tensors: Mapping[str, Tensor], groups: int, columns: int
    ) -> Tensor | None:
        if "g_idx" not in tensors:
            if groups > 1 and self._block.get("desc_act"):
                raise CheckpointError(
                    "g_idx missing for a GPTQ weight with desc_act: nothing says which group a "
                    "feature belongs to; copy the checkpoint again"
                )
            return None
        order = group_order(tensors["g_idx"], groups, columns)
        if order is not None:
            self._remark(module, REORDERED)
        return order


def settings_for(module: str, block: Mapping[str, Any]) -> dict[str, Any]:
    """The block's settings, with those of the first ``dynamic`` rule that means ``module``."""
    for rule, changes in (block.get("dynamic") or {}).items():
        if not rule.startswith("-:") and re.match(rule.removeprefix("+:"), module):
            return {**block, **changes}
    return dict(block)


def _check_rules(rules: object) -> None:
    """Raise CheckpointError unless ``dynamic`` maps patterns to settings."""
    if not isinstance(rules, dict) or not all(isinstance(v, dict) for v in rules.values()):
        raise CheckpointError(f"dynamic is {rules!r}; it maps patterns to settings")
    for rule in rules:
        try:
            re.compile(rule.removeprefix("+:").removeprefix("-:"))
        except re.error as error:
            raise CheckpointError(
                f"quantization_config names modules by {rule!r}, which is no regular expression "
                f"({error}); repair config.json"
            ) from None


def open_linears(block: Mapping[str, Any], entries: Mapping[str, TensorEntry]) -> StoredLinears:
    """The quantized linears of a checkpoint; see :class:`~qtool.formats.linears.ReadableFormat`."""
    return GptqLinears(block, entries)


def obstacle(scheme: WeightScheme, shape: Shape) -> str | None:
    """Why GPTQ's format holds no weight of a scheme and shape; ``None`` if it does."""
    if scheme.type != "int" or scheme.activations is not None:
        return f"{scheme.describe()}: GPTQ's format holds integer weights alone"
    if scheme.strategy not in ("group", "channel"):
        return f"{scheme.describe()}: GPTQ's format has a scale a group or a row"
    word = packing.codes_per_word(scheme.bits)
    if shape[0] % word or shape[1] % word:
        return f"shape {shape[0]} x {shape[1]}: GPTQ packs both sides by {word}"
    return None


def warnings(weights: Iterable[tuple[WeightScheme, Shape]]) -> tuple[str, ...]:
    """Who does not load weights in these schemes."""
    if all(scheme.symmetric for scheme, _ in weights):
        return ()
    return (
        "asymmetric GPTQ is written as version 2 (gptq_v2): GPTQModel and transformers load it, "
        "vLLM and SGLang's fast kernels take symmetric GPTQ alone; use awq or compressed-tensors "
        "for them",
    )


def pack(tensor: QuantizedTensor) -> dict[str, Tensor]:
    """Tensors of one linear under their local names; the input is not changed."""
    scheme, columns = tensor.scheme, tensor.shape[1]
    zeros = tensor.zeros.t() - ZERO_OFFSET[_version(scheme)]
    width = scheme.block_shape(tensor.shape)[1]
    return {
        "qweight": packing.pack_rows(tensor.codes, scheme.bits).t().contiguous(),
        "qzeros": packing.pack_rows(zeros.contiguous(), scheme.bits),
        "scales": tensor.scales.t().to(SCALE_DTYPE).contiguous(),
        "g_idx": (torch.arange(columns) // width).to(torch.int32),
    }


def quantization_config(schemes: Mapping[str, WeightScheme], ignore: list[str]) -> dict[str, Any]:
    """The ``quantization_config`` block of config.json for modules of one scheme."""
    scheme = next(iter(schemes.values()))
    kept: dict[str, dict[str, Any]] = {
        rf"-:^{re.escape(name)}$": {} for name in sorted(ignore) if name != "lm_head"
    }
    block = {
        "quant_method": QUANT_METHOD,
        "bits": scheme.bits,
        "group_size": scheme.group_size or -1,
        "desc_act": False,
        "sym": scheme.symmetric,
        "lm_head": "lm_head" in schemes,
        "true_sequential": True,
        "checkpoint_format": _version(scheme),
        "pack_dtype": "int32",
        "meta": {"quantizer": [f"qtool:{__version__}"]},
    }
    return block | ({"dynamic": kept} if kept else {})


def _version(scheme: WeightScheme) -> str:
    return V1 if scheme.symmetric else V2
