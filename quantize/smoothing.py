"""Move a per-channel scale across a product: divide the source, multiply the targets' columns.

With ``y = W (n * x)`` and any positive ``s``: ``y = (W diag(s)) ((n / s) * x)``. Both sides are
rewritten offline, so nothing remains to do at run time (AWQ, section 3.2).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Tie = Literal["mean", "max"]


@dataclass(frozen=True, slots=True, eq=False)
class ScaleChoice:
    """Result of :func:`choose_scales`.

    Attributes:
        ratio: strength of the smoothing; 0 is identity.
        scales: float32 [K]; exactly 1 for identity.
        loss: loss with these scales, never above ``identity_loss``.
        identity_loss: loss without smoothing.
    """

    ratio: float
    scales: Tensor
    loss: float
    identity_loss: float


def choose_scales(
    identity: Tensor,
    candidates: Iterable[tuple[float, Tensor]],
    loss: Callable[[Tensor], float],
) -> ScaleChoice:
    """The scales with the smallest loss; identity wins ties and non-finite losses.

    Args:
        identity: ones [K].
        candidates: strengths and their scales [K].
        loss: output error of the parent module with weights rounded under given scales [K].
    """
    identity_loss = loss(identity)
    best = ScaleChoice(0.0, identity, identity_loss, identity_loss)
    for ratio, scales in candidates:
        candidate = loss(scales)
        if math.isfinite(candidate) and candidate < best.loss:
            best = ScaleChoice(ratio, scales, candidate, identity_loss)
    return best


def tie_over_query_group(
    per_query: Tensor, head_dim: int, num_value_channels: int, how: Tie = "mean"
) -> Tensor:
    """Mean, or largest, over the query heads that read one key-value head.

    Args:
        per_query: [num_heads * head_dim], heads of one group next to each other.
        head_dim: channels of a head.
        num_value_channels: num_kv_heads * head_dim.

    Returns:
        [num_kv_heads * head_dim].
    """
    groups = per_query.reshape(num_value_channels // head_dim, -1, head_dim)
    return (groups.mean(1) if how == "mean" else groups.amax(1)).flatten()


def spread_over_query_group(per_value: Tensor, head_dim: int, num_query_channels: int) -> Tensor:
    """Repeat [num_kv_heads * head_dim] for every query head: [num_heads * head_dim]."""
    heads = per_value.reshape(-1, 1, head_dim)
    repeats = num_query_channels // per_value.numel()
    return heads.expand(-1, repeats, -1).flatten()


def divide_norm(
    weight: Tensor, scales: Tensor, offset: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Fold ``1 / scales`` into a norm that multiplies by ``offset + weight``.

    The folded norm is stored in ``dtype``, and its rounding changes the scale it really
    divides by. That scale is returned: with it the targets undo the norm exactly.

    Args:
        weight: norm weight [features].
        scales: positive [features].
        offset: 0, or 1 for norms that store their distance from one.
        dtype: dtype the norm is stored in.

    Returns:
        The folded weight, float32 with values of ``dtype``, and the scales it stands for. Where
        the gain is zero nothing passes, and the scale asked for stays.
    """
    gain = offset + weight
    # Identity must not move a bit, whatever the offset's arithmetic would do to it.
    folded = torch.where(scales == 1, weight, gain / scales - offset).to(dtype).float()
    exact = gain / (offset + folded)
    usable = exact.isfinite() & (exact > 0)
    return folded, torch.where(usable, exact, scales)


def divide_rows(
    weight: Tensor, bias: Tensor | None, scales: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Fold ``1 / scales`` into a linear's outputs: rows of weight [N, K], and bias [N].

    With fewer than N scales it is the last outputs that are divided: those of v in a fused
    q, k, v projection, of up in a fused gate and up.
    """
    scales = torch.nn.functional.pad(scales, (weight.shape[0] - len(scales), 0), value=1.0)
    return weight / scales.unsqueeze(1), None if bias is None else bias / scales


def multiply_columns(weight: Tensor, scales: Tensor) -> Tensor:
    """Undo a division by ``scales`` [K] of the input of a weight [N, K]."""
    return weight * scales


def rescale_hessian(hessian: Tensor, scales: Tensor) -> Tensor:
    """Second moment [K, K] of an input after its division by ``scales`` [K]."""
    return hessian / scales.unsqueeze(0) / scales.unsqueeze(1)
