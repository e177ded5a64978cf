"""What a format cannot hold of a model, before anything is written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qtool.formats.linears import Shape, WritableFormat
from qtool.formats.scheme import WeightScheme

# Names of modules that a message shows.
SHOWN = 3


@dataclass(frozen=True, slots=True, eq=False)
class LinearPlan:
    """A linear that is to be stored.

    Attributes:
        scale_loss: why its scales do not fit, or ``None`` (:func:`scale_loss`).
        reordered: its groups are no neighbours (:attr:`QuantizedTensor.order`).
    """

    scheme: WeightScheme
    shape: Shape
    scale_loss: str | None = None
    reordered: bool = False


def losses(writer: WritableFormat, linears: Mapping[str, LinearPlan]) -> dict[str, list[str]]:
    """Why linears cannot be stored without loss: reason -> their names; empty if all can."""
    found: dict[str, list[str]] = {}
    if not linears:
        return found
    schemes = Counter(plan.scheme for plan in linears.values())
    usual = schemes.most_common(1)[0][0]
    for name, plan in linears.items():
        reason = _loss(writer, plan)
        if reason is None and writer.ONE_SCHEME and plan.scheme != usual:
            reason = (
                f"{plan.scheme.describe()}: {writer.NAME} has one scheme, and most linears are "
            )
            reason += usual.describe()
        if reason is not None:
            found.setdefault(reason, []).append(name)
    return found


def _loss(writer: WritableFormat, plan: LinearPlan) -> str | None:
    if plan.reordered:
        return "act-order: engines raise on the g_idx that says where groups lie, or drop it"
    return writer.obstacle(plan.scheme, plan.shape) or plan.scale_loss


def scale_loss(writer: WritableFormat, scales: Tensor) -> str | None:
    """Why scales cannot be stored bit for bit; ``None`` if they can."""
    if writer.SCALE_DTYPE is None or is_exact(scales, writer.SCALE_DTYPE):
        return None
    ours, theirs = (str(d).removeprefix("torch.") for d in (scales.dtype, writer.SCALE_DTYPE))
    return f"scales in {ours} would be rounded to {theirs}"


def is_exact(values: Tensor, dtype: torch.dtype) -> bool:
    """Whether floating values keep every bit in another dtype."""
    return torch.equal(values.to(dtype).float(), values.float())


def describe(found: Mapping[str, Sequence[str]]) -> str:
    """All reasons in one sentence, each with the number of its linears and the first of them."""
    return "; ".join(
        f"{reason} ({len(names)} linears: {', '.join(names[:SHOWN])}"
        f"{', ...' if len(names) > SHOWN else ''})"
        for reason, names in found.items()
    )
