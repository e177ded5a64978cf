"""Sixteen-bit words of packed codes -> tiles of exact matrix operands, inside kernels.

A word holds as many codes as fit (*planes*), and plane p of a tile of K columns holds columns
``[p * K / planes, (p + 1) * K / planes)``: see :mod:`.layout`. A word is as wide as a matrix
operand, so the words lie in registers where the operands will, and unpacking moves nothing
between threads.

Every function has two bodies with the same bits. ``ASM`` is a handful of PTX instructions on
two words at a time; the other one is plain Triton, for AMD and for the interpreter, which has no
assembly. Integers become floats without a conversion: a code in the low mantissa bits of a
constant (1024, 64, 128) is that constant plus the code, and the constant plus the zero point
is subtracted, exactly. A conversion per weight would cap an A100 at 63% of its memory's speed.

``OPERAND`` is the dtype of the products: float16, bfloat16, or float32 where the interpreter
stands in for bfloat16, whose arithmetic it does not have.
"""

from __future__ import annotations

import triton
import triton.language as tl

# The PTX of each unpacking: outputs are the planes, lowest first, the input is two words.
# lop3 with 0xea is (a & b) | c.
INT4_FP16 = """{
    .reg .b32 t;
    shr.b32 t, $4, 8;
    lop3.b32 $0, $4, 0x000f000f, 0x64006400, 0xea;
    lop3.b32 $1, $4, 0x00f000f0, 0x54005400, 0xea;
    lop3.b32 $2, t, 0x000f000f, 0x64006400, 0xea;
    lop3.b32 $3, t, 0x00f000f0, 0x54005400, 0xea;
}"""
# bfloat16 has room for four bits above 128, at the bottom only. INT8 reads its nibbles so too.
NIBBLES_BF16 = """{
    .reg .b32 t;
    lop3.b32 $0, $4, 0x000f000f, 0x43004300, 0xea;
    shr.b32 t, $4, 4;
    lop3.b32 $1, t, 0x000f000f, 0x43004300, 0xea;
    shr.b32 t, $4, 8;
    lop3.b32 $2, t, 0x000f000f, 0x43004300, 0xea;
    shr.b32 t, $4, 12;
    lop3.b32 $3, t, 0x000f000f, 0x43004300, 0xea;
}"""
INT8_FP16 = """{
    prmt.b32 $0, $2, 0x64646464, 0x4240;
    prmt.b32 $1, $2, 0x64646464, 0x4341;
}"""
# a - b; sm_80 has no subtraction of bfloat16 pairs, only this.
SUBTRACT_BF16 = """{
    .reg .b32 minus;
    mov.b32 minus, 0xbf80bf80;
    fma.rn.bf16x2 $0, $2, minus, $1;
}"""
# a - 136, where the zero is 8 everywhere.
SUBTRACT_136_BF16 = """{
    .reg .b32 one, eight;
    mov.b32 one, 0x3f803f80;
    mov.b32 eight, 0xc308c308;
    fma.rn.bf16x2 $0, $1, one, eight;
}"""
# (high - 136) * 16 + (low - 128), for nibbles above 128: an unsigned byte minus 128.
JOIN_NIBBLES_BF16 = """{
    .reg .b32 one, high, low, bias, step;
    mov.b32 one, 0x3f803f80;
    mov.b32 bias, 0xc308c308;
    fma.rn.bf16x2 high, $2, one, bias;
    mov.b32 bias, 0xc300c300;
    fma.rn.bf16x2 low, $1, one, bias;
    mov.b32 step, 0x41804180;
    fma.rn.bf16x2 $0, high, step, low;
}"""
# The same with a tensor in the place of 136.
JOIN_NIBBLES_ABOVE_BF16 = """{
    .reg .b32 one, minus, high, low, bias, step;
    mov.b32 minus, 0xbf80bf80;
    fma.rn.bf16x2 high, $3, minus, $2;
    mov.b32 one, 0x3f803f80;
    mov.b32 bias, 0xc300c300;
    fma.rn.bf16x2 low, $1, one, bias;
    mov.b32 step, 0x41804180;
    fma.rn.bf16x2 $0, high, step, low;
}"""
# Sign, exponent and mantissa of e4m3 in float16's places: the value times 2**-8.
FP8_FP16 = """{
    .reg .b32 sign, rest;
    shl.b32 sign, $2, 1;
    shl.b32 rest, $2, 7;
    and.b32 rest, rest, 0x3f803f80;
    lop3.b32 $0, sign, 0x80008000, rest, 0xea;
    and.b32 $1, $2, 0xbf80bf80;
}"""
# The same in bfloat16's places, where it is the value times 2**-120, multiplied back.
FP8_BF16 = """{
    .reg .b32 sign, rest, factor, none;
    mov.b32 factor, 0x7b807b80;
    mov.b32 none, 0x80008000;
    shl.b32 sign, $2, 1;
    shl.b32 rest, $2, 4;
    and.b32 rest, rest, 0x07f007f0;
    lop3.b32 rest, sign, 0x80008000, rest, 0xea;
    fma.rn.bf16x2 $0, rest, factor, none;
    shr.b32 rest, $2, 3;
    and.b32 rest, rest, 0x07f007f0;
    lop3.b32 rest, $2, 0x80008000, rest, 0xea;
    fma.rn.bf16x2 $1, rest, factor, none;
}"""

