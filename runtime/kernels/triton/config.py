"""Which tiles a GEMM takes: a pure function of the GPU, the weight and the number of tokens.

Nothing is measured while serving. Tokens are counted in buckets, so that a weight has a small,
closed set of configurations (:func:`configs_of`), all compiled before the first request.
The rules follow from counted instructions, shared memory and registers (docs/kernels.md);
``qtool tune`` measures on a GPU and its table overrides them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from qtool.runtime.kernels.triton.layout import TILE_ROWS, Codes, PackedWeight
from qtool.runtime.kernels.triton.target import Target

Zeros = Literal["constant", "rows", "groups"]

# Tokens are rounded up to one of these. Beyond the last, a weight of 4 bits is dequantized once
# and multiplied by the vendor's GEMM: at 1,024 tokens that costs an A100 about a fifth more than
# the product itself, a tile of ours more (estimated from instruction counts, not measured).
BUCKETS = (8, 16, 32, 64, 128, 256, 512, 1024)
LONG_PROMPT = BUCKETS[-1] + 1

# More rows of an expert in a tile would mostly be filled with none.
MAX_EXPERT_TILE = 64

MAX_SPLITS = 16
# A program that sums fewer steps spends more on the reduction than on its weights.
MIN_STEPS_PER_SPLIT = 4


@dataclass(frozen=True, slots=True)
class Tiles:
    """One compiled form of a GEMM.

    Attributes:
        block_m: tokens of a tile.
        block_n: out features of a tile.
        num_warps, num_stages: as Triton means them.
        splits: programs that share the columns of a tile, a power of two.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    splits: int = 1

    def __post_init__(self) -> None:
        for name in ("block_m", "block_n", "num_warps", "splits"):
            value = getattr(self, name)
            if value < 1 or value & (value - 1):
                raise ValueError(f"{name}={value}: tiles are powers of two")
        if self.block_n % TILE_ROWS or self.num_stages < 1:
            raise ValueError(f"block_n={self.block_n}, num_stages={self.num_stages}")

    def unsplit(self) -> Tiles:
        """The same for one program a tile."""
        return replace(self, splits=1)


@dataclass(frozen=True, slots=True)
class GemmShape:
    """What decides about tiles besides the GPU: a packed weight, without its values.

    Attributes:
        codes: what its words hold.
        rows: out features, filled up.
        steps: tiles along a row.
        step: columns of a tile.
        grouped: whether scales change along a row.
        zeros: one for all, one a row, or one a group in the scales' low bits.
        token_steps: whether a token has a scale a step too: FP8 in blocks, multiplied in 16 bits.
    """

    codes: Codes
    rows: int
    steps: int
    step: int
    grouped: bool
    zeros: Zeros
    token_steps: bool = False

    @property
    def is_bytes(self) -> bool:
        """Whether products have 8 bits."""
        return self.codes in (Codes.INT8_BYTES, Codes.FP8_BYTES)

    @property
    def dequantizes(self) -> bool:
        """Whether long prompts may have it dequantized once, for the vendor's GEMM.

        Scales of blocks would be rounded to 16 bits there, and the tokens' with them.
        """
        return not self.is_bytes and not self.token_steps

    @property
    def constant_zero(self) -> int:
        """The zero of all weights, in the unit of its codes; -1 where they differ."""
        return self.codes.zero // self.codes.zero_unit if self.zeros == "constant" else -1


def shape_of(weight: PackedWeight) -> GemmShape:
    """The shape of a packed weight."""
    rows, columns = weight.padded
    zeros: Zeros = "constant"
    if weight.scheme.strategy == "group":
        zeros = "groups"
    elif weight.zeros is not None:
        zeros = "rows"
    steps = columns // weight.step
    return GemmShape(weight.codes, rows, steps, weight.step, weight.grouped, zeros)


@dataclass(frozen=True, slots=True)
class ExpertsShape:
    """The same for one of a mixture's two products.

    Attributes:
        one: of one expert's weight.
        experts: how many of them there are.
        top_k: how many a token goes to.
    """

    one: GemmShape
    experts: int
    top_k: int


ProductShape: TypeAlias = GemmShape | ExpertsShape
# Measured choices: by shape and bucket; ``None`` is dequantize, then the vendor's GEMM.
TileTable: TypeAlias = Mapping[tuple[ProductShape, int], Tiles | None]


def bucket_of(tokens: int) -> int:
    """Tokens rounded up to a bucket; :data:`LONG_PROMPT` beyond the last."""
    return next((bucket for bucket in BUCKETS if tokens <= bucket), LONG_PROMPT)


