"""``activation(gate) * up`` of a gated MLP (Shazeer 2020), elementwise in float32."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from qtool.runtime.kernels.triton.launch import result_like

BLOCK = 1024


@triton.jit
def sigmoid(x: tl.tensor) -> tl.tensor:
    """``1 / (1 + exp(-x))``, which overflows nowhere."""
    small = tl.exp(-tl.abs(x))
    return tl.where(x >= 0, 1.0, small) / (1.0 + small)


@triton.jit
def gated_product(gate: tl.tensor, up: tl.tensor, GELU: tl.constexpr) -> tl.tensor:
    """Of float32 values."""
    if GELU:
        # (1 + tanh(u)) / 2 is sigmoid(2 * u).
        slope = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    else:
        slope = gate
    return gate * sigmoid(slope) * up


@triton.jit
def gated_kernel(
    gate_up_ptr: tl.tensor,  # [M, 2 * K]
    out_ptr: tl.tensor,  # [M, K]
    K: tl.tensor,
    GELU: tl.constexpr,
    SIZE: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    inside = columns < K
    gate_ptrs = gate_up_ptr + row * 2 * K + columns
    gate = tl.load(gate_ptrs, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_ptrs + K, mask=inside, other=0.0).to(tl.float32)
    out = gated_product(gate, up, GELU)
    tl.store(out_ptr + row * K + columns, out.to(out_ptr.dtype.element_ty), mask=inside)


def gated(gate_up: Tensor, out: Tensor, *, gelu: bool) -> None:
    """gate_up [M, 2 * K] contiguous -> out [M, K]; silu, or gelu's form with a tanh."""
    tokens, width = out.shape
    grid = (tokens, triton.cdiv(width, BLOCK))
    gated_kernel[grid](gate_up, out, width, GELU=gelu, SIZE=BLOCK, num_warps=4)


def gated_rows(gate_up: Tensor, *, gelu: bool) -> Tensor:
    """A gate and its up projection [M, 2 * K] -> their gated product, [M, K]."""
    out = result_like(gate_up, gate_up.shape[1] // 2, gate_up.dtype)
    gated(gate_up.contiguous(), out, gelu=gelu)
    return out.to(gate_up.dtype)
