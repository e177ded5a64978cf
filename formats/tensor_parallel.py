"""Can engines split a quantized model over 2, 4 or 8 devices? From shapes and schemes alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

SIZES = (1, 2, 4, 8)

# These are split along their inputs, all others along their outputs (Megatron-LM, section 3).
_ALONG_INPUTS = ("o_proj", "down_proj", "w2")


class HasBlocks(Protocol):
    """What shares a scale: a :class:`~qtool.formats.scheme.WeightScheme`, or as much of one."""

    @property
    def strategy(self) -> str:
        """``tensor``, ``channel``, ``group`` or ``block``."""
        ...

    def block_shape(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Rows and columns that share a scale in a weight of ``shape``."""
        ...


def obstacles(
    shapes: Mapping[str, tuple[int, ...]],
    config: Mapping[str, Any],
    schemes: Mapping[str, HasBlocks],
    size: int,
) -> list[str]:
    """What keeps a model from being split ``size`` ways, one line each; empty if nothing does.

    ``shapes`` are those of the weights of all modules in ``schemes``.
    """
    found = []
    if (heads := config.get("num_attention_heads", size)) % size:
        found.append(f"{heads} attention heads are not divisible by {size}")
    kv_heads = config.get("num_key_value_heads", size)
    if kv_heads % size and size % kv_heads:
        found.append(f"{kv_heads} key-value heads can neither be split nor copied {size} ways")
    seen: set[str] = set()
    for name, scheme in schemes.items():
        problem = _module_obstacle(name, shapes[name], scheme, size)
        kind = name.rpartition(".")[2]
        if problem and f"{kind}{problem}" not in seen:
            seen.add(f"{kind}{problem}")
            found.append(f"{name}: {problem}")
    return found


def _module_obstacle(name: str, shape: tuple[int, ...], scheme: HasBlocks, size: int) -> str | None:
    rows, columns = shape
    block = scheme.block_shape((rows, columns))
    axis, what = (1, "inputs") if name.endswith(_ALONG_INPUTS) else (0, "outputs")
    length = (rows, columns)[axis]
    # A scale for the whole row or tensor serves every part of it.
    unit = 1 if scheme.strategy in ("tensor", "channel") else block[axis]
    if length % size:
        return f"{length} {what} are not divisible by {size}"
    if (length // size) % unit:
        return f"{length // size} {what} a device are not a whole number of groups of {unit}"
    return None
