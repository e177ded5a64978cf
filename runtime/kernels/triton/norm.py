"""RMSNorm (Zhang & Sennrich 2019, section 3), with what stands beside it in a decoder.

Contract: ``x = x + residual`` where there is one, kept for the next layer; then
``x / sqrt(mean(x**2) + eps) * weight`` in float32, stored in the output's dtype, or rounded to
8 bits as :mod:`.round_input` does, without a trip through memory. Norms of queries and keys are
the same kernel over rows of a head. Gains of ``1 + weight`` are added up at load.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from qtool.formats.scheme import ActivationScheme
from qtool.runtime.kernels.triton.round_input import RoundedInput, warps_for
from qtool.runtime.kernels.triton.rounding import e4m3_bits, e4m3_value, int8_code, scale_of


@triton.jit
def rms_norm_kernel(
    x_ptr: tl.tensor,  # [M, K]
    residual_ptr: tl.tensor,  # float32 [M, K], gets the sum; or None
    weight_ptr: tl.tensor,  # float32 [K]
    out_ptr: tl.tensor,  # [M, K']
    scales_ptr: tl.tensor,  # float32 [M], or None: not rounded
    eps: tl.tensor,
    K: tl.constexpr,
    PADDED: tl.constexpr,  # K'
    BLOCK: tl.constexpr,
    STEPS: tl.constexpr,
    IS_FLOAT: tl.constexpr,
    AS_VALUES: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < K
    x = tl.load(x_ptr + row * K + columns, mask=inside, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        x += tl.load(residual_ptr + row * K + columns, mask=inside, other=0.0)
        tl.store(residual_ptr + row * K + columns, x, mask=inside)
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0)
    mean = tl.sum(x * x, 0) / K
    y = x * tl.div_rn(1.0, tl.sqrt_rn(mean + eps)) * weight
    if scales_ptr is not None:
        scale = scale_of(tl.max(tl.abs(y), 0), STEPS)
        tl.store(scales_ptr + row, scale)
        steps = tl.div_rn(y, scale)
        if IS_FLOAT:
            bits = e4m3_bits(steps)
            codes = e4m3_value(bits) if AS_VALUES else bits
        else:
            codes = int8_code(steps)
        y = codes
    out_ptrs = out_ptr + row * PADDED + columns
    tl.store(out_ptrs, y.to(out_ptr.dtype.element_ty), mask=columns < PADDED)


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, out: Tensor, residual: Tensor | None = None
) -> None:
    """``out = norm(x + residual) * weight``.

    Args:
        x: [M, K] contiguous, any floating dtype.
        weight: float32 [K], with its offset added.
        out: [M, K] contiguous.
        residual: float32 [M, K] contiguous; becomes ``x + residual``.
    """
    block = triton.next_power_of_2(x.shape[1])
    rms_norm_kernel[(x.shape[0],)](
        x,
        residual,
        weight,
        out,
        None,
        eps,
        K=x.shape[1],
        PADDED=x.shape[1],
        BLOCK=block,
        STEPS=1.0,
        IS_FLOAT=False,
        AS_VALUES=False,
        num_warps=warps_for(block),
    )


def rms_norm_rounded(
    x: Tensor,
    weight: Tensor,
    eps: float,
    scheme: ActivationScheme,
    columns: int,
    *,
    residual: Tensor | None = None,
    as_values: torch.dtype | None = None,
) -> RoundedInput:
    """The same, rounded to 8 bits with a scale a token; the other arguments are those of
    :func:`rms_norm` and :func:`.round_input.round_input`.
    """
    is_float = scheme.type == "float"
    stored = as_values or (torch.uint8 if is_float else torch.int8)
    codes = torch.empty(x.shape[0], columns, dtype=stored, device=x.device)
    scales = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(columns)
    rms_norm_kernel[(x.shape[0],)](
        x,
        residual,
        weight,
        codes,
        scales,
        eps,
        K=x.shape[1],
        PADDED=columns,
        BLOCK=block,
        STEPS=scheme.steps,
        IS_FLOAT=is_float,
        AS_VALUES=as_values is not None,
        num_warps=warps_for(block),
    )
    if stored == torch.uint8:
        codes = codes.view(torch.float8_e4m3fn)
    return RoundedInput(codes, scales)
