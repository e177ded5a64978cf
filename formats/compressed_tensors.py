"""The compressed-tensors formats: what vLLM, SGLang and transformers load.

Per quantized linear, next to its other tensors (docs/layouts.md has the shapes):

    pack-quantized    weight_packed, weight_scale, weight_shape; weight_zero_point if asymmetric
                      integer weights alone, codes packed into int32 words along K
    int-quantized     weight int8 [N, K], weight_scale; integer weights with activations
    float-quantized   weight float8_e4m3fn [N, K], weight_scale; FP8 with and without activations
    naive-quantized   as the two before, of any width and granularity; read only
    the last three    input_scale [1], if activations are static

The stored code of a signed value q is q + 2**(bits - 1) where it is packed, which is our
unsigned code, and q itself where it is int8. ``weight_g_idx`` (int32 [K], the group of each input
feature) is read where a file has it and never written: engines refuse it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from qtool.errors import CheckpointError
from qtool.formats import packing
from qtool.formats.compressed_tensors_config import (
    PACKED,
    QUANT_METHOD,
    QuantizationConfig,
    layout_of,
    parse_config,
    quantization_config,
)
from qtool.formats.group_order import REORDERED, group_order
from qtool.formats.linears import (
    Shape,
    StoredLinears,
    check_dtype,
    check_scales,
    plain_codes,
    require,
)
from qtool.formats.reader import TensorEntry
from qtool.formats.scheme import WeightScheme
from qtool.formats.tensor import QuantizedTensor

__all__ = [
    "HOLDS_KV_SCALES",
    "NAME",
    "ONE_SCHEME",
    "QUANT_METHOD",
    "SCALE_DTYPE",
    "SIDE_FILE",
    "TENSOR_NAMES",
    "QuantizationConfig",
    "layout_of",
    "obstacle",
    "open_linears",
    "pack",
    "parse_config",
    "quantization_config",
    "unpack",
    "warnings",
]

NAME = QUANT_METHOD
ONE_SCHEME = False
SCALE_DTYPE: torch.dtype | None = None
HOLDS_KV_SCALES = True
SIDE_FILE: str | None = None
# Of packed codes alone, of codes that are not packed, and of both.
PACKED_NAMES = ("weight_packed", "weight_shape", "weight_g_idx")
PLAIN_NAMES = ("weight", "input_scale")
TENSOR_NAMES = (*PACKED_NAMES, *PLAIN_NAMES, "weight_scale", "weight_zero_point")


class CompressedLinears(StoredLinears):
    """The config says which linears are quantized, and how."""

    names = TENSOR_NAMES
    marks = ("weight_packed", "weight_scale")

    def __init__(self, block: Mapping[str, Any], entries: Mapping[str, TensorEntry]) -> None:
        super().__init__(entries)
        self._config = parse_config(block)

    def is_quantized(self, module: str) -> bool:
        return self._config.group_for(module) is not None

    def parts(self, module: str) -> dict[str, str]:
        """Those of the module's layout; others are no tensors of a linear."""
        group = self._config.group_for(module)
        others = PLAIN_NAMES if group is None or group.layout == PACKED else PACKED_NAMES
        return {k: full for k, full in super().parts(module).items() if k not in others}

    def unpack(self, module: str, tensors: Mapping[str, Tensor]) -> QuantizedTensor:
        group = self._config.group_for(module)
        assert group is not None
        if group.act_order:
            require(tensors, ["weight_g_idx"], f"{group.scheme.describe()}, act-order")
        weight = unpack(tensors, group.scheme, group.layout)
        if weight.order is not None:
            self._remark(module, REORDERED)
        return weight


def open_linears(block: Mapping[str, Any], entries: Mapping[str, TensorEntry]) -> StoredLinears:
    """The quantized linears of a checkpoint; see :class:`~qtool.formats.linears.ReadableFormat`."""
    return CompressedLinears(block, entries)


def obstacle(scheme: WeightScheme, shape: Shape) -> str | None:
    """Every scheme has its layout."""
    return None


def warnings(weights: Iterable[tuple[WeightScheme, Shape]]) -> tuple[str, ...]:
    """What engines make of weights in these schemes, where it is a surprise."""
    if any(scheme.bits == 8 and not scheme.symmetric for scheme, _ in weights):
        return ("8-bit weights with zero points: vLLM has no fast kernel for them",)
    return ()