def select_config(
    target: Target, shape: GemmShape, tokens: int, table: TileTable | None = None
) -> Tiles | None:
    """Tiles for a product with ``tokens`` rows, or ``None``: dequantize, then the vendor's GEMM.

    Depends on the bucket of ``tokens`` only.
    """
    bucket = bucket_of(tokens)
    if table is not None and (shape, bucket) in table:
        return table[shape, bucket]
    if bucket == LONG_PROMPT and shape.dequantizes:
        return None
    tiles = _tile(target, shape, min(bucket, BUCKETS[-1]))
    if bucket == LONG_PROMPT:
        return tiles  # any number of tokens: no workspace would be large enough
    token_tiles = -(-bucket // tiles.block_m)
    return replace(tiles, splits=_splits(target, shape, token_tiles, tiles))


def select_experts_config(
    target: Target, shape: ExpertsShape, tokens: int, table: TileTable | None = None
) -> Tiles:
    """Tiles for the rows that each of a mixture's experts has of ``tokens`` tokens.

    A tile is of one expert, so it has as many rows as an expert has on average, 64 at most.
    Depends on the bucket of ``tokens`` only.
    """
    bucket = bucket_of(tokens)
    measured = None if table is None else table.get((shape, bucket))
    if measured is not None:
        return measured
    slots = bucket * shape.top_k
    mean = -(-slots // shape.experts)
    tiles = _tile(target, shape.one, min(bucket_of(mean), MAX_EXPERT_TILE))
    if bucket == LONG_PROMPT:
        return tiles  # any number of tokens: no workspace would be large enough
    used = max(min(slots, shape.experts), slots // tiles.block_m)
    return replace(tiles, splits=_splits(target, shape.one, used, tiles))


def configs_of(
    target: Target, shape: GemmShape, table: TileTable | None = None
) -> tuple[Tiles | None, ...]:
    """Everything :func:`select_config` can answer for a weight: what warm-up compiles."""
    every = (select_config(target, shape, tokens, table) for tokens in (*BUCKETS, LONG_PROMPT))
    return tuple(dict.fromkeys(every))


def _tile(target: Target, shape: GemmShape, bucket: int) -> Tiles:
    if not target.is_nvidia:
        return _amd_tile(shape, bucket)
    if bucket <= 16 and not (shape.codes is Codes.FP8_BYTES and target.capability >= 90):
        # Two warps: Hopper's instruction for groups of four waits longer than it multiplies.
        # For sm_100 ptxas limits 8 tokens with groups of 64 to 80 registers, and spills.
        block_m = 16 if target.capability >= 100 and shape.step == 64 else bucket
        return Tiles(block_m, 64, 2, _stages(target, shape, block_m, 64))
    block_m, warps = _wide(target, shape, bucket)
    if shape.rows % 128 or _spills(target, shape, bucket):
        # e4m3 needs Hopper's instruction: others would have it converted first.
        warps = 4 if shape.codes is Codes.FP8_BYTES else 2
        return Tiles(min(block_m, 32), 64, warps, _stages(target, shape, 32, 64))
    return Tiles(block_m, 128, warps, _stages(target, shape, block_m, 128))


def _spills(target: Target, shape: GemmShape, bucket: int) -> bool:
    """8-bit words and their scales of 128 rows beside the sums of 32 tokens: 8 bytes too many."""
    grouped_bytes = shape.codes is Codes.INT8 and shape.grouped
    return target.capability == 90 and grouped_bytes and bucket == 32


def _wide(target: Target, shape: GemmShape, bucket: int) -> tuple[int, int]:
    """(tokens of a tile, warps) for more than 16 tokens and tiles of 128 out features.

    Before Hopper larger tiles of 16-bit products make the warps unpack each weight twice, and
    do not fit in registers. With 128 tokens Hopper holds the sums in two groups of warps.
    """
    if shape.is_bytes:
        limit = 32 if shape.grouped else 128
        block_m = min(bucket, limit)
        return block_m, 8 if block_m == 128 else 4
    if target.capability < 90 or bucket <= 32:
        return 32, 4
    # From sm_100 on two groups of warps would hand the weights over through shared memory.
    return (64, 4) if bucket <= 64 or target.capability >= 100 else (128, 8)


def _stages(target: Target, shape: GemmShape, block_m: int, block_n: int) -> int:
    """Steps in flight: enough bytes to hide memory's latency, as far as shared memory goes."""
    itemsize = 1 if shape.is_bytes else 2
    words = block_n * shape.step * itemsize // shape.codes.planes
    stage = words + block_m * shape.step * itemsize + block_n * 4
    wanted = {128: 5, 64: 6, 32: 8}[shape.step] if block_n == 64 else 4
    # Two programs of 32 tokens and fewer share a multiprocessor.
    room = (target.shared_memory - 2048) // (2 if block_m <= 32 else 1)
    # The step that is multiplied is in registers already.
    return max(2, min(wanted if block_m <= 32 else 3, room // stage + 1))


def _amd_tile(shape: GemmShape, bucket: int) -> Tiles:
    """No asynchronous copies and 64 KiB: two stages, through registers."""
    block_m = min(max(bucket, 16), 32)
    return Tiles(block_m, 64, 2, 2)


def _splits(target: Target, shape: GemmShape, token_tiles: int, tiles: Tiles) -> int:
    """Enough programs for every multiprocessor: two each, or three of two warps on Hopper."""
    num_tiles = shape.rows // tiles.block_n * token_tiles
    each = 3 if target.capability >= 90 and tiles.num_warps == 2 else 2
    splits, limit = 1, min(MAX_SPLITS, shape.steps // MIN_STEPS_PER_SPLIT)
    while num_tiles * splits < each * target.num_sms and 2 * splits <= limit:
        splits *= 2
    return splits
