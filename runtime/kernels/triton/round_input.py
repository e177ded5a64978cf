"""Activations to 8 bits, with a scale a token, a token and 128 columns, or the checkpoint's.

Contract: :func:`qtool.formats.activations.round_input`, to the bit; it says the arithmetic.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from qtool.formats.scheme import BLOCK_SIZE, ActivationScheme
from qtool.runtime.kernels.backend import RoundedRows
from qtool.runtime.kernels.triton.rounding import code_of, scale_of


@triton.jit
def round_input_kernel(
    x_ptr: tl.tensor,  # [M, K]
    static_ptr: tl.tensor,  # float32 [1], or None
    codes_ptr: tl.tensor,  # [M, K']: int8, bits of e4m3 as uint8, or values of e4m3
    scales_ptr: tl.tensor,  # float32 [M], or [K' / SPAN, M] where several spans make a row
    K: tl.tensor,
    PADDED: tl.constexpr,  # K'
    SPAN: tl.constexpr,  # columns that share a scale
    BLOCK: tl.constexpr,  # SPAN, rounded up to a power of two
    STEPS: tl.constexpr,
    IS_FLOAT: tl.constexpr,
    AS_VALUES: tl.constexpr,
) -> None:
    token, span = tl.program_id(0), tl.program_id(1)
    within = tl.arange(0, BLOCK)
    columns = span * SPAN + within
    inside = (within < SPAN) & (columns < PADDED)
    row = token.to(tl.int64)
    x = tl.load(x_ptr + row * K + columns, mask=inside & (columns < K), other=0.0).to(tl.float32)
    if static_ptr is not None:
        scale = tl.load(static_ptr)
    else:
        scale = scale_of(tl.max(tl.abs(x), 0), STEPS)
    codes = code_of(tl.div_rn(x, scale), IS_FLOAT, AS_VALUES)
    codes_ptrs = codes_ptr + row * PADDED + columns
    tl.store(codes_ptrs, codes.to(codes_ptr.dtype.element_ty), mask=inside)
    tl.store(scales_ptr + span * tl.num_programs(0) + token, scale)


def round_input(
    x: Tensor,
    scheme: ActivationScheme,
    columns: int,
    *,
    static: Tensor | None = None,
    as_values: torch.dtype | None = None,
) -> RoundedRows:
    """Round x [M, K].

    Args:
        x: contiguous, any floating dtype.
        scheme: INT8 or e4m3, and what shares a scale.
        columns: K' >= K; what is added is 0.
        static: the checkpoint's scale, float32 [1].
        as_values: store values of e4m3 in this dtype, for GPUs that do not multiply e4m3.
    """
    is_float, grouped = scheme.type == "float", scheme.strategy == "group"
    tokens = x.shape[0]
    stored = as_values or (torch.uint8 if is_float else torch.int8)
    codes = torch.empty(tokens, columns, dtype=stored, device=x.device)
    span = BLOCK_SIZE if grouped else columns
    count = -(-columns // span)
    scales = torch.empty(count, tokens, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(span)
    round_input_kernel[(tokens, count)](
        x,
        static,
        codes,
        scales,
        x.shape[1],
        PADDED=columns,
        SPAN=span,
        BLOCK=block,
        STEPS=scheme.steps,
        IS_FLOAT=is_float,
        AS_VALUES=as_values is not None,
        num_warps=warps_for(block),
    )
    if stored == torch.uint8:
        codes = codes.view(torch.float8_e4m3fn)
    return RoundedRows(codes, scales if grouped else scales[0])


def warps_for(block: int) -> int:
    """Warps of a program that holds a row of ``block`` values: 16 a thread, at most 16 warps."""
    return max(1, min(16, block // 512))
