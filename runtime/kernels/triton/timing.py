"""The time of packed linears and experts on a GPU, in tiles of the caller's choice."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from triton.runtime.errors import OutOfResources
from triton.testing import do_bench

from qtool.runtime.kernels.triton.config import LONG_PROMPT, ProductShape, Tiles
from qtool.runtime.kernels.triton.experts import PackedExperts
from qtool.runtime.kernels.triton.linear import PackedLinear
from qtool.runtime.kernels.triton.tuning import Timer

# A prompt that is long for any choice between the vendor's GEMM and ours.
LONG_TOKENS = 4096


def gpu_bench(call: Callable[[], object]) -> float:
    """Median milliseconds of a call on the GPU, its caches cleared before each."""
    return float(do_bench(call, return_mode="median"))


def timer_of(operations: Iterable[PackedLinear | PackedExperts]) -> Timer:
    """Times a shape on the first of the operations that has it; infinite where it cannot run."""
    first: dict[ProductShape, PackedLinear | PackedExperts] = {}
    for operation in operations:
        for shape in shapes_of(operation):
            first.setdefault(shape, operation)

    def seconds(shape: ProductShape, bucket: int, tiles: Tiles | None) -> float:
        operation = first[shape]
        put_back = _choose(operation, shape, bucket, tiles)
        try:
            tokens = LONG_TOKENS if bucket == LONG_PROMPT else bucket
            return gpu_bench(operation.idle_call(tokens)) / 1e3
        except OutOfResources:
            return math.inf
        finally:
            put_back()

    return seconds


def shapes_of(operation: PackedLinear | PackedExperts) -> tuple[ProductShape, ...]:
    """What its tiles can be measured for: one product, or a mixture's two."""
    return operation.shapes if isinstance(operation, PackedExperts) else (operation.shape,)


def _choose(
    operation: PackedLinear | PackedExperts,
    shape: ProductShape,
    bucket: int,
    tiles: Tiles | None,
) -> Callable[[], None]:
    """Give an operation tiles for a product; the result gives it back what it had."""
    if isinstance(operation, PackedLinear):
        kept = operation.configs[bucket]
        operation.choose(bucket, tiles)
        return lambda: operation.choose(bucket, kept)
    assert tiles is not None, "experts are never dequantized"
    pair = operation.configs[bucket]
    up, down = (
        tiles if own == shape else old for own, old in zip(operation.shapes, pair, strict=True)
    )
    operation.choose(bucket, (up, down))
    return lambda: operation.choose(bucket, pair)
