"""Log-probabilities for clients: those of the model, before temperature, penalties and masks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from qtool.runtime.outputs import Logprobs, TokenLogprob

# JSON has no minus infinity. The floor lies below any log-probability that the logits of a real
# model give.
MIN_LOGPROB = -9999.0


def report(logits: Tensor, token_ids: Sequence[int], count: int) -> list[Logprobs]:
    """One entry per row of float32 ``logits`` [positions, vocab].

    Each has the token ``token_ids[t]`` and the ``count`` likeliest ones, likeliest first, of
    equals the lower id first. Values are at least ``MIN_LOGPROB``. A row's entry does not depend
    on the other rows.
    """
    chosen = torch.tensor(list(token_ids), dtype=torch.int64, device=logits.device).unsqueeze(-1)
    # Ranks and order come from the logits: among log-probabilities rounding makes more equals.
    ids = torch.cat([chosen, _top_ids(logits, min(count, logits.shape[-1]))], dim=-1)
    values = logits.log_softmax(dim=-1).gather(-1, ids).clamp(min=MIN_LOGPROB)
    columns = ids.tolist(), values.tolist(), _ranks(logits, chosen).tolist()
    return [_entry(*row) for row in zip(*columns, strict=True)]


def _entry(token_ids: list[int], values: list[float], rank: int) -> Logprobs:
    """The chosen token comes first in both lists, then the likeliest in order."""
    ranks = [rank, *range(1, len(token_ids))]
    chosen, *top = map(TokenLogprob, token_ids, values, ranks)
    return Logprobs(chosen, tuple(top))


def _ranks(logits: Tensor, chosen: Tensor) -> Tensor:
    """Place of ``chosen`` [positions, 1] among logits [positions, vocab], from 1: [positions]."""
    value = logits.gather(-1, chosen)
    lower_id = torch.arange(logits.shape[-1], device=logits.device) < chosen
    return ((logits > value) | ((logits == value) & lower_id)).sum(dim=-1) + 1


def _top_ids(logits: Tensor, count: int) -> Tensor:
    """Ids [positions, count] of the largest logits, largest first."""
    if count == 0:
        return logits.new_empty((logits.shape[0], 0), dtype=torch.int64)
    # ``topk`` promises no order among equals, nor which of them it takes.
    ids = logits.topk(count, dim=-1).indices.sort(dim=-1).values
    values, order = logits.gather(-1, ids).sort(dim=-1, descending=True, stable=True)
    ids = ids.gather(-1, order)
    undecided = (logits >= values[:, -1:]).sum(dim=-1) > count
    for i in undecided.nonzero().flatten().tolist():
        ids[i] = logits[i].sort(descending=True, stable=True).indices[:count]
    return ids
