"""What a kernel's machine code says about its speed: counted, not timed.

NVIDIA's code is read with the ``cuobjdump`` that Triton's wheel carries, AMD's is text.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import triton

from qtool.runtime.kernels.triton.aot import Compiled

# 0230:   @P0 HMMA.16816.F32 R4, R8, R12, R4 ;
_SASS_LINE = re.compile(r"^\s*/\*([0-9a-f]{4,6})\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9_.]+)(.*);")
_JUMP_TARGET = re.compile(r"0x([0-9a-f]+)\s*$")
_AMD_INSTRUCTION = re.compile(r"^\s+([a-z][a-z0-9_]+)\b(.*)$")
_AMD_LABEL = re.compile(r"^(\.\w+):")

MATRIX = re.compile(r"(HMMA|IMMA|QMMA|HGMMA|IGMMA|QGMMA|UTC[A-Z]*MMA|v_mfma|v_smfmac)")
# Integers made floats one by one: a quarter or an eighth of the usual rate.
INT_TO_FLOAT = re.compile(r"^(I2F|I2FP|v_cvt_f\d+_[iu]\d+)")
# How a layout conversion shows: through shared memory, or between lanes.
EXCHANGE = re.compile(r"^(STS|SHFL|STSM)")


@dataclass(frozen=True, slots=True)
class Instruction:
    """One line of machine code."""

    address: int
    name: str  # with its suffixes: LDGSTS.E.BYPASS.128
    operands: str


@dataclass(frozen=True, slots=True)
class MachineCode:
    """A kernel's code in figures.

    Attributes:
        registers: a thread.
        stack: bytes of a thread; spilled registers live there.
        shared: bytes a program.
        matrix: names of matrix instructions, without suffixes.
        loop: names of the main loop's instructions: the one with most matrix instructions.
    """

    registers: int
    stack: int
    shared: int
    matrix: frozenset[str]
    loop: tuple[str, ...]

    def count(self, pattern: re.Pattern[str]) -> int:
        """Instructions of the main loop that match."""
        return sum(1 for name in self.loop if pattern.search(name))

    @property
    def histogram(self) -> Counter[str]:
        """The main loop by instruction, without suffixes."""
        return Counter(name.split(".")[0] for name in self.loop)


def read_code(compiled: Compiled) -> MachineCode:
    """Take a compiled kernel apart."""
    if compiled.cubin is not None:
        return _read_cubin(compiled.cubin, compiled.shared)
    assert compiled.assembly is not None
    return _read_amd(compiled.assembly, compiled.shared)


def _read_cubin(cubin: bytes, shared: int) -> MachineCode:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage, listing = _dump(file.name, "-res-usage"), _dump(file.name, "-sass")
    instructions = parse_sass(listing)
    registers, stack = (_number(rf"{key}:(\d+)", usage) for key in ("REG", "STACK"))
    return _summary(instructions, registers, stack, shared, sass_loops(instructions))


def _dump(path: str, what: str) -> str:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    done = subprocess.run([tool, what, path], capture_output=True, text=True, check=True)
    return done.stdout


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    if found is None:
        raise ValueError(f"no {pattern!r} in what the tools say of a kernel")
    return int(found[1])


def parse_sass(listing: str) -> list[Instruction]:
    """Instructions of a cuobjdump listing."""
    matches = (_SASS_LINE.match(line) for line in listing.splitlines())
    return [Instruction(int(m[1], 16), m[2], m[3]) for m in matches if m is not None]


def sass_loops(instructions: list[Instruction]) -> list[list[Instruction]]:
    """Bodies of all loops: from where a jump backwards leads up to the jump."""
    loops = []
    for jump in instructions:
        target = _JUMP_TARGET.search(jump.operands.strip())
        if jump.name.startswith("BRA") and target and int(target[1], 16) < jump.address:
            first = int(target[1], 16)
            loops.append([i for i in instructions if first <= i.address <= jump.address])
    return loops


def _summary(
    instructions: list[Instruction],
    registers: int,
    stack: int,
    shared: int,
    loops: list[list[Instruction]],
) -> MachineCode:
    # A cold block behind the loop may jump back to before it: the shortest one is meant.
    loop = min(loops, key=lambda body: (-sum(_multiplies(i) for i in body), len(body)), default=[])
    loop = loop if any(map(_multiplies, loop)) else []
    matrix = {found[0] for i in instructions if (found := MATRIX.search(i.name))}
    names = tuple(i.name for i in loop)
    return MachineCode(registers, stack, shared, frozenset(matrix), names)


def _multiplies(instruction: Instruction) -> bool:
    return MATRIX.search(instruction.name) is not None


def _read_amd(text: str, shared: int) -> MachineCode:
    instructions, labels = parse_amd(text)
    loops = []
    for jump in instructions:
        first = labels.get(jump.operands.strip(), jump.address)
        if jump.name.startswith(("s_cbranch", "s_branch")) and first < jump.address:
            loops.append(instructions[first : jump.address + 1])
    registers = _number(r"\.vgpr_count:\s+(\d+)", text)
    stack = _number(r"\.private_segment_fixed_size:\s+(\d+)", text)
    return _summary(instructions, registers, stack, shared, loops)


def parse_amd(text: str) -> tuple[list[Instruction], dict[str, int]]:
    """Instructions of an assembly text, numbered, and what labels point to."""
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in text.splitlines():
        bare = line.split(";")[0].rstrip()
        if label := _AMD_LABEL.match(bare):
            labels[label[1]] = len(instructions)
        elif found := _AMD_INSTRUCTION.match(bare):
            instructions.append(Instruction(len(instructions), found[1], found[2]))
    return instructions, labels
