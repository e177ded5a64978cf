"""Which module gets which scheme, decided from shapes alone, before any work is done."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

from qtool.calibration.families import ModelFamily
from qtool.errors import QuantizationError, UsageError
from qtool.formats.patterns import select
from qtool.formats.scheme import WeightScheme, weight_scheme

# The head stays in 16 bits. It is named for loaders that match the class Linear.
HEAD = "lm_head"

GroupSize = int | Literal["auto", "row"]

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
                f"the source is already quantized ({key}: {method}); rounding twice only adds "
                "error: start from the original checkpoint"
            )


def plan_schemes(
    shapes: HasShapes,
    config: Mapping[str, Any],
    family: ModelFamily,
    *,
    bits: int,
    symmetric: bool,
    group_size: GroupSize,
    ignore: Sequence[str] = (),
) -> dict[str, WeightScheme]:
    """Scheme of every quantized module, by full name, in true-sequential order.

    Embeddings and ``lm_head`` are never in it, nor are linears that a pattern of ``ignore``
    means (see :func:`~qtool.formats.patterns.pattern_matches`).

    Raises:
        QuantizationError: a group size that does not divide a row (every such module is named);
            a pattern that means nothing, parts linears that belong together, or leaves none.
        UsageError: a scheme no format can hold, or a pattern that is none.
    """
    names = linear_names(config, family)
    ignored = _ignored(ignore, names, config, family)
    widths = {n: shapes.shape(f"{n}.weight")[1] for n in names if n not in ignored}
    scheme = weight_scheme(bits, symmetric, _resolve_group_size(group_size, widths))
    return dict.fromkeys(widths, scheme)


def linear_names(config: Mapping[str, Any], family: ModelFamily) -> list[str]:
    """Full names of the linears of all blocks, in true-sequential order."""
    return [f"{p}.{linear}" for p in family.block_prefixes(config) for linear in family.linears]


def _ignored(
    patterns: Sequence[str],
    names: Sequence[str],
    config: Mapping[str, Any],
    family: ModelFamily,
) -> frozenset[str]:
    ignored = select(patterns, [*names, HEAD])
    groups = [
        [f"{prefix}.{linear}" for linear in group]
        for prefix in family.block_prefixes(config)
        for group in family.linear_groups
    ]
    _refuse_split(ignored, groups)
    if ignored.issuperset(names):
        raise QuantizationError(
            f"ignore={', '.join(patterns)}: means all {len(names)} linears, so nothing is left to "
            "quantize; ignore fewer"
        )
    return ignored


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
