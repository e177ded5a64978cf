"""AWQ and GPTQ as their formats say it, packed number by number in plain Python.

Written from the formats' descriptions and sharing no code with what it tests: words are built from
lists of integers.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import torch
from torch import Tensor

WORD_BITS = 32

# Bits 4 * i of an AWQ word hold element AWQ_ORDER[i] of eight.
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True)
class Grid:
    """Integers of one linear: codes [K][N], zeros [G][N], scales [G][N], group of each k."""

    bits: int
    codes: list[list[int]]
    zeros: list[list[int]]
    scales: list[list[float]]
    group_of: list[int]

    def weight(self) -> Tensor:
        """Float32 [N, K], product by product; scales are multiples of powers of two, so exact."""
        rows = [
            [
                self.scales[self.group_of[k]][n] * (code - self.zeros[self.group_of[k]][n])
                for n, code in enumerate(row)
            ]
            for k, row in enumerate(self.codes)
        ]
        return torch.tensor(rows, dtype=torch.float32).t().contiguous()


def random_grid(
    bits: int,
    features_in: int,
    features_out: int,
    group: int,
    seed: int = 0,
    *,
    symmetric: bool = False,
    act_order: bool = False,
) -> Grid:
    """A grid of random integers; both ends of codes and zeros occur."""
    source = random.Random(seed)
    groups = features_in // group
    top = 2**bits - 1

    def draw() -> int:
        return source.choice((0, top, source.randint(0, top)))

    def zero() -> int:
        return 2 ** (bits - 1) if symmetric else draw()

    group_of = [k // group for k in range(features_in)]
    if act_order:
        source.shuffle(group_of)
    return Grid(
        bits,
        [[draw() for _ in range(features_out)] for _ in range(features_in)],
        [[zero() for _ in range(features_out)] for _ in range(groups)],
        [[source.randint(1, 255) / 4096 for _ in range(features_out)] for _ in range(groups)],
        group_of,
    )


def with_zero(grid: Grid, zero: int) -> Grid:
    """The same grid with one zero everywhere."""
    return replace(grid, zeros=[[zero] * len(row) for row in grid.zeros])


def awq_tensors(grid: Grid) -> dict[str, Tensor]:
    """qweight, qzeros and scales of AutoAWQ's GEMM format."""
    return {
        "qweight": _words([_awq_row(row) for row in grid.codes]),
        "qzeros": _words([_awq_row(row) for row in grid.zeros]),
        "scales": torch.tensor(grid.scales, dtype=torch.float16),
    }


def _awq_row(row: list[int]) -> list[int]:
    words = []
    for start in range(0, len(row), 8):
        word = 0
        for position, element in enumerate(AWQ_ORDER):
            word |= row[start + element] << (4 * position)
        words.append(word)
    return words


def gptq_tensors(grid: Grid, version: int) -> dict[str, Tensor]:
    """qweight, qzeros, scales and g_idx of GPTQ's format; version 1 takes 1 off every zero."""
    top = 2**grid.bits - 1
    stored = [[(zero - (version == 1)) & top for zero in row] for row in grid.zeros]
    columns = [list(column) for column in zip(*grid.codes, strict=True)]
    packed = [_bit_string(column, grid.bits) for column in columns]
    return {
        "qweight": _words([list(row) for row in zip(*packed, strict=True)]),
        "qzeros": _words([_bit_string(row, grid.bits) for row in stored]),
        "scales": torch.tensor(grid.scales, dtype=torch.float16),
        "g_idx": torch.tensor(grid.group_of, dtype=torch.int32),
    }


def _bit_string(values: list[int], bits: int) -> list[int]:
    """Element i takes bits [i * bits, (i + 1) * bits) of one long little-endian number."""
    number = sum(value << (index * bits) for index, value in enumerate(values))
    count = len(values) * bits // WORD_BITS
    return [(number >> (WORD_BITS * index)) & (2**WORD_BITS - 1) for index in range(count)]


def _words(rows: list[list[int]]) -> Tensor:
    """Unsigned words as int32, two's complement."""
    signed = [[word - 2**WORD_BITS if word >> 31 else word for word in row] for row in rows]
    return torch.tensor(signed, dtype=torch.int32)
