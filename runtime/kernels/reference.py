"""Plain torch: the truth in tests, the path that always works, and batch-invariant.

A row's result must not depend on its company. Library GEMMs choose kernels, and with them the
order of a sum, by the number of rows. So here every GEMM has one shape: rows are cut into
tiles of :data:`ROW_TILE`, the last one filled up with zeros, and keys into tiles of
:data:`KEY_TILE` visited in order. Elementwise functions that torch vectorizes with a scalar
tail (silu) run row by row, so that a value never moves between body and tail.
``tests/runtime/kernels/test_batch_invariance.py`` holds the rest: that a row's place in a tile
does not matter.

Quantized weights are kept dequantized in the compute dtype: exact, simple, and as large as the
original. Where a scheme rounds the input as well, they are kept in float32.
"""

from __future__ import annotations

from typing import TypeGuard

import torch
from torch import Tensor
from torch.nn import functional

from qtool.formats.activations import round_input
from qtool.formats.tensor import QuantizedTensor
from qtool.runtime.kernels.backend import (
    AttentionLayout,
    AttentionScope,
    Backend,
    LinearOp,
    Span,
)

# 16 rows: one decode step of a typical small batch, and wide enough for a GEMM to be no slower
# a prompt token than a matrix-vector product.
ROW_TILE = 16
KEY_TILE = 64


def dense_weight(weight: Tensor | QuantizedTensor, dtype: torch.dtype) -> Tensor:
    """The weight [N, K] in the compute dtype, whatever it was."""
    if isinstance(weight, QuantizedTensor):
        return weight.dequantize(dtype)
    return weight.to(dtype)


def rounds_input(weight: Tensor | QuantizedTensor) -> TypeGuard[QuantizedTensor]:
    """Whether a weight's scheme rounds its input too (W8A8)."""
    return isinstance(weight, QuantizedTensor) and weight.scheme.activations is not None


def tensor_bytes(*tensors: Tensor | None) -> int:
    """Bytes of memory the tensors take."""
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)


class TiledLinear(LinearOp):
    """``x @ weight.T + bias`` in row tiles of one shape."""

    kernel = "torch linear, row tiles"

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight, self._bias = weight, bias
        self.num_bytes = tensor_bytes(weight, bias)

    def __call__(self, x: Tensor) -> Tensor:
        tiles = row_tiles(x)
        out = torch.cat([functional.linear(tile, self._weight, self._bias) for tile in tiles])
        return out[: x.shape[0]]


class RoundedInputLinear(LinearOp):
    """``round(x) @ weight.T + bias`` for W8A8: the input is rounded as the checkpoint says.

    Rounded inputs and dequantized weights are multiplied in float32, so that nothing but the
    order of a sum differs from integer products times their scales. In 16 bits the two factors
    would be rounded a second time.
    """

    def __init__(self, weight: QuantizedTensor, bias: Tensor | None) -> None:
        assert weight.scheme.activations is not None
        self._scheme, self._static = weight.scheme.activations, weight.input_scale
        bias = None if bias is None else bias.float()
        self._linear = TiledLinear(weight.dequantize().contiguous(), bias)
        self.num_bytes = self._linear.num_bytes
        kind = "INT8" if self._scheme.type == "int" else "FP8"
        way = "static" if self._static is not None else f"per {self._scheme.strategy}"
        self.kernel = f"torch float32, row tiles, {kind} inputs {way}"

    def __call__(self, x: Tensor) -> Tensor:
        return self._linear(round_input(x, self._scheme, self._static)).to(x.dtype)


def row_tiles(x: Tensor) -> Tensor:
    """Rows [M, ...] as [ceil(M / ROW_TILE), ROW_TILE, ...], filled up with zeros."""
    padded = torch.zeros(-x.shape[0] % ROW_TILE, *x.shape[1:], dtype=x.dtype, device=x.device)
    return torch.cat((x, padded)).view(-1, ROW_TILE, *x.shape[1:])


