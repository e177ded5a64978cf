"""The compressed-tensors formats: what vLLM, SGLang and transformers load.

Per quantized linear, next to its other tensors (docs/layouts.md has the shapes):

    pack-quantized    weight_packed, weight_scale, weight_shape; weight_zero_point if asymmetric
                      integer weights alone, codes packed into int32 words along K
    int-quantized     weight int8 [N, K], weight_scale; integer weights with activations
    float-quantized   weight float8_e4m3fn [N, K], weight_scale; FP8 with and without activations
    the last two      input_scale [1], if activations are static

The stored code of a signed value q is q + 2**(bits - 1) where it is packed, which is our
unsigned code, and q itself where it is int8. The reader's config classes forbid unknown keys,
so only the keys below are written.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qtool.errors import CheckpointError, QtoolError
from qtool.formats import affine, packing
from qtool.formats.patterns import LINEAR, regex_problem, target_matches
from qtool.formats.scheme import BLOCK_SIZE, ActivationScheme, WeightScheme
from qtool.formats.tensor import QuantizedTensor

QUANT_METHOD = "compressed-tensors"
PACKED, INT, FLOAT, MIXED = "pack-quantized", "int-quantized", "float-quantized", "mixed-precision"
TENSOR_NAMES = (
    "weight_packed",
    "weight",
    "weight_scale",
    "weight_zero_point",
    "weight_shape",
    "input_scale",
)


def layout_of(scheme: WeightScheme) -> str:
    """Name of the format that holds weights of a scheme."""
    if scheme.type == "float":
        return FLOAT
    return PACKED if scheme.activations is None else INT


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


def unpack(tensors: Mapping[str, Tensor], scheme: WeightScheme) -> QuantizedTensor:
    """Inverse of :func:`pack`.

    Raises:
        CheckpointError: a tensor is missing, or has a shape or dtype the scheme does not allow.
    """
    missing = [name for name in _needed(scheme) if name not in tensors]
    if missing:
        raise CheckpointError(f"{', '.join(missing)} missing for a {scheme.describe()} weight")
    if layout_of(scheme) != PACKED:
        return _unpack_plain(tensors, scheme)
    shape = tensors["weight_shape"].tolist()
    if len(shape) != 2:
        raise CheckpointError(f"weight_shape is {shape}; a linear weight has two dimensions")
    try:
        codes = packing.unpack_rows(tensors["weight_packed"], scheme.bits, shape[1])
        zeros = _zeros(tensors, scheme, (shape[0], shape[1]))
        return QuantizedTensor(codes, tensors["weight_scale"], zeros, scheme)
    except (ValueError, QtoolError) as error:
        raise CheckpointError(f"weight of shape {shape}: {error}") from None


def _needed(scheme: WeightScheme) -> list[str]:
    if layout_of(scheme) == PACKED:
        zeros = [] if scheme.symmetric else ["weight_zero_point"]
        return ["weight_packed", "weight_scale", "weight_shape", *zeros]
    return ["weight", "weight_scale", *(["input_scale"] if scheme.has_input_scale else [])]


def _unpack_plain(tensors: Mapping[str, Tensor], scheme: WeightScheme) -> QuantizedTensor:
    codes = tensors["weight"]
    stored = torch.int8 if scheme.type == "int" else affine.CODE_DTYPES["float"]
    if codes.dtype != stored or codes.ndim != 2:
        raise CheckpointError(
            f"weight is {codes.dtype} of shape {list(codes.shape)}; {scheme.describe()} has "
            f"{stored} in two dimensions"
        )
    if scheme.type == "int":
        codes = (codes.short() + scheme.symmetric_zero).to(torch.uint8)
    grid = scheme.grid_shape((codes.shape[0], codes.shape[1]))
    scales = tensors["weight_scale"]
    if scheme.strategy == "tensor" and scales.numel() == 1:
        scales = scales.reshape(grid)
    zeros = torch.full(grid, scheme.symmetric_zero, dtype=torch.uint8)
    inputs = tensors["input_scale"].reshape(-1) if scheme.has_input_scale else None
    try:
        return QuantizedTensor(codes, scales, zeros, scheme, inputs)
    except ValueError as error:
        raise CheckpointError(f"weight of shape {list(codes.shape)}: {error}") from None


def _zeros(tensors: Mapping[str, Tensor], scheme: WeightScheme, shape: tuple[int, int]) -> Tensor:
    grid = scheme.grid_shape(shape)
    if scheme.symmetric:
        return torch.full(grid, scheme.symmetric_zero, dtype=torch.uint8)
    columns = tensors["weight_zero_point"].t().contiguous()
    return packing.unpack_rows(columns, scheme.bits, grid[0]).t().contiguous()


def quantization_config(schemes: Mapping[str, WeightScheme], ignore: list[str]) -> dict[str, Any]:
    """The ``quantization_config`` block of config.json.

    Args:
        schemes: scheme of every quantized module by full name.
        ignore: full names of linears left as they were.

    One scheme for all becomes one group that targets the class ``Linear``; several schemes
    name their modules.
    """
    by_scheme: dict[WeightScheme, list[str]] = {}
    for name, scheme in schemes.items():
        by_scheme.setdefault(scheme, []).append(name)
    layouts = sorted({layout_of(scheme) for scheme in by_scheme})
    groups: dict[str, dict[str, Any]] = {}
    for index, (scheme, names) in enumerate(by_scheme.items()):
        targets = [LINEAR] if len(by_scheme) == 1 else sorted(names)
        groups[f"group_{index}"] = {
            "targets": targets,
            "weights": _weight_args(scheme),
            "input_activations": scheme.activations and _activation_args(scheme.activations),
            "output_activations": None,
        }
        if len(layouts) > 1:
            groups[f"group_{index}"]["format"] = layout_of(scheme)
    return {
        "quant_method": QUANT_METHOD,
        "format": layouts[0] if len(layouts) == 1 else MIXED,
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "config_groups": groups,
        "ignore": sorted(ignore),
        "kv_cache_scheme": None,
        "version": "0.9.0",
    }


def _weight_args(scheme: WeightScheme) -> dict[str, Any]:
    block = [BLOCK_SIZE, BLOCK_SIZE] if scheme.strategy == "block" else None
    return {
        "num_bits": scheme.bits,
        "type": scheme.type,
        "symmetric": scheme.symmetric,
        "strategy": scheme.strategy,
        "group_size": scheme.group_size,
        "dynamic": False,
        "actorder": None,
        "block_structure": block,
        "observer": "minmax",
        "observer_kwargs": {},
    }


def _activation_args(scheme: ActivationScheme) -> dict[str, Any]:
    return {
        "num_bits": 8,
        "type": scheme.type,
        "symmetric": True,
        "strategy": scheme.strategy,
        "group_size": BLOCK_SIZE if scheme.strategy == "group" else None,
        "dynamic": scheme.dynamic,
        "actorder": None,
        "block_structure": None,
        # The reference package wants no observer where scales are measured at run time.
        "observer": None if scheme.dynamic else "minmax",
        "observer_kwargs": {},
    }


@dataclass(frozen=True, slots=True)
class QuantizationConfig:
    """Which module of a checkpoint has which scheme.

    ``groups`` holds (targets, scheme) in file order. Targets and ``ignore`` share the grammar of
    :func:`~qtool.formats.patterns.target_matches`.
    """

    groups: tuple[tuple[tuple[str, ...], WeightScheme], ...]
    ignore: tuple[str, ...]

    def scheme_for(self, module: str) -> WeightScheme | None:
        """Scheme of the linear ``module`` (full name), or ``None`` for an unquantized one."""
        if any(target_matches(target, module) for target in self.ignore):
            return None
        for exact in (True, False):
            for targets, scheme in self.groups:
                if any(target_matches(t, module) and (t != LINEAR) == exact for t in targets):
                    return scheme
        return None


def parse_config(config: Mapping[str, Any]) -> QuantizationConfig:
    """Read a ``quantization_config`` block.

    Raises:
        CheckpointError: another method or format, or arguments we cannot run, by name.
    """
    method, layout = config.get("quant_method"), config.get("format")
    if method != QUANT_METHOD or layout not in (PACKED, INT, FLOAT, MIXED):
        raise CheckpointError(
            f"quantization {method!r} with format {layout!r}: this version reads {QUANT_METHOD} "
            f"{PACKED}, {INT} and {FLOAT}; quantize the original model with qtool"
        )
    groups = []
    for name, group in (config.get("config_groups") or {}).items():
        own_layout = group.get("format") or layout
        groups.append((tuple(group["targets"]), _parse_group(name, group, own_layout)))
    if not groups:
        raise CheckpointError("quantization_config has no config_groups: nothing says the bits")
    ignore = tuple(config.get("ignore") or ())
    for target in (*ignore, *(target for targets, _ in groups for target in targets)):
        if problem := regex_problem(target):
            raise CheckpointError(
                f"quantization_config names modules by {target!r}, which is no regular expression "
                f"({problem}); repair config.json"
            )
    return QuantizationConfig(tuple(groups), ignore)


def _parse_group(name: str, group: Mapping[str, Any], layout: str) -> WeightScheme:
    weights = group.get("weights") or {}
    if weights.get("actorder") in ("group", "dynamic"):
        raise CheckpointError(
            f"config group {name}: actorder {weights['actorder']} is not supported"
        )
    try:
        strategy = weights["strategy"]
        scheme = WeightScheme(
            bits=weights["num_bits"],
            symmetric=bool(weights["symmetric"]),
            strategy=strategy,
            group_size=weights.get("group_size") if strategy == "group" else None,
            type=weights["type"],
            activations=_parse_activations(group.get("input_activations")),
        )
    except (KeyError, QtoolError) as error:
        raise CheckpointError(f"config group {name}: {error}") from None
    block = weights.get("block_structure")
    if strategy == "block" and list(block or ()) != [BLOCK_SIZE, BLOCK_SIZE]:
        raise CheckpointError(f"config group {name}: blocks of {block}; we run [128, 128] only")
    if layout_of(scheme) != layout:
        raise CheckpointError(
            f"config group {name}: {scheme.describe()} in format {layout}; such weights are read "
            f"from {layout_of(scheme)} only"
        )
    return scheme


def _parse_activations(args: Mapping[str, Any] | None) -> ActivationScheme | None:
    if args is None:
        return None
    scheme = ActivationScheme(args["type"], args["strategy"])
    expected = _activation_args(scheme)
    for key in ("num_bits", "symmetric", "dynamic", "group_size"):
        found = args.get(key)
        if found != expected[key] and not (key == "group_size" and scheme.strategy != "group"):
            raise CheckpointError(
                f"input_activations by {scheme.strategy} with {key} {found}; we run "
                f"{expected[key]} only"
            )
    return scheme
