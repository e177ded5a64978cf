"""The CPU back end on what torch already has: no compiler needed.

Linear layers
    4-bit weights in bfloat16: torch's ``_weight_int4pack_mm_for_cpu`` for few rows, where the
    weight's bytes decide; dequantize and a bfloat16 GEMM for many, where arithmetic does. The
    same kernel is 30 to 60 times slower than a dense GEMM in float16 and float32 (scalar path),
    so these dtypes, 8-bit weights and odd shapes use dense weights.

Attention
    One padded ``scaled_dot_product_attention`` for a pure decode batch, one a sequence otherwise.
    Rows depend on their company within rounding; ``reference`` is the batch-invariant path.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from qtool.formats.scheme import WeightScheme
from qtool.formats.tensor import QuantizedTensor
from qtool.runtime.kernels.backend import AttentionLayout, AttentionScope, Backend, LinearOp, Span
from qtool.runtime.kernels.reference import (
    RoundedInputLinear,
    dense_weight,
    first_visible,
    rounds_input,
    tensor_bytes,
)

# Rows up to which int4pack beats dequantize + GEMM: the shapes of a 135M model cross between 64
# and 192 rows on 2 cores of a Sapphire Rapids. A rough middle; native code does not need it.
INT4_MAX_ROWS = 96

# What torch's kernel accepts.
INT4_GROUP_SIZES = (32, 64, 128, 256)
INT4_ROW_MULTIPLE = 16


class DenseLinear(LinearOp):
    """``x @ weight.T + bias``."""

    kernel = "torch linear"

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight, self._bias = weight, bias
        self.num_bytes = tensor_bytes(weight, bias)

    def __call__(self, x: Tensor) -> Tensor:
        return functional.linear(x, self._weight, self._bias)


class Int4Linear(LinearOp):
    """A 4-bit weight, packed for few rows and kept as codes for many."""

    kernel = "torch int4pack (bf16)"

    def __init__(self, weight: QuantizedTensor, bias: Tensor | None) -> None:
        self._weight, self._bias = weight, bias
        self._group_size = group_width(weight.scheme, weight.shape)
        self._packed = torch._convert_weight_to_int4pack_for_cpu(weight.codes.int(), 1)
        # The kernel computes (code - 8) * scale + offset.
        scales = weight.scales.float().t()
        offsets = (8.0 - weight.zeros.float().t()) * scales
        self._grid = torch.stack((scales, offsets), dim=-1).to(torch.bfloat16).contiguous()
        self.num_bytes = tensor_bytes(
            self._packed, self._grid, weight.codes, weight.scales, weight.zeros, bias
        )

    def __call__(self, x: Tensor) -> Tensor:
        if x.shape[0] > INT4_MAX_ROWS:
            return functional.linear(x, self._weight.dequantize(x.dtype), self._bias)
        out = torch._weight_int4pack_mm_for_cpu(
            x.contiguous(), self._packed, self._group_size, self._grid
        )
        return out if self._bias is None else out + self._bias


def group_width(scheme: WeightScheme, shape: tuple[int, int]) -> int:
    """Weights of a row that share a scale."""
    return scheme.block_shape(shape)[1]


def fits_int4pack(weight: QuantizedTensor, dtype: torch.dtype) -> bool:
    """Whether torch's packed 4-bit kernel takes this weight, and is fast in this dtype."""
    return (
        weight.scheme.bits == 4
        and dtype == torch.bfloat16
        and weight.scheme.strategy != "tensor"
        and group_width(weight.scheme, weight.shape) in INT4_GROUP_SIZES
        and weight.shape[0] % INT4_ROW_MULTIPLE == 0
    )


