"""The few PTX instructions that kernels are written in, on numpy arrays of 32-bit registers.

Emulation reads the very text that the compiler gets, so the two cannot drift apart.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Register = NDArray[np.uint32]


def run_ptx(text: str, num_outputs: int, inputs: Sequence[Register]) -> list[Register]:
    """Outputs ``$0 ..`` of an inline assembly; inputs follow them in its numbering."""
    names = {f"${num_outputs + i}": value for i, value in enumerate(inputs)}
    registers: dict[str, Register] = dict(names)
    for statement in re.sub(r"[{}]", "", text).split(";"):
        words = statement.replace(",", " ").split()
        if words and not words[0].startswith(".reg"):
            registers[words[1]] = _execute(words[0], [_value(w, registers) for w in words[2:]])
    return [registers[f"${i}"] for i in range(num_outputs)]


def _value(word: str, registers: dict[str, Register]) -> Register:
    if word in registers:
        return registers[word]
    return np.array(int(word, 0), dtype=np.uint32)


def _execute(name: str, args: list[Register]) -> Register:
    if name == "mov.b32":
        return args[0]
    if name == "and.b32":
        return args[0] & args[1]
    if name == "shl.b32":
        return args[0] << args[1]
    if name == "shr.b32":
        return args[0] >> args[1]
    if name == "lop3.b32":
        return _lop3(*args)
    if name == "prmt.b32":
        return _prmt(*args)
    if name == "fma.rn.bf16x2":
        return _fma_bf16x2(*args)
    raise NotImplementedError(f"{name}: not among the instructions that kernels use")


def _lop3(a: Register, b: Register, c: Register, table: Register) -> Register:
    """Bit i of the result is entry ``4 a + 2 b + c`` of the table (PTX ISA, lop3)."""
    out = np.zeros(np.broadcast_shapes(a.shape, b.shape, c.shape), dtype=np.uint32)
    for entry in range(8):
        if int(table) >> entry & 1:
            match = (a if entry & 4 else ~a) & (b if entry & 2 else ~b) & (c if entry & 1 else ~c)
            out |= match
    return out


def _prmt(a: Register, b: Register, selector: Register) -> Register:
    """Byte i of the result is byte ``selector[i]`` of b:a (PTX ISA, prmt, default mode)."""
    both = [a >> np.uint32(8 * i) & np.uint32(0xFF) for i in range(4)]
    both += [b >> np.uint32(8 * i) & np.uint32(0xFF) for i in range(4)]
    out = np.zeros(np.broadcast_shapes(a.shape, b.shape), dtype=np.uint32)
    for i in range(4):
        choice = int(selector) >> 4 * i & 0xF
        assert choice < 8, "sign replication is not emulated"
        out = out | both[choice] << np.uint32(8 * i)
    return out


def _fma_bf16x2(a: Register, b: Register, c: Register) -> Register:
    """Each half ``a * b + c``, rounded once to nearest even."""
    halves = []
    for shift in (0, 16):
        x, y, z = (bf16_value(v >> np.uint32(shift)) for v in (a, b, c))
        halves.append(_round_bf16(x * y + z))
    return halves[0] | halves[1] << np.uint32(16)


def bf16_value(bits: Register) -> NDArray[np.float64]:
    """Float64 values of the low sixteen bits."""
    return (bits << np.uint32(16)).view(np.float32).astype(np.float64)


def _round_bf16(value: NDArray[np.float64]) -> Register:
    """Products and sums of bfloat16 here are exact in float64, and in float32's 24 bits."""
    narrow = value.astype(np.float32)
    assert (narrow.astype(np.float64) == value).all(), "the emulation would round twice"
    bits = narrow.view(np.uint32)
    carry = np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))
    return (bits + carry) >> np.uint32(16)
