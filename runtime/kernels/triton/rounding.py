"""Values to 8 bits inside kernels, as :mod:`qtool.formats.activations` rounds them, to the bit.

Rounding to e4m3 is integer arithmetic: GPUs below sm_89 have no conversion, and one rule for
all of them is worth more here, where memory decides, than an instruction.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

DTYPES = {
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
}
# Adding and taking it away rounds to the nearest integer, ties to even, below 2**22.
_ROUNDER = tl.constexpr(12582912.0)


@triton.jit
def scale_of(peak: tl.tensor, STEPS: tl.constexpr) -> tl.tensor:
    """A scale for the largest magnitude of a span; 1 where all is 0."""
    return tl.where(peak > 0, tl.div_rn(peak, STEPS), 1.0)


@triton.jit
def int8_code(steps: tl.tensor) -> tl.tensor:
    """float32 in units of the scale -> the nearest of -128 .. 127, as float32."""
    return (tl.clamp(steps, -128.0, 127.0) + _ROUNDER) - _ROUNDER


@triton.jit
def e4m3_bits(steps: tl.tensor) -> tl.tensor:
    """float32 in units of the scale -> bits of the nearest e4m3, ties to even, as int32.

    Beyond 448 it saturates; e4m3fn has no infinity.
    """
    bits = tl.clamp(steps, -448.0, 448.0).to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    # 20 of 23 mantissa bits go; the exponent's bias falls from 127 to 7.
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2**-6 codes count units of 2**-9: the low bits of their sum with 2**23.
    small = size.to(tl.float32, bitcast=True) * 512.0 + 8388608.0
    subnormal = small.to(tl.int32, bitcast=True) & 0xF
    code = tl.where(size < 0x3C800000, subnormal, normal)
    return code | ((bits >> 24) & 0x80)


@triton.jit
def e4m3_value(bits: tl.tensor) -> tl.tensor:
    """float32 value of e4m3 bits (int32)."""
    placed = ((bits & 0x80) << 24) | ((bits & 0x7F) << 20)
    return placed.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2**120


@triton.jit
def code_of(steps: tl.tensor, IS_FLOAT: tl.constexpr, AS_VALUES: tl.constexpr) -> tl.tensor:
    """float32 in units of the scale -> values of INT8 or e4m3 as float32, or e4m3's bits."""
    if not IS_FLOAT:
        codes = int8_code(steps)
    elif AS_VALUES:
        codes = e4m3_value(e4m3_bits(steps))
    else:
        codes = e4m3_bits(steps)
    return codes


@triton.jit
def through(x: tl.tensor, DTYPE: tl.constexpr) -> tl.tensor:
    """float32 values as they are after a trip through a dtype, ties to even.

    bfloat16 by integers, because the interpreter would cut bits off.
    """
    if DTYPE == tl.float16:
        x = x.to(tl.float16).to(tl.float32)
    if DTYPE == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
        x = tl.where(x == x, bits.to(tl.float32, bitcast=True), x)
    return x
