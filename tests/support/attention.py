"""Paged attention in float64, row by row, and cases with NaN in every unused slot."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qtool.runtime.batch import QuerySpan
from qtool.runtime.kernels.backend import AttentionScope

BLOCK_SIZE = 16


@dataclass(frozen=True)
class Layout:
    spans: tuple[QuerySpan, ...]
    block_tables: Tensor
    is_decode: bool


def ref_attention(
    q: Tensor, keys: Tensor, values: Tensor, layout: Layout, scope: AttentionScope
) -> Tensor:
    """One row and one head at a time, over the slots its sequence owns."""
    group = q.shape[1] // keys.shape[2]
    out = torch.empty(q.shape, dtype=torch.float64)
    for span, table in zip(layout.spans, layout.block_tables.tolist(), strict=True):
        for row in range(span.length):
            position = span.context_len - span.length + row
            first = 0 if scope.window is None else max(0, position - scope.window + 1)
            slots = [(table[p // BLOCK_SIZE], p % BLOCK_SIZE) for p in range(first, position + 1)]
            for head in range(q.shape[1]):
                k = torch.stack([keys[b, s, head // group] for b, s in slots]).double()
                v = torch.stack([values[b, s, head // group] for b, s in slots]).double()
                scores = k @ q[span.start + row, head].double() * scope.scale
                if scope.softcap is not None:
                    scores = scope.softcap * torch.tanh(scores / scope.softcap)
                weights = torch.softmax(scores, 0)
                out[span.start + row, head] = weights @ v
    return out


def make_case(
    lengths: list[tuple[int, int]], heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Layout]:
    """(rows, context) per sequence, on blocks drawn from a shuffled, poisoned pool."""
    generator = torch.Generator().manual_seed(sum(map(sum, lengths)))
    blocks = [-(-context // BLOCK_SIZE) for _, context in lengths]
    order = torch.randperm(sum(blocks) + 3, generator=generator).tolist()
    shape = (len(order), BLOCK_SIZE, kv_heads, head_dim)
    keys, values = torch.full(shape, torch.nan), torch.full(shape, torch.nan)
    spans, tables, start = [], [], 0
    for (rows, context), count in zip(lengths, blocks, strict=True):
        table = [order.pop() for _ in range(count)]
        for position in range(context):
            slot = table[position // BLOCK_SIZE], position % BLOCK_SIZE
            keys[slot] = torch.randn(kv_heads, head_dim, generator=generator)
            values[slot] = torch.randn(kv_heads, head_dim, generator=generator)
        spans.append(QuerySpan(start, rows, context))
        tables.append(table + [0] * (max(blocks) - count))
        start += rows
    q = torch.randn(start, heads, head_dim, generator=generator)
    layout = Layout(tuple(spans), torch.tensor(tables), all(rows == 1 for rows, _ in lengths))
    return q.to(dtype), keys.to(dtype), values.to(dtype), layout


def forget(pool: Tensor, layout: Layout, window: int) -> None:
    """NaN in whatever is behind the window of a sequence's rows, as if others had it by now."""
    for span, table in zip(layout.spans, layout.block_tables.tolist(), strict=True):
        for position in range(max(0, span.context_len - span.length - window + 1)):
            pool[table[position // BLOCK_SIZE], position % BLOCK_SIZE] = torch.nan


CASES = {
    "decode": [(1, 1), (1, 16), (1, 17), (1, 130)],
    "prompt": [(70, 70)],
    "prompts": [(3, 3), (33, 33), (1, 1)],
    "chunks": [(5, 90), (17, 64), (1, 65), (64, 65)],
}
