"""Which module gets which scheme, decided from shapes alone, before any work is done."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from typing import Any, Protocol

from qtool.calibration.families import ModelFamily
from qtool.errors import QuantizationError, UsageError
from qtool.formats.patterns import select
from qtool.formats.scheme import WeightScheme, weight_scheme
from qtool.quantize.schemes import GroupSize, Override, SchemeAsked, SchemesAsked

# The head stays in 16 bits unless asked for. It is named for loaders that match the class Linear.
HEAD = "lm_head"

# What fast kernels of the field load; `auto` prefers the largest: fewest scales to store.
AUTO_GROUP_SIZES = (128, 64, 32)

# Smallest group an error message proposes: below it scales cost more than they save.
MIN_PROPOSED_GROUP_SIZE = 8


class HasShapes(Protocol):
    """A checkpoint of which only headers are read."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        ...


def check_not_quantized(config: Mapping[str, Any]) -> None:
    """Refuse a checkpoint that is quantized already.

    Raises:
        QuantizationError: ``config.json`` has a block that says so.
    """
    for key in ("quantization_config", "compression_config"):
        if config.get(key):
            method = config[key].get("quant_method", "unknown")
            raise QuantizationError(
                f"the source is already quantized ({key}: {method}); a run needs weights that "
                "are not, as rounding twice only adds error: start from the original checkpoint"
            )


def plan_schemes(
    shapes: HasShapes, config: Mapping[str, Any], family: ModelFamily, asked: SchemesAsked
) -> dict[str, WeightScheme]:
    """Scheme of every quantized module, by full name, in true-sequential order; the head is last.

    Embeddings are never in it, ``lm_head`` only if asked for, nor are linears that a pattern of
    ``ignore`` means (see :func:`~qtool.formats.patterns.pattern_matches`). It is empty where all
    weights are to stay as they are.

    Raises:
        QuantizationError: a group size that does not divide a row (every such module is named);
            a pattern that means nothing, parts linears that belong together, or leaves none.
        UsageError: a scheme no format can hold, or a pattern that is none.
    """
    if asked.default is None:
        return {}
    names = linear_names(config, family)
    ignored = _ignored(asked, names, config, family)
    wanted: dict[str, SchemeAsked] = {n: asked.default for n in names if n not in ignored}
    for override in asked.overrides:
        wanted |= dict.fromkeys(_overridden(override, names, ignored), override.scheme)
    if asked.head is not None:
        wanted[HEAD] = asked.head
    widths = {name: shapes.shape(weight_name(name, config, family))[1] for name in wanted}
    schemes = _resolve(wanted, widths)
    _refuse_mixture(schemes, config, family)
    return schemes


def head_source(config: Mapping[str, Any], family: ModelFamily) -> str:
    """Name of the tensor that holds the head's weight: a tied head is the embedding."""
    if not is_tied(config, family):
        return f"{family.head}.weight"
    trunk = family.blocks.rpartition(".")[0]
    return f"{trunk}.{family.embedding}.weight"


def is_tied(config: Mapping[str, Any], family: ModelFamily) -> bool:
    """Whether the head is the embedding; configs may leave out what is usual in their family."""
    return bool(config.get("tie_word_embeddings", family.ties_head))


def weight_name(module: str, config: Mapping[str, Any], family: ModelFamily) -> str:
    """Name of the tensor that holds a planned module's weight."""
    return head_source(config, family) if module == HEAD else f"{module}.weight"


def _overridden(override: Override, names: Sequence[str], ignored: Set[str]) -> list[str]:
    """Linears that get an override's scheme."""
    if override.pattern == HEAD:
        raise QuantizationError(
            f"layer={HEAD!r}: means linears of blocks; the head has --lm-head BITS"
        )
    meant = select([override.pattern], names, option="layer")
    found = [name for name in names if name in meant and name not in ignored]
    if not found:
        raise QuantizationError(
            f"layer={override.pattern!r}: means only linears that are left as they are; ignore or "
            "skip fewer, or leave the override out"
        )
    return found


def _resolve(
    wanted: Mapping[str, SchemeAsked], widths: Mapping[str, int]
) -> dict[str, WeightScheme]:
    """Fill in group sizes: modules of which the same is asked get the same."""
    resolved: dict[SchemeAsked, WeightScheme] = {}
    for asked in dict.fromkeys(wanted.values()):
        if isinstance(asked, WeightScheme):
            resolved[asked] = asked
            continue
        rows = {name: widths[name] for name, scheme in wanted.items() if scheme == asked}
        size = _resolve_group_size(asked.group_size, rows)
        resolved[asked] = weight_scheme(asked.bits, asked.grid_is_symmetric, size)
    return {name: resolved[asked] for name, asked in wanted.items()}


