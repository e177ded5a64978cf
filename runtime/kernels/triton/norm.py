"""RMSNorm (Zhang & Sennrich 2019, section 3), with what stands beside it in a decoder.

Contract: ``x = stream + x`` where there is a stream, kept for the next layer, x normed by itself
first where it has a norm (Gemma); then ``x / sqrt(mean(x**2) + eps) * weight`` in float32, stored
in the output's dtype, or rounded to 8 bits as :mod:`.round_input` does, without a trip through
memory: the bits are those of one after the other. Norms of queries and keys are the same over
rows of a head. Gains of ``1 + weight`` are added up at load.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from qtool.formats.scheme import BLOCK_SIZE, ActivationScheme
from qtool.runtime.kernels.backend import RoundedRows
from qtool.runtime.kernels.triton.round_input import warps_for
from qtool.runtime.kernels.triton.rounding import DTYPES, code_of, scale_of, through


@triton.jit
def _normed(x: tl.tensor, weight: tl.tensor, eps: tl.tensor, K: tl.constexpr) -> tl.tensor:
    """Of a row filled up with zeros."""
    mean = tl.sum(x * x, 0) / K
    return x * tl.div_rn(1.0, tl.sqrt_rn(mean + eps)) * weight


@triton.jit
def rms_norm_kernel(
    x_ptr: tl.tensor,  # [M, K]
    x_weight_ptr: tl.tensor,  # float32 [K] of a norm of x alone, or None
    stream_ptr: tl.tensor,  # float32 [M, K], gets the sum; or None
    weight_ptr: tl.tensor,  # float32 [K]
    static_ptr: tl.tensor,  # float32 [1], or None: scales follow from the rows
    out_ptr: tl.tensor,  # [M, K']
    scales_ptr: tl.tensor,  # float32 [SPANS, M], or None: not rounded
    eps: tl.tensor,
    K: tl.constexpr,
    PADDED: tl.constexpr,  # K'
    BLOCK: tl.constexpr,
    SPAN: tl.constexpr,  # columns that share a scale; BLOCK for one a row
    STEPS: tl.constexpr,
    IS_FLOAT: tl.constexpr,
    AS_VALUES: tl.constexpr,
    DTYPE: tl.constexpr,  # what the norm is in before it is rounded
) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < K
    x = tl.load(x_ptr + row * K + columns, mask=inside, other=0.0).to(tl.float32)
    if x_weight_ptr is not None:
        x = _normed(x, tl.load(x_weight_ptr + columns, mask=inside, other=0.0), eps, K)
    if stream_ptr is not None:
        x += tl.load(stream_ptr + row * K + columns, mask=inside, other=0.0)
        tl.store(stream_ptr + row * K + columns, x, mask=inside)
    y = _normed(x, tl.load(weight_ptr + columns, mask=inside, other=0.0), eps, K)
    if scales_ptr is not None:
        SPANS: tl.constexpr = BLOCK // SPAN
        spans = tl.reshape(through(y, DTYPE), (SPANS, SPAN))
        if static_ptr is not None:
            scales = tl.zeros((SPANS,), tl.float32) + tl.load(static_ptr)
        else:
            scales = scale_of(tl.max(tl.abs(spans), 1), STEPS)
        numbers = tl.arange(0, SPANS)
        scale_ptrs = scales_ptr + numbers * tl.num_programs(0) + row
        tl.store(scale_ptrs, scales, mask=numbers * SPAN < PADDED)
        codes = code_of(tl.div_rn(spans, scales[:, None]), IS_FLOAT, AS_VALUES)
        y = tl.reshape(codes, (BLOCK,))
    out_ptrs = out_ptr + row * PADDED + columns
    tl.store(out_ptrs, y.to(out_ptr.dtype.element_ty), mask=columns < PADDED)


@triton.jit
def _norm_head(
    x_ptr: tl.tensor,  # [D]
    weight_ptr: tl.tensor,  # float32 [D]
    out_ptr: tl.tensor,  # [D]
    eps: tl.tensor,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    columns = tl.arange(0, BLOCK)
    inside = columns < D
    x = tl.load(x_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    y = _normed(x, tl.load(weight_ptr + columns, mask=inside, other=0.0), eps, D)
    tl.store(out_ptr + columns, y.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def norm_heads_kernel(
    q_ptr: tl.tensor,  # [T, H, D]
    k_ptr: tl.tensor,  # [T, KV, D]
    q_weight_ptr: tl.tensor,  # float32 [D]
    k_weight_ptr: tl.tensor,  # float32 [D]
    q_out_ptr: tl.tensor,  # [T, H, D] contiguous
    k_out_ptr: tl.tensor,  # [T, KV, D] contiguous
    q_stride: tl.tensor,  # of a token
    k_stride: tl.tensor,
    eps: tl.tensor,
    H: tl.constexpr,
    KV: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if head < H:
        out_ptr = q_out_ptr + (token * H + head) * D
        _norm_head(q_ptr + token * q_stride + head * D, q_weight_ptr, out_ptr, eps, D, BLOCK)
    else:
        out_ptr = k_out_ptr + (token * KV + head - H) * D
        _norm_head(k_ptr + token * k_stride + (head - H) * D, k_weight_ptr, out_ptr, eps, D, BLOCK)


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    out: Tensor,
    stream: Tensor | None = None,
    x_weight: Tensor | None = None,
) -> None:
    """``out = norm(stream + x) * weight``.

    Args:
        x: [M, K] contiguous, any floating dtype.
        weight: float32 [K], with its offset added.
        out: [M, K] contiguous.
        stream: float32 [M, K] contiguous; becomes the sum.
        x_weight: float32 [K] of a norm that x goes through before it is added.
    """
    pointers = (x, x_weight, stream, weight, None, out, None, eps)
    constants = norm_constants(x.shape[1])
    rms_norm_kernel[(x.shape[0],)](*pointers, **constants, num_warps=warps_for(constants["BLOCK"]))


def rms_norm_rounded(
    x: Tensor,
    weight: Tensor,
    eps: float,
    scheme: ActivationScheme,
    columns: int,
    *,
    stream: Tensor | None = None,
    x_weight: Tensor | None = None,
    static: Tensor | None = None,
    as_values: torch.dtype | None = None,
    dtype: torch.dtype = torch.float32,
) -> RoundedRows:
    """The same, first in ``dtype``, then rounded to 8 bits; the other arguments are those of
    :func:`rms_norm` and :func:`.round_input.round_input`.
    """
    is_float, grouped = scheme.type == "float", scheme.strategy == "group"
    stored = as_values or (torch.uint8 if is_float else torch.int8)
    codes = torch.empty(x.shape[0], columns, dtype=stored, device=x.device)
    count = -(-columns // BLOCK_SIZE) if grouped else 1
    scales = torch.empty(count, x.shape[0], dtype=torch.float32, device=x.device)
    pointers = (x, x_weight, stream, weight, static, codes, scales, eps)
    constants = norm_constants(
        x.shape[1], columns, scheme, as_values=as_values is not None, dtype=dtype
    )
    rms_norm_kernel[(x.shape[0],)](*pointers, **constants, num_warps=warps_for(constants["BLOCK"]))
    if stored == torch.uint8:
        codes = codes.view(torch.float8_e4m3fn)
    return RoundedRows(codes, scales if grouped else scales[0])


def norm_constants(
    width: int,
    columns: int | None = None,
    scheme: ActivationScheme | None = None,
    *,
    as_values: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Mapping[str, Any]:
    """The kernel's compile-time parameters; rows are rounded where there is a scheme."""
    columns = columns or width
    block = triton.next_power_of_2(columns)
    grouped = scheme is not None and scheme.strategy == "group"
    return {
        "K": width,
        "PADDED": columns,
        "BLOCK": block,
        "SPAN": BLOCK_SIZE if grouped else block,
        "STEPS": 1.0 if scheme is None else scheme.steps,
        "IS_FLOAT": scheme is not None and scheme.type == "float",
        "AS_VALUES": as_values,
        "DTYPE": DTYPES[dtype],
    }


def norm_heads(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    eps: float,
    q_out: Tensor,
    k_out: Tensor,
) -> None:
    """Queries [T, H, D] and keys [T, KV, D], each head normed; heads of a token lie together.

    Args:
        q_weight, k_weight: float32 [D].
        q_out, k_out: contiguous, of the shapes of q and k.

    Raises:
        ValueError: heads that are apart.
    """
    (tokens, heads, width), kv_heads = q.shape, k.shape[1]
    if any(x.stride()[1:] != (width, 1) for x in (q, k)):
        raise ValueError(f"strides {q.stride()} and {k.stride()}: heads of a token lie together")
    block = triton.next_power_of_2(width)
    norm_heads_kernel[(tokens, heads + kv_heads)](
        q,
        k,
        q_weight,
        k_weight,
        q_out,
        k_out,
        q.stride(0),
        k.stride(0),
        eps,
        H=heads,
        KV=kv_heads,
        D=width,
        BLOCK=block,
        num_warps=1,
    )
