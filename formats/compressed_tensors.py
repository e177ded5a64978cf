"""The compressed-tensors format ``pack-quantized``: what vLLM, SGLang and transformers load.

Per quantized linear, next to its other tensors (docs/formats.md has the table):

    weight_packed      int32  [N, ceil(K * bits / 32)]   codes packed along K
    weight_scale       float  [N, K / group_size]        [N, 1] for one scale a row
    weight_zero_point  int32  [ceil(N * bits / 32), K / group_size]   asymmetric only
    weight_shape       int64  [2]                        (N, K)

The stored code of a signed value q is q + 2**(bits - 1), which is our unsigned code.
The reader's config classes forbid unknown keys, so only the keys below are written.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qtool.errors import CheckpointError, QtoolError
from qtool.formats import packing
from qtool.formats.patterns import LINEAR, regex_problem, target_matches
from qtool.formats.scheme import WeightScheme
from qtool.formats.tensor import QuantizedTensor

QUANT_METHOD = "compressed-tensors"
FORMAT = "pack-quantized"
TENSOR_NAMES = ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape")


def pack(tensor: QuantizedTensor) -> dict[str, Tensor]:
    """Tensors of one linear under their local names; the input is not changed."""
    bits = tensor.scheme.bits
    packed = {
        "weight_packed": packing.pack_rows(tensor.codes, bits),
        "weight_scale": tensor.scales,
        "weight_shape": torch.tensor(tensor.shape, dtype=torch.int64),
    }
    if not tensor.scheme.symmetric:
        columns = packing.pack_rows(tensor.zeros.t().contiguous(), bits)
        packed["weight_zero_point"] = columns.t().contiguous()
    return packed


def unpack(tensors: Mapping[str, Tensor], scheme: WeightScheme) -> QuantizedTensor:
    """Inverse of :func:`pack`.

    Raises:
        CheckpointError: a tensor is missing, or has a shape or dtype the scheme does not allow.
    """
    needed = [name for name in TENSOR_NAMES if name != "weight_zero_point" or not scheme.symmetric]
    missing = [name for name in needed if name not in tensors]
    if missing:
        raise CheckpointError(f"{', '.join(missing)} missing for a {scheme.describe()} weight")
    shape = tensors["weight_shape"].tolist()
    if len(shape) != 2:
        raise CheckpointError(f"weight_shape is {shape}; a linear weight has two dimensions")
    try:
        codes = packing.unpack_rows(tensors["weight_packed"], scheme.bits, shape[1])
        zeros = _zeros(tensors, scheme, (shape[0], shape[1]))
        return QuantizedTensor(codes, tensors["weight_scale"], zeros, scheme)
    except (ValueError, QtoolError) as error:
        raise CheckpointError(f"weight of shape {shape}: {error}") from None


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
    groups = {}
    for index, (scheme, names) in enumerate(by_scheme.items()):
        targets = [LINEAR] if len(by_scheme) == 1 else sorted(names)
        groups[f"group_{index}"] = {
            "targets": targets,
            "weights": _weight_args(scheme),
            "input_activations": None,
            "output_activations": None,
        }
    return {
        "quant_method": QUANT_METHOD,
        "format": FORMAT,
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "config_groups": groups,
        "ignore": sorted(ignore),
        "kv_cache_scheme": None,
        "version": "0.9.0",
    }


def _weight_args(scheme: WeightScheme) -> dict[str, Any]:
    return {
        "num_bits": scheme.bits,
        "type": "int",
        "symmetric": scheme.symmetric,
        "strategy": scheme.strategy,
        "group_size": scheme.group_size,
        "dynamic": False,
        "actorder": None,
        "block_structure": None,
        "observer": "minmax",
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
    if method != QUANT_METHOD or layout != FORMAT:
        raise CheckpointError(
            f"quantization {method!r} with format {layout!r}: this version reads {QUANT_METHOD} "
            f"{FORMAT}; quantize the original model with qtool"
        )
    groups = []
    for name, group in (config.get("config_groups") or {}).items():
        groups.append((tuple(group["targets"]), _parse_group(name, group)))
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


def _parse_group(name: str, group: Mapping[str, Any]) -> WeightScheme:
    weights = group.get("weights") or {}
    if group.get("input_activations") or weights.get("type") != "int":
        raise CheckpointError(
            f"config group {name}: {weights.get('type')} weights with activations "
            f"{group.get('input_activations')}; this version runs integer weights only"
        )
    if weights.get("actorder") in ("group", "dynamic"):
        raise CheckpointError(
            f"config group {name}: actorder {weights['actorder']} is not supported"
        )
    try:
        strategy = weights["strategy"]
        group_size = weights.get("group_size") if strategy == "group" else None
        return WeightScheme(weights["num_bits"], bool(weights["symmetric"]), strategy, group_size)
    except (KeyError, QtoolError) as error:
        raise CheckpointError(f"config group {name}: {error}") from None
