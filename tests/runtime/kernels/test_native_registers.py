"""The inner loops of the GEMM tiles keep their sums in registers: read from the machine code."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator

import pytest

from support.native import LEVELS, native_at

PRODUCTS = ("tdpbssd", "vcvtdq2ps", "vpdpbusd", "vdpbf16ps", "vfmadd", "vpmaddubsw")
FUNCTION = re.compile(r"^[0-9a-f]+ <(.*)>:$")
JUMP = re.compile(r"\tj[a-z]+ +([0-9a-f]+) <")
# A number on the stack that is broadcast is a constant, no sum.
VECTOR_ON_STACK = re.compile(
    r"\t(?!vpbroadcast|vbroadcast).*(%[yz]mm\d+.*\(%rsp|\(%rsp.*%[yz]mm|\(%rbp\).*%[yz]mm)"
)

pytestmark = pytest.mark.skipif(not shutil.which("objdump"), reason="needs objdump")


def _functions(path: str) -> Iterator[tuple[str, list[tuple[int, str]]]]:
    """Every function's instructions with their addresses."""
    command = ["objdump", "-d", "--no-show-raw-insn", path]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    name, body = "", []
    for line in text.splitlines():
        if match := FUNCTION.match(line):
            yield name, body
            name, body = match[1], []
        elif ":\t" in line:
            address, _, instruction = line.partition(":\t")
            body.append((int(address, 16), f"\t{instruction}"))
    yield name, body


def _inner_loops(body: list[tuple[int, str]]) -> list[list[str]]:
    """Instructions of the loops that contain no other loop."""
    spans = [
        (int(match[1], 16), address)
        for address, text in body
        if (match := JUMP.match(text)) and body[0][0] <= int(match[1], 16) <= address
    ]
    inner = [
        (start, end)
        for start, end in spans
        if not any(start <= s and e <= end and (s, e) != (start, end) for s, e in spans)
    ]
    return [[text for address, text in body if start <= address <= end] for start, end in inner]


@pytest.mark.parametrize("level", [level for level in LEVELS if level != "plain"])
def test_no_inner_loop_of_a_tile_spills_a_vector(level: str) -> None:
    checked = 0
    for name, body in _functions(str(native_at(level).path)):
        if not re.search(r"(int8|exact|matrix)_tile|add_rows", name):
            continue
        for loop in _inner_loops(body):
            if any(product in text for text in loop for product in PRODUCTS):
                checked += 1
                spills = [text for text in loop if VECTOR_ON_STACK.search(text)]
                assert not spills, (name, spills)
    # Each compute type and bit width, each number of rows.
    assert checked >= (6 * (2 + 4) if level == "avx2" else 12 * (2 + 4))
