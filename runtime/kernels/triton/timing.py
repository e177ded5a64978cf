"""A packed linear's time on a GPU, in tiles of the caller's choice."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from triton.runtime.errors import OutOfResources
from triton.testing import do_bench

from qtool.runtime.kernels.triton.config import LONG_PROMPT, GemmShape, Tiles, shape_of
from qtool.runtime.kernels.triton.linear import PackedLinear
from qtool.runtime.kernels.triton.tuning import Timer

# A prompt that is long for any choice between the vendor's GEMM and ours.
LONG_TOKENS = 4096


def gpu_bench(call: Callable[[], object]) -> float:
    """Median milliseconds of a call on the GPU, its caches cleared before each."""
    return float(do_bench(call, return_mode="median"))


def timer_of(operations: Iterable[PackedLinear]) -> Timer:
    """Times a shape on the first of the operations that has it; infinite where it cannot run."""
    first: dict[GemmShape, PackedLinear] = {}
    for operation in operations:
        first.setdefault(shape_of(operation.weight), operation)

    def seconds(shape: GemmShape, bucket: int, tiles: Tiles | None) -> float:
        operation = first[shape]
        tokens = LONG_TOKENS if bucket == LONG_PROMPT else bucket
        kept = operation.configs[bucket]
        operation.choose(bucket, tiles)
        x = torch.zeros(
            tokens,
            operation.weight.shape[1],
            dtype=operation.dtype,
            device=operation.weight.words.device,
        )
        try:
            return gpu_bench(lambda: operation(x)) / 1e3
        except OutOfResources:
            return math.inf
        finally:
            operation.choose(bucket, kept)

    return seconds