_INT4_FP16 = tl.constexpr(INT4_FP16)
_NIBBLES_BF16 = tl.constexpr(NIBBLES_BF16)
_INT8_FP16 = tl.constexpr(INT8_FP16)
_SUBTRACT_BF16 = tl.constexpr(SUBTRACT_BF16)
_SUBTRACT_136_BF16 = tl.constexpr(SUBTRACT_136_BF16)
_JOIN_NIBBLES_BF16 = tl.constexpr(JOIN_NIBBLES_BF16)
_JOIN_NIBBLES_ABOVE_BF16 = tl.constexpr(JOIN_NIBBLES_ABOVE_BF16)
_FP8_FP16 = tl.constexpr(FP8_FP16)
_FP8_BF16 = tl.constexpr(FP8_BF16)

# What operands of FP8 weights are short of in float16; multiplied back once, in the epilogue.
FP8_FP16_FACTOR = 256.0


@triton.jit
def join_two(p0: tl.tensor, p1: tl.tensor) -> tl.tensor:
    """Planes [R, Q] side by side: [R, 2 * Q], without moving anything between threads."""
    return tl.reshape(tl.permute(tl.join(p0, p1), (0, 2, 1)), (p0.shape[0], 2 * p0.shape[1]))


@triton.jit
def join_four(p0: tl.tensor, p1: tl.tensor, p2: tl.tensor, p3: tl.tensor) -> tl.tensor:
    """Planes [R, Q] side by side: [R, 4 * Q].

    In this order of joins alone the compiler sees that nothing moves; others cost a conversion.
    """
    joined = tl.join(tl.join(p0, p2), tl.join(p1, p3))
    return tl.reshape(tl.permute(joined, (0, 2, 3, 1)), (p0.shape[0], 4 * p0.shape[1]))