class CpuBackend(Backend):
    """See the module's text."""

    name = "cpu"
    attention_kernel = "torch SDPA"
    norm_kernel = "torch rms_norm"

    def linear(self, weight: Tensor | QuantizedTensor, bias: Tensor | None) -> LinearOp:
        if rounds_input(weight):
            return RoundedInputLinear(weight, bias)
        bias = None if bias is None else bias.to(self.dtype)
        if isinstance(weight, QuantizedTensor) and fits_int4pack(weight, self.dtype):
            return Int4Linear(weight, bias)
        return DenseLinear(dense_weight(weight, self.dtype).contiguous(), bias)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return functional.rms_norm(x, (x.shape[1],), weight, eps)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=1)
        return functional.silu(gate).mul_(up)

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=1)
        return functional.gelu(gate, approximate="tanh").mul_(up)

    def attention(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        layout: AttentionLayout,
        scope: AttentionScope,
    ) -> Tensor:
        if layout.is_decode:
            return _attend_decode(q, keys, values, layout, scope)
        out = torch.empty_like(q)
        for span, table in zip(layout.spans, layout.block_tables, strict=True):
            rows = slice(span.start, span.start + span.length)
            out[rows] = _attend_span(q[rows], keys, values, table, span, scope)
        return out


def _attend_decode(
    q: Tensor, keys: Tensor, values: Tensor, layout: AttentionLayout, scope: AttentionScope
) -> Tensor:
    """One row a sequence: contexts gathered side by side, padded to the longest."""
    block_size = keys.shape[1]
    lengths = torch.tensor([span.context_len for span in layout.spans])
    longest = int(lengths.max())
    tables = layout.block_tables[:, : -(-longest // block_size)]
    columns = torch.arange(longest)
    visible = columns < lengths.unsqueeze(1)
    if scope.window is not None:
        visible &= columns >= lengths.unsqueeze(1) - scope.window

    def gather(pool: Tensor) -> Tensor:
        context = pool[tables].flatten(1, 2)[:, :longest]
        # Masked scores do not stop a NaN in an unused slot: 0 * NaN is NaN.
        context.masked_fill_(~visible[:, :, None, None], 0)
        return context.transpose(1, 2)

    mask = None if bool(visible.all()) else visible[:, None, None, :]
    return _attend(q.unsqueeze(2), gather(keys), gather(values), mask, scope).squeeze(2)


def _attend_span(
    q: Tensor, keys: Tensor, values: Tensor, table: Tensor, span: Span, scope: AttentionScope
) -> Tensor:
    """All rows of one sequence's chunk over its whole context."""
    block_size = keys.shape[1]
    first = first_visible(span, scope)
    skipped = first // block_size
    blocks = table[skipped : -(-span.context_len // block_size)]
    visible = slice(first - skipped * block_size, span.context_len - skipped * block_size)

    def gather(pool: Tensor) -> Tensor:
        return pool[blocks].flatten(0, 1)[visible].transpose(0, 1).unsqueeze(0)

    whole_prompt = span.length == span.context_len and scope.window is None
    mask = None if whole_prompt else _causal_mask(span, first, scope.window)
    out = _attend(q.transpose(0, 1).unsqueeze(0), gather(keys), gather(values), mask, scope)
    return out.squeeze(0).transpose(0, 1)


def _attend(
    q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scope: AttentionScope
) -> Tensor:
    """q [S, heads, R, D] over keys and values [S, kv_heads, L, D]; no mask means causal."""
    causal = mask is None and q.shape[2] > 1
    if scope.softcap is None:
        return functional.scaled_dot_product_attention(
            q, keys, values, mask, is_causal=causal, scale=scope.scale, enable_gqa=True
        )
    if causal:
        mask = torch.ones(q.shape[2], keys.shape[2], dtype=torch.bool).tril()
    grouped = q.unflatten(1, (keys.shape[1], -1)).float()
    scores = grouped @ keys.unsqueeze(2).float().transpose(-1, -2)
    scores = scope.softcap * torch.tanh(scores * (scope.scale / scope.softcap))
    if mask is not None:
        scores.masked_fill_(~mask.unsqueeze(-3), -torch.inf)
    weights = torch.softmax(scores, dim=-1).to(values.dtype)
    return (weights @ values.unsqueeze(2)).flatten(1, 2)


def _causal_mask(span: Span, first: int, window: int | None) -> Tensor:
    """Visible keys of those from position ``first``, bool [length, context_len - first]."""
    rows = torch.arange(span.context_len - span.length, span.context_len).unsqueeze(1)
    columns = torch.arange(first, span.context_len)
    visible = columns <= rows
    return visible if window is None else visible & (columns > rows - window)