def pack(tensor: QuantizedTensor) -> dict[str, Tensor]:
    """Tensors of one linear under their local names; the input is not changed."""
    scheme = tensor.scheme
    if layout_of(scheme) == PACKED:
        packed = {
            "weight_packed": packing.pack_rows(tensor.codes, scheme.bits),
            "weight_scale": tensor.scales,
            "weight_shape": torch.tensor(tensor.shape, dtype=torch.int64),
        }
        if not scheme.symmetric:
            columns = packing.pack_rows(tensor.zeros.t().contiguous(), scheme.bits)
            packed["weight_zero_point"] = columns.t().contiguous()
        return packed
    codes = tensor.codes
    if scheme.type == "int":
        codes = (codes.short() - scheme.symmetric_zero).to(torch.int8)
    # A scale of the whole tensor is a vector of one in this format.
    scales = tensor.scales.reshape(1) if scheme.strategy == "tensor" else tensor.scales
    plain = {"weight": codes, "weight_scale": scales}
    if tensor.input_scale is None:
        return plain
    # Linears of one input share the object, and a file holds no tensor twice.
    return plain | {"input_scale": tensor.input_scale.clone()}


def unpack(
    tensors: Mapping[str, Tensor], scheme: WeightScheme, layout: str | None = None
) -> QuantizedTensor:
    """Inverse of :func:`pack`; ``layout`` is the one we write unless given.

    Raises:
        CheckpointError: a tensor is missing, or has a shape or dtype the scheme does not allow.
    """
    _check_zero_points(tensors, scheme)
    if (layout or layout_of(scheme)) != PACKED:
        return plain_codes(tensors, scheme)
    zeros = [] if scheme.symmetric else ["weight_zero_point"]
    require(tensors, ["weight_packed", "weight_scale", "weight_shape", *zeros], scheme)
    shape = tensors["weight_shape"].tolist()
    if len(shape) != 2:
        raise CheckpointError(f"weight_shape is {shape}; a linear weight has two dimensions")
    check_dtype(tensors, ["weight_packed", *zeros], torch.int32)
    if tensors["weight_packed"].shape[0] != shape[0]:
        raise CheckpointError(
            f"weight_shape is {shape}, but weight_packed has {tensors['weight_packed'].shape[0]} "
            "rows; the tensors are of different exports"
        )
    check_scales(tensors["weight_scale"], "weight_scale")
    try:
        codes = packing.unpack_rows(tensors["weight_packed"], scheme.bits, shape[1])
        return _ordered(codes, _zeros(tensors, scheme, (shape[0], shape[1])), tensors, scheme)
    except ValueError as error:
        raise CheckpointError(f"weight of shape {shape}: {error}") from None


def _check_zero_points(tensors: Mapping[str, Tensor], scheme: WeightScheme) -> None:
    """Raise CheckpointError where a symmetric scheme has zero points; old writers add zeros."""
    found = tensors.get("weight_zero_point")
    if scheme.symmetric and found is not None and bool(found.float().any()):
        raise CheckpointError(
            f"weight_zero_point is not zero, and {scheme.describe()} has no zero points; correct "
            "symmetric in config.json"
        )


def _ordered(
    codes: Tensor, zeros: Tensor, tensors: Mapping[str, Tensor], scheme: WeightScheme
) -> QuantizedTensor:
    """Codes whose groups lie side by side, wherever the file puts them."""
    order = None
    if "weight_g_idx" in tensors:
        groups = scheme.grid_shape((codes.shape[0], codes.shape[1]))[1]
        order = group_order(tensors["weight_g_idx"], groups, codes.shape[1])
    if order is not None:
        codes = codes[:, order].contiguous()
    return QuantizedTensor(codes, tensors["weight_scale"], zeros, scheme, order=order)


def _zeros(tensors: Mapping[str, Tensor], scheme: WeightScheme, shape: Shape) -> Tensor:
    grid = scheme.grid_shape(shape)
    if scheme.symmetric:
        return torch.full(grid, scheme.symmetric_zero, dtype=torch.uint8)
    columns = tensors["weight_zero_point"].t().contiguous()
    return packing.unpack_rows(columns, scheme.bits, grid[0]).t().contiguous()
