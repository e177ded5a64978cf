"""AutoAWQ's GEMM format: 4-bit codes packed along the output features, eight a word, interleaved.

Per quantized linear of N out and K in features, group size g (docs/layouts.md):

    qweight   int32    [K, N / 8]      codes
    qzeros    int32    [K / g, N / 8]  zeros, packed alike
    scales    float16  [K / g, N]

``weight = scale * (code - zero)``. A symmetric grid is written with zeros of 8 and
``zero_point: true``: engines have no fast kernel for files that say otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from qtool.errors import CheckpointError
from qtool.formats import packing
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

NAME = QUANT_METHOD = "awq"
ONE_SCHEME = True
SCALE_DTYPE: torch.dtype | None = torch.float16
HOLDS_KV_SCALES = False
SIDE_FILE: str | None = None

BITS = 4
WORD = 8  # codes of a word

# Nibble i of a word holds element NIBBLE_HOLDS[i] of its eight; element j lies in IN_NIBBLE[j].
NIBBLE_HOLDS = (0, 2, 4, 6, 1, 3, 5, 7)
IN_NIBBLE = (0, 4, 1, 5, 2, 6, 3, 7)


class AwqLinears(StoredLinears):
    """A linear with a ``qweight`` is quantized; the config says the rest."""

    names = ("qweight", "qzeros", "scales")
    marks = ("qweight",)

    def __init__(self, block: Mapping[str, Any], entries: Mapping[str, TensorEntry]) -> None:
        super().__init__(entries)
        version, bits = str(block.get("version", "gemm")).lower(), block.get("bits", BITS)
        bits = block.get("w_bit", bits)
        if version != "gemm" or bits != BITS:
            raise CheckpointError(
                f"AWQ version {version!r} of {bits} bits: this version reads gemm of {BITS} bits; "
                "quantize the original model with qtool"
            )
        self._has_zeros = bool(block.get("zero_point", True))
        self._group = group_width(block.get("group_size", block.get("q_group_size", 128)))

    def unpack(self, module: str, tensors: Mapping[str, Tensor]) -> QuantizedTensor:
        zeros = ["qzeros"] if self._has_zeros else []
        require(tensors, ["qweight", "scales", *zeros], "AWQ")
        check_dtype(
            tensors, ["qweight", *(name for name in ["qzeros"] if name in tensors)], torch.int32
        )
        check_scales(tensors["scales"], "scales")
        rows, columns = tensors["qweight"].shape[1] * WORD, tensors["qweight"].shape[0]
        scheme = weight_scheme(BITS, not self._has_zeros, self._group)
        grid = scheme.grid_shape((rows, columns))
        found = torch.full(grid, scheme.symmetric_zero, dtype=torch.uint8)
        if "qzeros" in tensors:
            found = _unpack_columns(tensors["qzeros"])
        if scheme.symmetric and bool((found != scheme.symmetric_zero).any()):
            raise CheckpointError(
                f"zeros from {int(found.min())} to {int(found.max())} with zero_point false, which "
                f"means {scheme.symmetric_zero}; correct zero_point in config.json"
            )
        scales = tensors["scales"].t().contiguous()
        return QuantizedTensor(_unpack_columns(tensors["qweight"]), scales, found, scheme)


def open_linears(block: Mapping[str, Any], entries: Mapping[str, TensorEntry]) -> StoredLinears:
    """The quantized linears of a checkpoint; see :class:`~qtool.formats.linears.ReadableFormat`."""
    return AwqLinears(block, entries)


def obstacle(scheme: WeightScheme, shape: Shape) -> str | None:
    """Why AWQ holds no weight of a scheme and shape; ``None`` if it does."""
    if scheme.type != "int" or scheme.activations is not None or scheme.bits != BITS:
        return f"{scheme.describe()}: AWQ holds weights of {BITS} bits alone"
    if scheme.strategy not in ("group", "channel"):
        return f"{scheme.describe()}: AWQ has a scale a group or a row"
    if shape[0] % WORD:
        return f"{shape[0]} out features: AWQ packs them by {WORD}"
    return None


def warnings(weights: Iterable[tuple[WeightScheme, Shape]]) -> tuple[str, ...]:
    """Engines that read the format read all of these."""
    return ()


def pack(tensor: QuantizedTensor) -> dict[str, Tensor]:
    """Tensors of one linear under their local names; the input is not changed."""
    return {
        "qweight": _pack_columns(tensor.codes),
        "qzeros": _pack_columns(tensor.zeros),
        "scales": tensor.scales.t().to(SCALE_DTYPE).contiguous(),
    }


def quantization_config(schemes: Mapping[str, WeightScheme], ignore: list[str]) -> dict[str, Any]:
    """The ``quantization_config`` block of config.json for modules of one scheme."""
    scheme = next(iter(schemes.values()))
    return {
        "quant_method": QUANT_METHOD,
        "version": "gemm",
        "bits": BITS,
        "group_size": scheme.group_size or -1,
        "zero_point": True,
        "lm_head": "lm_head" in schemes,
        # Readers look for these as parts of names.
        "modules_to_not_convert": sorted(ignore) or None,
    }


def _unpack_columns(words: Tensor) -> Tensor:
    """int32 [R, N / 8] -> uint8 [N, R]."""
    nibbles = packing.unpack_rows(words, BITS, words.shape[1] * WORD)
    codes = nibbles.view(words.shape[0], -1, WORD)[:, :, list(IN_NIBBLE)]
    return codes.flatten(1).t().contiguous()


def _pack_columns(codes: Tensor) -> Tensor:
    """uint8 [N, R] -> int32 [R, N / 8]."""
    elements = codes.t().reshape(codes.shape[1], -1, WORD)
    return packing.pack_rows(elements[:, :, list(NIBBLE_HOLDS)].flatten(1), BITS)
