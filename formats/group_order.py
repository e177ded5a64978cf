"""``g_idx``: which group each input feature belongs to, where groups are not neighbours.

GPTQ with ``desc_act`` solves columns by falling importance and groups them in that order (Frantar
et al. 2023, the "act-order" of its code), so a group's features lie all over the row. Sorting the
columns by group at load makes groups contiguous again; the input is then taken in that order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qtool.errors import CheckpointError

REORDERED = "act-order: columns are sorted by group at load, and inputs are reordered in each step"


def group_order(g_idx: Tensor, groups: int, features: int) -> Tensor | None:
    """The input feature of each column once groups are contiguous; ``None`` if they are.

    Args:
        g_idx: integer [features], the group of each input feature.
        groups: how many there are.
        features: width of the weight; a multiple of ``groups``.

    Raises:
        CheckpointError: it is no map of ``features`` onto ``groups`` of one size.
    """
    if g_idx.dtype not in (torch.int32, torch.int64) or tuple(g_idx.shape) != (features,):
        raise CheckpointError(
            f"g_idx is {g_idx.dtype} of shape {list(g_idx.shape)}; it has one integer for each of "
            f"{features} input features"
        )
    group = g_idx.long()
    size = features // groups
    if bool((group == torch.arange(features) // size).all()):
        return None
    if int(group.min()) < 0 or int(group.max()) >= groups:
        raise CheckpointError(
            f"g_idx names groups {int(group.min())} to {int(group.max())}; the scales have {groups}"
        )
    counts = group.bincount(minlength=groups)
    if bool((counts != size).any()):
        raise CheckpointError(
            f"g_idx puts {int(counts.min())} to {int(counts.max())} features into a group; every "
            f"group has {size}"
        )
    return group.argsort(stable=True)
