"""``quantization_config`` of compressed-tensors: which module has which scheme, in which layout.

The format's config classes forbid unknown keys, so only the keys below are written.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from qtool.errors import CheckpointError, QtoolError
from qtool.formats.patterns import LINEAR, regex_problem, target_matches
from qtool.formats.scheme import BLOCK_SIZE, ActivationScheme, WeightScheme

QUANT_METHOD = "compressed-tensors"
PACKED, INT, FLOAT, MIXED = "pack-quantized", "int-quantized", "float-quantized", "mixed-precision"
# As int-quantized and float-quantized, of any width and granularity.
NAIVE = "naive-quantized"
# Of a checkpoint without a quantized linear, which has scales of the cache alone.
DENSE = "dense"
LAYOUTS = (PACKED, INT, FLOAT, NAIVE)


def layout_of(scheme: WeightScheme) -> str:
    """Name of the format in which weights of a scheme are written."""
    if scheme.type == "float":
        return FLOAT
    return PACKED if scheme.activations is None else INT


def quantization_config(schemes: Mapping[str, WeightScheme], ignore: list[str]) -> dict[str, Any]:
    """The ``quantization_config`` block of config.json.

    Args:
        schemes: scheme of every quantized module by full name.
        ignore: full names of linears left as they were.

    One scheme for all becomes one group that targets the class ``Linear``; several schemes
    name their modules. Without any there are no groups: the block is for scales of the cache.
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
        "format": MIXED if len(layouts) > 1 else layouts[0] if layouts else DENSE,
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
class ConfigGroup:
    """Modules of one scheme, stored in one layout (:data:`LAYOUTS`).

    ``act_order``: groups are no neighbours; a tensor says which feature is in which.
    """

    targets: tuple[str, ...]
    scheme: WeightScheme
    layout: str
    act_order: bool = False


@dataclass(frozen=True, slots=True)
class QuantizationConfig:
    """Which module of a checkpoint has which scheme.

    ``groups`` are in file order. Targets and ``ignore`` share the grammar of
    :func:`~qtool.formats.patterns.target_matches`; class names other than ``Linear`` mean no
    linear.
    """

    groups: tuple[ConfigGroup, ...]
    ignore: tuple[str, ...]

    def group_for(self, module: str) -> ConfigGroup | None:
        """Group of the linear ``module`` (full name), or ``None`` for an unquantized one."""
        if any(target_matches(target, module) for target in self.ignore):
            return None
        for exact in (True, False):
            for group in self.groups:
                if any(target_matches(t, module) and (t != LINEAR) == exact for t in group.targets):
                    return group
        return None

    def scheme_for(self, module: str) -> WeightScheme | None:
        """Scheme of the linear ``module`` (full name), or ``None`` for an unquantized one."""
        group = self.group_for(module)
        return None if group is None else group.scheme


def parse_config(config: Mapping[str, Any]) -> QuantizationConfig:
    """Read a ``quantization_config`` block.

    Raises:
        CheckpointError: another method or format, or arguments we cannot run, by name.
    """
    method, layout = config.get("quant_method"), config.get("format")
    if method != QUANT_METHOD or layout not in (*LAYOUTS, MIXED, DENSE):
        raise CheckpointError(
            f"quantization {method!r} with format {layout!r}: this version reads {QUANT_METHOD} "
            f"{', '.join(LAYOUTS)}; quantize the original model with qtool"
        )
    for key in ("sparsity_config", "transform_config"):
        if config.get(key):
            raise CheckpointError(
                f"quantization_config has a {key} ({config[key]}), which changes what weights "
                "mean; this version reads checkpoints without one"
            )
    groups = tuple(
        _parse_group(name, group, group.get("format") or layout)
        for name, group in (config.get("config_groups") or {}).items()
    )
    if not groups and not config.get("kv_cache_scheme"):
        raise CheckpointError(
            "quantization_config has no config_groups and no kv_cache_scheme: nothing says the bits"
        )
    ignore = tuple(config.get("ignore") or ())
    for target in (*ignore, *(target for group in groups for target in group.targets)):
        if problem := regex_problem(target):
            raise CheckpointError(
                f"quantization_config names modules by {target!r}, which is no regular expression "
                f"({problem}); repair config.json"
            )
    return QuantizationConfig(groups, ignore)


def _parse_group(name: str, group: Mapping[str, Any], layout: str) -> ConfigGroup:
    weights = group.get("weights") or {}
    if group.get("output_activations"):
        raise CheckpointError(f"config group {name}: output_activations are not supported")
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
    plain = FLOAT if scheme.type == "float" else INT
    fitting = (plain, NAIVE) if scheme.type == "float" else (PACKED, plain, NAIVE)
    if layout not in fitting or (layout == PACKED and scheme.activations is not None):
        raise CheckpointError(
            f"config group {name}: {scheme.describe()} in format {layout}; such weights are read "
            f"from {layout_of(scheme)} only"
        )
    act_order = weights.get("actorder") in ("group", "dynamic")
    return ConfigGroup(tuple(group.get("targets") or ()), scheme, layout, act_order)


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
