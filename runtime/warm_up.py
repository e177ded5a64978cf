"""What a model compiles when it is loaded, so that nothing is compiled while it serves.

Products have a form for each bucket of tokens, and their operations know which. All other kernels
of a step, attention's aside, have one form for any number of rows; which ones, with which dtypes
and widths, follows from the layers. So one row is sent through all of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qtool.runtime.batch import Batch, QuerySpan
from qtool.runtime.kv_cache import AttentionCache
from qtool.runtime.model import Decoder


class QueriesOnly(AttentionCache):
    """In a cache's place: attention gives the queries back, and nothing is stored."""

    def __init__(self) -> None:
        super().__init__(1, [])

    def attend(self, layer: int, q: Tensor, *others: object, **named: object) -> Tensor:
        return q


def warm_up(decoder: Decoder) -> None:
    """Compile every kernel that a step of the decoder can launch, attention's aside."""
    decoder.backend.warm_up()
    if not decoder.backend.compiles:
        return
    zero = torch.zeros(1, dtype=torch.int64, device=decoder.device)
    batch = Batch(zero, zero, zero, (QuerySpan(0, 1, 1),), zero[None], zero, (0,))
    decoder.forward(batch, QueriesOnly())