class ReferenceBackend(Backend):
    """See the module's text."""

    name = "reference"
    attention_kernel = "torch, row tiles"
    norm_kernel = "torch, row tiles"

    def linear(self, weight: Tensor | QuantizedTensor, bias: Tensor | None) -> LinearOp:
        if rounds_input(weight):
            bias = None if bias is None else bias.to(self.device)
            return RoundedInputLinear(weight.to(self.device), bias)
        dense = dense_weight(weight, self.dtype).to(self.device).contiguous()
        return TiledLinear(dense, None if bias is None else bias.to(self.device, self.dtype))

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        tiles = row_tiles(x)
        inverse = torch.rsqrt(tiles.pow(2).mean(-1, keepdim=True) + eps)
        return (tiles * inverse).view(-1, x.shape[1])[: x.shape[0]] * weight

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        half = gate_up.shape[1] // 2
        rows = [functional.silu(row[:half]) * row[half:] for row in gate_up]
        return torch.stack(rows)

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        half = gate_up.shape[1] // 2
        rows = [functional.gelu(row[:half], approximate="tanh") * row[half:] for row in gate_up]
        return torch.stack(rows)

    def attention(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        layout: AttentionLayout,
        scope: AttentionScope,
    ) -> Tensor:
        out = torch.empty_like(q)
        for span, table in zip(layout.spans, layout.block_tables, strict=True):
            rows = slice(span.start, span.start + span.length)
            context = [gather_context(pool, table, span, scope) for pool in (keys, values)]
            out[rows] = _attend(q[rows], context[0], context[1], span, scope)
        return out


def gather_context(pool: Tensor, table: Tensor, span: Span, scope: AttentionScope) -> Tensor:
    """A sequence's K or V [num_kv_heads, L, head_dim], L filled up to KEY_TILE with zeros.

    So is what no row's window reaches: its blocks may belong to others by now.
    """
    block_size = pool.shape[1]
    blocks = -(-span.context_len // block_size)
    context = pool[table[:blocks]].flatten(0, 1)[: span.context_len]
    context[: first_visible(span, scope)] = 0
    padded = functional.pad(context, (0, 0, 0, 0, 0, -span.context_len % KEY_TILE))
    return padded.transpose(0, 1)


def first_visible(span: Span, scope: AttentionScope) -> int:
    """The first position that any row of a span sees."""
    if scope.window is None:
        return 0
    return max(0, span.context_len - span.length - scope.window + 1)


def _attend(q: Tensor, keys: Tensor, values: Tensor, span: Span, scope: AttentionScope) -> Tensor:
    """Online softmax (Milakov & Gimelshein 2018) of one sequence's rows, tile by tile."""
    num_kv_heads, head_dim = keys.shape[0], keys.shape[2]
    first = span.context_len - span.length
    outputs = []
    for index, tile in enumerate(row_tiles(q)):
        # [ROW_TILE, heads, D] -> [kv_heads, ROW_TILE * group, D]
        grouped = tile.view(ROW_TILE, num_kv_heads, -1, head_dim).transpose(0, 1).flatten(1, 2)
        positions = first + index * ROW_TILE + torch.arange(ROW_TILE, device=q.device)
        rows = positions.repeat_interleave(grouped.shape[1] // ROW_TILE)
        out = _attend_tile(grouped.float() * scope.scale, keys, values, rows, scope)
        split = out.view(num_kv_heads, ROW_TILE, -1, head_dim).transpose(0, 1)
        outputs.append(split.reshape(ROW_TILE, -1, head_dim))
    return torch.cat(outputs)[: q.shape[0]].to(q.dtype)


def _attend_tile(
    q: Tensor, keys: Tensor, values: Tensor, rows: Tensor, scope: AttentionScope
) -> Tensor:
    """q [kv_heads, R, D] at positions rows [R] over keys and values [kv_heads, L, D]."""
    highest = torch.full((*q.shape[:2], 1), -torch.inf, device=q.device)
    total = torch.zeros_like(highest)
    out = torch.zeros_like(q)
    for start in range(0, min(int(rows[-1]) + 1, keys.shape[1]), KEY_TILE):
        columns = torch.arange(start, start + KEY_TILE, device=q.device)
        visible = columns <= rows.unsqueeze(1)
        if scope.window is not None:
            visible &= columns > rows.unsqueeze(1) - scope.window
        scores = q @ keys[:, start : start + KEY_TILE].float().transpose(1, 2)
        if scope.softcap is not None:
            scores = scope.softcap * torch.tanh(scores / scope.softcap)
        scores = scores.masked_fill(~visible, -torch.inf)
        new_highest = torch.maximum(highest, scores.amax(-1, keepdim=True))
        # A row that has seen no key yet keeps -inf; its shift is 0 so that exp gives 0, not NaN.
        shift = torch.where(new_highest.isinf(), 0.0, new_highest)
        weights = torch.exp(scores - shift)
        decay = torch.exp(highest - shift)
        total = total * decay + weights.sum(-1, keepdim=True)
        out = out * decay + weights @ values[:, start : start + KEY_TILE].float()
        highest = new_highest
    # Rows that only fill up a tile may have seen nothing.
    return out / total.clamp(min=torch.finfo(torch.float32).tiny)