@triton.jit
def as_float16(bits: tl.tensor) -> tl.tensor:
    """The float16 with these low sixteen bits."""
    return bits.to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def as_bfloat16(bits: tl.tensor) -> tl.tensor:
    """The bfloat16 with these low sixteen bits."""
    return bits.to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _above_128(
    plane: tl.tensor, offset: tl.tensor, ZERO: tl.constexpr, ASM: tl.constexpr
) -> tl.tensor:
    """A bfloat16 plane of ``128 + code`` less 128 and the zero."""
    if not ASM:
        return plane - offset
    if ZERO >= 0:
        tl.static_assert(ZERO == 8)
        return tl.inline_asm_elementwise(
            _SUBTRACT_136_BF16, "=r,r", [plane], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    offset = tl.broadcast_to(offset, plane.shape)
    return tl.inline_asm_elementwise(
        _SUBTRACT_BF16, "=r,r,r", [plane, offset], dtype=tl.bfloat16, is_pure=True, pack=2
    )


@triton.jit
def int4_planes(
    words: tl.tensor,
    zero: tl.tensor,
    ZERO: tl.constexpr,
    OPERAND: tl.constexpr,
    ASM: tl.constexpr,
) -> tl.tensor:
    """``code - zero`` of four-bit codes: words int16 [R, Q] -> four planes [R, Q].

    The zero is ``ZERO`` for all, or, where that is negative, zero int32 [R].
    """
    bits = words.to(tl.int32)
    if OPERAND == tl.float16:
        if ASM:
            p0, p1, p2, p3 = tl.inline_asm_elementwise(
                _INT4_FP16,
                "=r,=r,=r,=r,r",
                [words],
                dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
                is_pure=True,
                pack=2,
            )
        else:
            p0 = as_float16((bits & 0x0F) | 0x6400)
            p1 = as_float16((bits & 0xF0) | 0x5400)
            p2 = as_float16(((bits >> 8) & 0x0F) | 0x6400)
            p3 = as_float16(((bits >> 8) & 0xF0) | 0x5400)
        if ZERO >= 0:
            # Scalars: a tensor of constants would send all weights through shared memory.
            low: tl.constexpr = 1024.0 + ZERO
            high: tl.constexpr = 64.0 + ZERO
        else:
            low = as_float16(zero | 0x6400)[:, None]
            high = low - 960.0  # 64 + zero
        return p0 - low, p1 - high, p2 - low, p3 - high
    if OPERAND == tl.bfloat16:
        if ASM:
            p0, p1, p2, p3 = tl.inline_asm_elementwise(
                _NIBBLES_BF16,
                "=r,=r,=r,=r,r",
                [words],
                dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
                is_pure=True,
                pack=2,
            )
        else:
            p0 = as_bfloat16((bits & 0x0F) | 0x4300)
            p1 = as_bfloat16(((bits >> 4) & 0x0F) | 0x4300)
            p2 = as_bfloat16(((bits >> 8) & 0x0F) | 0x4300)
            p3 = as_bfloat16(((bits >> 12) & 0x0F) | 0x4300)
        above = as_bfloat16(zero | 0x4300)[:, None]
        return (
            _above_128(p0, above, ZERO, ASM),
            _above_128(p1, above, ZERO, ASM),
            _above_128(p2, above, ZERO, ASM),
            _above_128(p3, above, ZERO, ASM),
        )
    offset = ZERO if ZERO >= 0 else zero[:, None]
    return (
        ((bits & 0xF) - offset).to(OPERAND),
        (((bits >> 4) & 0xF) - offset).to(OPERAND),
        (((bits >> 8) & 0xF) - offset).to(OPERAND),
        (((bits >> 12) & 0xF) - offset).to(OPERAND),
    )


@triton.jit
def int8_planes(
    words: tl.tensor,
    zero: tl.tensor,
    ZERO: tl.constexpr,
    OPERAND: tl.constexpr,
    ASM: tl.constexpr,
) -> tl.tensor:
    """``code - 16 * zero`` of unsigned bytes: words int16 [R, Q] -> two planes [R, Q].

    The zero, in sixteens, is ``ZERO`` for all, or, where that is negative, zero int32 [R].
    """
    bits = words.to(tl.int32)
    if OPERAND == tl.float16:
        if ASM:
            p0, p1 = tl.inline_asm_elementwise(
                _INT8_FP16,
                "=r,=r,r",
                [words],
                dtype=(tl.float16, tl.float16),
                is_pure=True,
                pack=2,
            )
        else:
            p0 = as_float16((bits & 0xFF) | 0x6400)
            p1 = as_float16(((bits >> 8) & 0xFF) | 0x6400)
        if ZERO >= 0:
            offset: tl.constexpr = 1024.0 + 16 * ZERO
        else:
            offset = as_float16((zero << 4) | 0x6400)[:, None]
        return p0 - offset, p1 - offset
    if OPERAND == tl.bfloat16 and ASM:
        # bfloat16 has eight bits, and 256 + code needs nine: nibbles, put together again.
        n0, n1, n2, n3 = tl.inline_asm_elementwise(
            _NIBBLES_BF16,
            "=r,=r,=r,=r,r",
            [words],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
        above = as_bfloat16(zero | 0x4300)[:, None]
        return _join_nibbles(n0, n1, above, ZERO), _join_nibbles(n2, n3, above, ZERO)
    # In float32, 8388608 + code is exact; their difference is so in bfloat16 too.
    base = (zero * 16 + 0x4B000000).to(tl.float32, bitcast=True)[:, None]
    p0 = ((bits & 0xFF) | 0x4B000000).to(tl.float32, bitcast=True) - base
    p1 = (((bits >> 8) & 0xFF) | 0x4B000000).to(tl.float32, bitcast=True) - base
    return p0.to(OPERAND), p1.to(OPERAND)


@triton.jit
def _join_nibbles(
    low: tl.tensor, high: tl.tensor, above: tl.tensor, ZERO: tl.constexpr
) -> tl.tensor:
    """bfloat16 planes of ``128 + nibble`` -> ``16 * (high - zero) + low``."""
    if ZERO >= 0:
        tl.static_assert(ZERO == 8)
        return tl.inline_asm_elementwise(
            _JOIN_NIBBLES_BF16, "=r,r,r", [low, high], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    return tl.inline_asm_elementwise(
        _JOIN_NIBBLES_ABOVE_BF16,
        "=r,r,r,r",
        [low, high, tl.broadcast_to(above, low.shape)],
        dtype=tl.bfloat16,
        is_pure=True,
        pack=2,
    )


@triton.jit
def fp8_planes(words: tl.tensor, OPERAND: tl.constexpr, ASM: tl.constexpr) -> tl.tensor:
    """e4m3 values: words int16 [R, Q] -> two planes [R, Q]; in float16 divided by 256.

    Software, because GPUs below sm_89 know nothing of e4m3; placed as they are, the bits cost no
    more than the conversion instructions of those that do. Subnormals are exact.
    """
    bits = words.to(tl.int32)
    if OPERAND == tl.float16:
        if ASM:
            p0, p1 = tl.inline_asm_elementwise(
                _FP8_FP16, "=r,=r,r", [words], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
            )
        else:
            p0 = as_float16(((bits << 1) & 0x8000) | ((bits << 7) & 0x3F80))
            p1 = as_float16(bits & 0xBF80)
        return p0, p1
    if OPERAND == tl.bfloat16 and ASM:
        p0, p1 = tl.inline_asm_elementwise(
            _FP8_BF16, "=r,=r,r", [words], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2
        )
        return p0, p1
    # In float32's places the value is short of 2**120.
    b0 = ((bits << 17) & -0x80000000) | ((bits << 20) & 0x07F00000)
    b1 = ((bits << 16) & -0x80000000) | ((bits << 13) & 0x07F00000)
    p0 = b0.to(tl.float32, bitcast=True) * 1.329227995784916e36
    p1 = b1.to(tl.float32, bitcast=True) * 1.329227995784916e36
    return p0.to(OPERAND), p1.to(OPERAND)


@triton.jit
def unpack_int4(
    words: tl.tensor,
    zero: tl.tensor,
    ZERO: tl.constexpr,
    OPERAND: tl.constexpr,
    ASM: tl.constexpr,
) -> tl.tensor:
    """:func:`int4_planes` side by side, [R, 4 * Q]."""
    p0, p1, p2, p3 = int4_planes(words, zero, ZERO, OPERAND, ASM)
    return join_four(p0, p1, p2, p3)


@triton.jit
def unpack_int8(
    words: tl.tensor,
    zero: tl.tensor,
    ZERO: tl.constexpr,
    OPERAND: tl.constexpr,
    ASM: tl.constexpr,
) -> tl.tensor:
    """:func:`int8_planes` side by side, [R, 2 * Q]."""
    p0, p1 = int8_planes(words, zero, ZERO, OPERAND, ASM)
    return join_two(p0, p1)


@triton.jit
def unpack_fp8(words: tl.tensor, OPERAND: tl.constexpr, ASM: tl.constexpr) -> tl.tensor:
    """:func:`fp8_planes` side by side, [R, 2 * Q]."""
    p0, p1 = fp8_planes(words, OPERAND, ASM)
    return join_two(p0, p1)
