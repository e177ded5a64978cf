"""Unpacking words: the assembly, emulated for every word there is, gives exact weights."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from support.ptx import Register, bf16_value, run_ptx

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

from qtool.runtime.kernels.triton import planes  # noqa: E402
from qtool.runtime.kernels.triton.layout import Codes, _from_words  # noqa: E402

# Both halves of a register hold every word: the second in another order.
WORDS = np.arange(65536, dtype=np.uint32)
OTHERS = np.roll(WORDS, 12345)
REGISTER = WORDS | OTHERS << np.uint32(16)
Floats = NDArray[np.float64]


def _fp16(bits: Register) -> Floats:
    return bits.astype(np.uint16).view(np.float16).astype(np.float64)


def _halves(register: Register, value: Callable[[Register], Floats]) -> tuple[Floats, Floats]:
    return value(register & np.uint32(0xFFFF)), value(register >> np.uint32(16))


def _codes(words: Register, kind: Codes) -> torch.Tensor:
    """[planes, 65536] codes by the layout's own inverse."""
    signed = torch.from_numpy(words.astype(np.uint16).view(np.int16).copy())
    return _from_words(signed[:, None], kind).T.contiguous()


def _assert_planes(registers: list[Register], value: Callable, expected: Callable) -> None:
    """Each output register holds a plane of both words."""
    for half, words in enumerate((WORDS, OTHERS)):
        for plane, register in enumerate(registers):
            found = _halves(register, value)[half]
            assert np.array_equal(found, expected(words)[plane]), f"plane {plane}, half {half}"


def test_int4_in_float16_is_a_constant_plus_the_code() -> None:
    registers = run_ptx(planes.INT4_FP16, 4, [REGISTER])
    base = np.array([1024, 64, 1024, 64])[:, None]
    _assert_planes(registers, _fp16, lambda w: _scaled(w) + base)


def _scaled(words: Register) -> Floats:
    """Codes; those of odd planes stand 4 bits up, where 64 has its units."""
    return _codes(words, Codes.INT4).numpy().astype(np.float64)


def test_int4_minus_any_zero_is_exact_in_float16() -> None:
    for zero in range(16):
        for code in range(16):
            low = np.float16(1024 + code) - np.float16(1024 + zero)
            high = np.float16(64 + code) - np.float16(np.float16(1024 + zero) - np.float16(960))
            assert low == high == code - zero


def test_int4_in_bfloat16_is_128_plus_the_code_and_loses_its_zero() -> None:
    registers = run_ptx(planes.NIBBLES_BF16, 4, [REGISTER])
    _assert_planes(registers, bf16_value, lambda w: _scaled(w) + 128)
    for zero in range(16):
        above = np.full_like(REGISTER, 0x43004300 | zero << 16 | zero)
        less = [run_ptx(planes.SUBTRACT_BF16, 1, [r, above])[0] for r in registers]
        _assert_planes(less, bf16_value, lambda w, z=zero: _scaled(w) - z)
    less = [run_ptx(planes.SUBTRACT_136_BF16, 1, [r])[0] for r in registers]
    _assert_planes(less, bf16_value, lambda w: _scaled(w) - 8)


def _bytes(words: Register) -> Floats:
    return _codes(words, Codes.INT8).numpy().astype(np.float64)


def test_int8_in_float16_is_1024_plus_the_byte() -> None:
    registers = run_ptx(planes.INT8_FP16, 2, [REGISTER])
    _assert_planes(registers, _fp16, lambda w: _bytes(w) + 1024)


def test_int8_in_bfloat16_is_put_together_from_nibbles_exactly() -> None:
    low0, high0, low1, high1 = run_ptx(planes.NIBBLES_BF16, 4, [REGISTER])
    pairs = ((low0, high0), (low1, high1))
    joined = [run_ptx(planes.JOIN_NIBBLES_BF16, 1, list(pair))[0] for pair in pairs]
    _assert_planes(joined, bf16_value, lambda w: _bytes(w) - 128)
    above = np.full_like(REGISTER, 0x43084308)
    text = planes.JOIN_NIBBLES_ABOVE_BF16
    joined = [run_ptx(text, 1, [*pair, above])[0] for pair in pairs]
    _assert_planes(joined, bf16_value, lambda w: _bytes(w) - 128)


def _e4m3(words: Register) -> Floats:
    """NaN decodes to what its bits would mean, 480; the layout refuses to pack it."""
    values = _codes(words, Codes.FP8).view(torch.float8_e4m3fn).double()
    return torch.where(values.isnan(), 480.0, values).numpy()


@pytest.mark.parametrize(
    ("text", "value", "factor"),
    [(planes.FP8_FP16, _fp16, planes.FP8_FP16_FACTOR), (planes.FP8_BF16, bf16_value, 1.0)],
    ids=["float16", "bfloat16"],
)
def test_fp8_is_exact_subnormals_included(
    text: str, value: Callable[[Register], Floats], factor: float
) -> None:
    registers = run_ptx(text, 2, [REGISTER])
    for half, words in enumerate((WORDS, OTHERS)):
        expected = _e4m3(words)
        for plane, register in enumerate(registers):
            found = _halves(register, value)[half] * factor
            real = np.abs(expected[plane]) < 480
            assert np.array_equal(found[real], expected[plane][real])
            assert (np.abs(found[~real]) == 480).all()


@triton.jit
def _unpack_all(words_ptr, zeros_ptr, out_ptr, CODES: tl.constexpr, OPERAND: tl.constexpr):
    rows = tl.program_id(0) * 256 + tl.arange(0, 256)
    words = tl.load(words_ptr + rows)[:, None]
    zero = tl.load(zeros_ptr + rows)
    if CODES == "int4":
        weights = planes.unpack_int4(words, zero, -1, OPERAND, False)
    elif CODES == "int8":
        weights = planes.unpack_int8(words, zero, -1, OPERAND, False)
    else:
        weights = planes.unpack_fp8(words, OPERAND, False)
    count: tl.constexpr = weights.shape[1]
    offsets = rows[:, None] * count + tl.arange(0, count)[None, :]
    tl.store(out_ptr + offsets, weights.to(tl.float32))


@pytest.mark.parametrize("operand", [tl.float16, tl.float32], ids=str)
@pytest.mark.parametrize("kind", [Codes.INT4, Codes.INT8, Codes.FP8])
def test_the_plain_path_gives_the_same_weights_for_every_word(
    kind: Codes, operand: tl.dtype
) -> None:
    words = torch.from_numpy(WORDS.astype(np.uint16).view(np.int16).copy())
    zeros = torch.arange(65536, dtype=torch.int32) * 7 % 16
    out = torch.empty(65536, kind.planes)
    _unpack_all[(256,)](words, zeros, out, kind.value, operand)
    codes = _codes(WORDS, kind).T
    if kind is Codes.FP8:
        expected = torch.from_numpy(_e4m3(WORDS)).T.float()
        factor = planes.FP8_FP16_FACTOR if operand == tl.float16 else 1.0
        real = expected.abs() < 480
        assert torch.equal(out[real] * factor, expected[real])
    else:
        unit = kind.zero_unit
        assert torch.equal(out, codes.float() - unit * zeros[:, None])
