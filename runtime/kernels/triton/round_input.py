"""Activations to 8 bits, with a scale a token, a token and 128 columns, or the checkpoint's.

Contract: :func:`qtool.formats.activations.round_input`, to the bit; it says the arithmetic. A
gate and its up projection are gated first, as :mod:`.gated` does and through the dtype that it
would store: the bits are those of one after the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

import torch
import triton
import triton.language as tl
from torch import Tensor

from qtool.formats.scheme import BLOCK_SIZE, ActivationScheme
from qtool.runtime.kernels.backend import RoundedRows
from qtool.runtime.kernels.triton.gated import gated_product
from qtool.runtime.kernels.triton.rounding import DTYPES, code_of, scale_of, through

# What a pair of gate and up projection may be gated with here.
Gate: TypeAlias = Literal["silu", "gelu"]
# Columns of a row that is gated and rounded by one program. A wider one has two launches: 64
# values of each operand a thread do not fit in its registers.
MAX_GATED = 16384


@triton.jit
def round_input_kernel(
    x_ptr: tl.tensor,  # [M, K]; [M, 2 * K] where gated
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
    GATE: tl.constexpr,  # "silu", "gelu", or None
    DTYPE: tl.constexpr,  # what the gated product is in before it is rounded
) -> None:
    token, span = tl.program_id(0), tl.program_id(1)
    within = tl.arange(0, BLOCK)
    columns = span * SPAN + within
    inside = (within < SPAN) & (columns < PADDED)
    row = token.to(tl.int64)
    there = inside & (columns < K)
    x_ptrs = x_ptr + row * (K if GATE is None else 2 * K) + columns
    x = tl.load(x_ptrs, mask=there, other=0.0).to(tl.float32)
    if GATE is not None:
        up = tl.load(x_ptrs + K, mask=there, other=0.0).to(tl.float32)
        x = through(gated_product(x, up, GATE == "gelu"), DTYPE)
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
    gate: Gate | None = None,
) -> RoundedRows:
    """Round x [M, K], or what a gate and its up projection, x [M, 2 * K], give together.

    Args:
        x: contiguous, any floating dtype.
        scheme: INT8 or e4m3, and what shares a scale.
        columns: K' >= K; what is added is 0.
        static: the checkpoint's scale, float32 [1].
        as_values: store values of e4m3 in this dtype, for GPUs that do not multiply e4m3.
        gate: of the pair; without one x is rounded as it is.
    """
    is_float, grouped = scheme.type == "float", scheme.strategy == "group"
    tokens, width = x.shape[0], x.shape[1] if gate is None else x.shape[1] // 2
    stored = as_values or (torch.uint8 if is_float else torch.int8)
    codes = torch.empty(tokens, columns, dtype=stored, device=x.device)
    chosen = constants(columns, scheme, as_values=as_values is not None, gate=gate, dtype=x.dtype)
    count = -(-columns // chosen["SPAN"])
    scales = torch.empty(count, tokens, dtype=torch.float32, device=x.device)
    warps = warps_for(chosen["BLOCK"])
    round_input_kernel[(tokens, count)](x, static, codes, scales, width, **chosen, num_warps=warps)
    if stored == torch.uint8:
        codes = codes.view(torch.float8_e4m3fn)
    return RoundedRows(codes, scales if grouped else scales[0])


def constants(
    columns: int,
    scheme: ActivationScheme,
    *,
    as_values: bool = False,
    gate: Gate | None = None,
    dtype: torch.dtype = torch.float32,
) -> Mapping[str, Any]:
    """The kernel's compile-time parameters."""
    span = BLOCK_SIZE if scheme.strategy == "group" else columns
    return {
        "PADDED": columns,
        "SPAN": span,
        "BLOCK": triton.next_power_of_2(span),
        "STEPS": scheme.steps,
        "IS_FLOAT": scheme.type == "float",
        "AS_VALUES": as_values,
        "GATE": gate,
        "DTYPE": None if gate is None else DTYPES[dtype],
    }


def warps_for(block: int) -> int:
    """Warps of a program that holds a row of ``block`` values: 16 a thread, at most 16 warps."""
    return max(1, min(16, block // 512))