def _refuse_mixture(
    schemes: Mapping[str, WeightScheme], config: Mapping[str, Any], family: ModelFamily
) -> None:
    """Linears that read the same input have one scheme."""
    for group in _fused_groups(config, family):
        found = {name: schemes[name] for name in group if name in schemes}
        if len(set(found.values())) > 1:
            listed = ", ".join(f"{name} {scheme.describe()}" for name, scheme in found.items())
            raise QuantizationError(
                f"layer: {listed}; engines stack linears that read the same input into one: give "
                "all of them the same scheme"
            )


def _fused_groups(config: Mapping[str, Any], family: ModelFamily) -> list[list[str]]:
    return [
        [f"{prefix}.{linear}" for linear in group]
        for prefix in family.block_prefixes(config)
        for group in family.linear_groups
    ]


def linear_names(config: Mapping[str, Any], family: ModelFamily) -> list[str]:
    """Full names of the linears of all blocks, in true-sequential order."""
    return [f"{p}.{linear}" for p in family.block_prefixes(config) for linear in family.linears]


def _ignored(
    asked: SchemesAsked, names: Sequence[str], config: Mapping[str, Any], family: ModelFamily
) -> frozenset[str]:
    ignored = select(asked.ignore, [*names, HEAD], option="ignore")
    if asked.head is not None and HEAD in ignored:
        raise UsageError(f"ignore means {HEAD}, and lm_head asks for it; leave one of them out")
    _refuse_split(ignored, _fused_groups(config, family))
    ignored |= _skipped(asked, config, family)
    if ignored.issuperset(names):
        ways = f"ignore={', '.join(asked.ignore)}" if asked.ignore else "skipping blocks"
        raise QuantizationError(
            f"{ways}: means all {len(names)} linears, so nothing is left to quantize; ignore fewer"
        )
    return ignored


def _skipped(asked: SchemesAsked, config: Mapping[str, Any], family: ModelFamily) -> frozenset[str]:
    """Linears of the blocks at either end that are skipped."""
    prefixes = family.block_prefixes(config)
    if asked.skip_first + asked.skip_last >= len(prefixes):
        raise QuantizationError(
            f"skip_first={asked.skip_first} and skip_last={asked.skip_last}: the model has "
            f"{len(prefixes)} blocks, so nothing is left to quantize; skip fewer"
        )
    ends = [*prefixes[: asked.skip_first], *prefixes[len(prefixes) - asked.skip_last :]]
    return frozenset(f"{prefix}.{linear}" for prefix in ends for linear in family.linears)


def _refuse_split(ignored: frozenset[str], groups: Sequence[Sequence[str]]) -> None:
    """Linears that read the same input are ignored together, or not at all."""
    split = [group for group in groups if 0 < len(ignored.intersection(group)) < len(group)]
    if split:
        inside = ", ".join(name for name in split[0] if name in ignored)
        outside = ", ".join(name for name in split[0] if name not in ignored)
        more = f" (and so in {len(split) - 1} other places)" if len(split) > 1 else ""
        raise QuantizationError(
            f"ignore means {inside}, but not {outside}{more}; engines stack linears that read the "
            f"same input into one: ignore {outside} too, or none of them"
        )


def _resolve_group_size(group_size: GroupSize, widths: Mapping[str, int]) -> int | None:
    if group_size == "row":
        return None
    if group_size == "auto":
        divisor = math.gcd(*widths.values())
        fitting = [size for size in AUTO_GROUP_SIZES if divisor % size == 0]
        if not fitting:
            raise _does_not_divide(AUTO_GROUP_SIZES[-1], widths)
        return fitting[0]
    if not isinstance(group_size, int) or group_size < 1:
        raise UsageError(f"group_size={group_size!r}: use a positive number, 'auto' or 'row'")
    if any(width % group_size for width in widths.values()):
        raise _does_not_divide(group_size, widths)
    return group_size


def _does_not_divide(group_size: int, widths: Mapping[str, int]) -> QuantizationError:
    misfits = [(name, width) for name, width in widths.items() if width % group_size]
    lines = "\n".join(f"  {name}: rows of {width}" for name, width in misfits)
    sizes = ", ".join(map(str, _common_group_sizes(widths)))
    return QuantizationError(
        f"group_size={group_size} does not divide the rows of {len(misfits)} modules:\n{lines}\n"
        f"Every row must be a whole number of groups. Sizes that fit all modules: "
        f"{sizes + ', ' if sizes else ''}or 'row' for one scale a row."
    )


def _common_group_sizes(widths: Mapping[str, int]) -> list[int]:
    divisor = math.gcd(*widths.values())
    powers = [2**exponent for exponent in range(10, 0, -1)]
    return [size for size in powers if size >= MIN_PROPOSED_GROUP_SIZE and divisor % size == 0]
