"""Weights as the GPU kernels read them: packed once at load, with an exact inverse.

Drawn in docs/layouts.md. A weight [N, K] becomes tiles of 64 rows and ``step`` columns, in the
order in which one program reads them. For 16-bit products a row of a tile is ``step / planes``
words of sixteen bits; word i holds the codes of columns i, i + step / planes, ... For 8-bit
products it is ``step`` bytes as they are.

Beside the words lies one 32-bit value for every row and step (or every row): two-byte loads are
never pipelined, four-byte loads are. It is the float32 scale. In groups of integers the zero
takes the scale's four lowest mantissa bits, a 4-bit zero as it is, an 8-bit one in sixteens;
scales of 16-bit checkpoints have them free, in float32's whole range, so nothing is rounded. A
symmetric grid keeps its constant zero there too: a load that feeds the weights is pipelined,
one that only scales the sums is not.

Ragged shapes end here: rows and columns are filled up with codes that dequantize to 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

import torch
from torch import Tensor
from torch.nn import functional

from qtool.formats import affine
from qtool.formats.scheme import WeightScheme
from qtool.formats.tensor import QuantizedTensor

# Written into whatever keeps packed weights, or figures measured with them.
LAYOUT_VERSION = 1

TILE_ROWS = 64
STEPS = (128, 64, 32)  # columns of a tile, the largest that fits
ZERO_MASK = 0xF
GATE_ROWS = 8  # rows of a gate before as many of its up projection


class Codes(Enum):
    """What words hold, and how.

    ``INT4``: four codes, the first plane in the lowest bits. ``INT8``: two unsigned bytes.
    ``FP8``: two e4m3 bytes, their bits where a decoder to float16 wants them: the second
    plane's sign at 15 and other bits at 13 to 7, the first plane's sign at 14 and other bits at
    6 to 0. ``INT8_BYTES``: signed bytes; ``FP8_BYTES``: e4m3.
    """

    INT4 = "int4"
    INT8 = "int8"
    FP8 = "fp8"
    INT8_BYTES = "int8 bytes"
    FP8_BYTES = "fp8 bytes"

    @property
    def planes(self) -> int:
        """Codes of a word."""
        return {Codes.INT4: 4, Codes.INT8: 2, Codes.FP8: 2}.get(self, 1)

    @property
    def zero(self) -> int:
        """The zero point of symmetric grids."""
        return {Codes.INT4: 8, Codes.INT8: 128, Codes.INT8_BYTES: 128}.get(self, 0)

    @property
    def zero_unit(self) -> int:
        """What a 4-bit zero counts."""
        return 16 if self in (Codes.INT8, Codes.INT8_BYTES) else 1


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight:
    """A quantized weight in the kernels' layout; N' and K' are filled up.

    Attributes:
        words: [N' / 64, K' / step, 64, step / planes]: int16, or int8 and float8_e4m3fn bytes.
        scales: int32 [K' / step, N'], bits of float32 values; [1, N'] where all steps of a row
            share one.
        zeros: int32 [N'], where zeros differ from row to row and not along a row; else they
            are in ``scales`` (groups), or constant.
        codes: what words hold.
        shape: (N, K), without filling.
        scheme: of the weight it was made of.
        gate_up: whether rows are a gate and its up projection, in turns of eight.
    """

    words: Tensor
    scales: Tensor
    zeros: Tensor | None
    codes: Codes
    shape: tuple[int, int]
    scheme: WeightScheme
    gate_up: bool = False

    @property
    def step(self) -> int:
        """Columns of a tile."""
        return int(self.words.shape[3]) * self.codes.planes

    @property
    def padded(self) -> tuple[int, int]:
        """(N', K')."""
        return int(self.words.shape[0]) * TILE_ROWS, int(self.words.shape[1]) * self.step

    @property
    def grouped(self) -> bool:
        """Whether scales change along a row."""
        return self.scheme.strategy in ("group", "block")

    @property
    def num_bytes(self) -> int:
        """Memory it takes."""
        return sum(t.nbytes for t in (self.words, self.scales, self.zeros) if t is not None)


def why_not_packable(weight: QuantizedTensor) -> str | None:
    """What keeps a weight from this layout, or ``None``."""
    scheme = weight.scheme
    if scheme.strategy == "group" and _step(scheme, weight.shape) not in STEPS:
        return f"groups of {scheme.group_size} are not made of 32s"
    if scheme.type == "float" and bool(weight.codes.float().isnan().any()):
        return "it holds NaN"
    if scheme.strategy == "group":
        bits = weight.scales.float().view(torch.int32)
        if bool((bits & ZERO_MASK).any()):
            return "its scales have more than 20 significant bits"
    return None


def gate_up_order(rows: int) -> Tensor:
    """Rows of a gate stacked on its up projection, in turns of eight: one thread gets a pair.

    int64 [rows]; ``rows`` is a multiple of 16.
    """
    return torch.arange(rows).view(2, -1, GATE_ROWS).transpose(0, 1).flatten()


def pack(weight: QuantizedTensor, *, as_bytes: bool = False, gate_up: bool = False) -> PackedWeight:
    """Lay a weight out for the kernels.

    Args:
        weight: of any scheme.
        as_bytes: for 8-bit products; else for 16-bit ones. Bytes have 8 bits.
        gate_up: the rows are a gate stacked on its up projection; they are taken in turns.

    Raises:
        ValueError: :func:`why_not_packable` says why.
    """
    if reason := why_not_packable(weight):
        raise ValueError(f"a weight with {weight.scheme.describe()} cannot be packed: {reason}")
    scheme, (rows, columns) = weight.scheme, weight.shape
    codes, step = _codes(scheme, as_bytes), _step(scheme, weight.shape)
    steps, tiles = -(-columns // step), -(-rows // TILE_ROWS)
    more_rows, more_columns = tiles * TILE_ROWS - rows, steps * step - columns
    scales, zeros = _grid(weight, codes, step, steps)
    stored = _with_columns(weight, more_columns)
    if gate_up:
        order = gate_up_order(rows).to(stored.device)
        stored, scales = stored[order], scales[:, order]
        zeros = None if zeros is None else zeros[order]
    # Rows that are added have a scale of 0.
    filled = functional.pad(stored, (0, 0, 0, more_rows), value=codes.zero)
    tiled = filled.view(tiles, TILE_ROWS, steps, step).transpose(1, 2)
    return PackedWeight(
        words=_to_words(tiled, codes).contiguous(),
        scales=functional.pad(scales, (0, more_rows)).contiguous(),
        zeros=None if zeros is None else functional.pad(zeros, (0, more_rows)),
        codes=codes,
        shape=weight.shape,
        scheme=replace(scheme, activations=None),
        gate_up=gate_up,
    )


def stack(weights: Sequence[PackedWeight]) -> list[PackedWeight]:
    """Weights of one form, moved into common memory one behind the other."""
    words = torch.stack([weight.words for weight in weights])
    scales = torch.stack([weight.scales for weight in weights])
    given = [weight.zeros for weight in weights if weight.zeros is not None]
    zeros = list(torch.stack(given)) if given else [None] * len(weights)
    return [
        replace(weight, words=words[i], scales=scales[i], zeros=zeros[i])
        for i, weight in enumerate(weights)
    ]


def unpack(packed: PackedWeight) -> QuantizedTensor:
    """Inverse of :func:`pack`, to the bit; scales come back in float32, as weights alone."""
    (rows, columns), scheme = packed.shape, packed.scheme
    tiled = _from_words(packed.words, packed.codes).transpose(1, 2)
    rows_of = slice(rows) if not packed.gate_up else gate_up_order(rows).argsort()
    codes = tiled.reshape(packed.padded)[rows_of, :columns].contiguous()
    grid = packed.scales[:, rows_of].t()
    if scheme.strategy == "group":
        zeros, grid = (grid & ZERO_MASK) * packed.codes.zero_unit, grid & ~ZERO_MASK
    elif packed.zeros is not None:
        zeros = packed.zeros[rows_of, None]
    else:
        zeros = torch.full_like(grid, scheme.symmetric_zero)
    height, width = scheme.block_shape(packed.shape)
    stride = width // packed.step if packed.grouped else 1
    scales = grid.contiguous().view(torch.float32)
    return QuantizedTensor(
        codes.view(affine.CODE_DTYPES[scheme.type]),
        scales[::height, ::stride].contiguous(),
        zeros[::height, ::stride].to(torch.uint8).contiguous(),
        scheme,
    )


def _codes(scheme: WeightScheme, as_bytes: bool) -> Codes:
    if scheme.type == "float":
        return Codes.FP8_BYTES if as_bytes else Codes.FP8
    if as_bytes:
        assert scheme.bits == 8, "bytes have 8 bits"
        return Codes.INT8_BYTES
    return Codes.INT4 if scheme.bits == 4 else Codes.INT8


def _step(scheme: WeightScheme, shape: tuple[int, int]) -> int:
    """Columns of a tile: all under one scale, and filling up as little as possible."""
    width = scheme.block_shape(shape)[1]
    if scheme.strategy in ("group", "block"):
        return math.gcd(width, STEPS[0])
    return next((step for step in STEPS if width % step == 0), STEPS[-1])


def _grid(
    weight: QuantizedTensor, codes: Codes, step: int, steps: int
) -> tuple[Tensor, Tensor | None]:
    """Scales as int32 bits [steps or 1, N], and zeros int32 [N] where they stand apart."""
    scheme, shape = weight.scheme, weight.shape
    scales = affine.per_row(weight.scales.float(), scheme, shape).contiguous().view(torch.int32)
    zeros = affine.per_row(weight.zeros, scheme, shape).to(torch.int32)
    if scheme.strategy not in ("group", "block"):
        return scales.t(), None if scheme.symmetric else zeros[:, 0].contiguous()
    if scheme.strategy == "group":
        scales = scales | zeros // codes.zero_unit
    repeats = scheme.block_shape(shape)[1] // step
    return scales.repeat_interleave(repeats, dim=1)[:, :steps].t(), None


def _with_columns(weight: QuantizedTensor, columns: int) -> Tensor:
    """Codes as uint8 with more columns, whose code is the row's zero."""
    stored = weight.codes.view(torch.uint8)
    if not columns:
        return stored
    zeros = affine.per_row(weight.zeros, weight.scheme, weight.shape)[:, -1:]
    return torch.cat((stored, zeros.expand(-1, columns)), dim=1)


def _to_words(codes: Tensor, kind: Codes) -> Tensor:
    """uint8 [..., step] -> words [..., step / planes]."""
    if kind is Codes.FP8_BYTES:
        return codes.contiguous().view(torch.float8_e4m3fn)
    if kind is Codes.INT8_BYTES:
        return (codes.to(torch.int16) - kind.zero).to(torch.int8)
    planes = codes.to(torch.int32).unflatten(-1, (kind.planes, -1)).unbind(-2)
    if kind is Codes.FP8:
        first, second = planes
        words = (second & 0x80) << 8 | (first & 0x80) << 7 | (second & 0x7F) << 7 | first & 0x7F
    else:
        width = 16 // kind.planes
        words = sum((plane << width * i for i, plane in enumerate(planes)), torch.zeros(()))
    return torch.where(words > 0x7FFF, words - 0x10000, words).to(torch.int16)


def _from_words(words: Tensor, kind: Codes) -> Tensor:
    """Inverse of :func:`_to_words`."""
    if kind is Codes.FP8_BYTES:
        return words.view(torch.uint8)
    bits = words.to(torch.int32)
    if kind is Codes.INT8_BYTES:
        return (bits + kind.zero).to(torch.uint8)
    if kind is Codes.FP8:
        first, second = bits >> 7 & 0x80 | bits & 0x7F, bits >> 8 & 0x80 | bits >> 7 & 0x7F
        return torch.cat((first, second), dim=-1).to(torch.uint8)
    width = 16 // kind.planes
    planes = [bits >> width * i & (1 << width) - 1 for i in range(kind.planes)]
    return torch.cat(planes, dim=-1).to(torch.uint8)
