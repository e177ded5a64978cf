"""A prediction, not a measurement: how near to a GPU's memory its machine code lets a GEMM come.

    python benchmarks/static_roofline.py                     # a Markdown table
    python benchmarks/static_roofline.py --tokens 8 64 --layer "8B gate, up"

Each kernel that serving would choose is compiled, its main loop counted, and four times are
compared for a layer's product:

memory    bytes of weights, scales, activations and results over the specified bandwidth
issue     instructions a weight, over 128 thread instructions a clock and multiprocessor
matrix    multiply-adds of whole tiles, over the specified dense rate; Hopper's older
          instruction, which two warps use, reaches 62% of it
latency   bytes in flight, by stages and by programs that fit on a multiprocessor, against what
          Little's law asks for at 700 ns

The prediction is memory's time over the longest of the four. It leaves out launches, the last
wave, and everything a scheduler cannot hide, so a measurement will be lower. How much room there
is say "slots" and "matrix": the share of issue slots and of the matrix units that keeping up
with memory takes; a multiprocessor that fills 70% of its slots is a busy one.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product

import torch

from qtool.runtime.kernels.triton.aot import compile_gemm
from qtool.runtime.kernels.triton.config import GemmShape, Tiles, select_config
from qtool.runtime.kernels.triton.gate import gemm_shape, instructions_per_weight
from qtool.runtime.kernels.triton.layout import TILE_ROWS, Codes
from qtool.runtime.kernels.triton.machine_code import MachineCode, read_code
from qtool.runtime.kernels.triton.target import Target

LATENCY = 700e-9
REGISTERS = 65536
MAX_THREADS = 2048
SECTOR = 32  # bytes, the least that is read
OLDER_INSTRUCTION = 0.62


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU by its data sheet: bytes, clocks, and dense 16-bit operations a second."""

    name: str
    target: Target
    bandwidth: float
    clock: float
    flops: float


GPUS = (
    Gpu("A100 80 GB", Target("sm_80", 108), 2.04e12, 1.41e9, 312e12),
    Gpu("H100 SXM", Target("sm_90", 132), 3.35e12, 1.70e9, 989e12),
    Gpu("H200", Target("sm_90", 132), 4.8e12, 1.70e9, 989e12),
)
# (out features, in features), projections of one input stacked as they run.
LAYERS: Mapping[str, tuple[int, int]] = {
    "8B q, k, v": (6144, 4096),
    "8B o": (4096, 4096),
    "8B gate, up": (28672, 4096),
    "8B down": (4096, 14336),
    "70B q, k, v": (10240, 8192),
    "70B o": (8192, 8192),
    "70B gate, up": (57344, 8192),
    "70B down": (8192, 28672),
}
KERNELS: Mapping[str, GemmShape] = {
    "W4A16 g128": gemm_shape(Codes.INT4, 128),
    "W8A16": gemm_shape(Codes.INT8, None),
    "FP8 W8A16": gemm_shape(Codes.FP8, None),
    "W8A8 INT8": gemm_shape(Codes.INT8_BYTES, None),
    "W8A8 FP8": gemm_shape(Codes.FP8_BYTES, None),
    "W8A8 FP8 blocks": gemm_shape(Codes.FP8_BYTES, 128),
}


@dataclass(frozen=True, slots=True)
class Prediction:
    """Seconds of one product, and what follows from them.

    Attributes:
        fraction: of the bandwidth that the main loop can use.
        speedup: over an ideal product of 16-bit weights.
    """

    memory: float
    issue: float
    matrix: float
    latency: float
    fraction: float
    speedup: float


def shape_for(kernel: GemmShape, rows: int, columns: int) -> GemmShape:
    """The same kind of weight in another size."""
    return replace(kernel, rows=rows, steps=columns // kernel.step)


def moved_bytes(shape: GemmShape, tokens: int) -> float:
    """Bytes of weights, scales, activations and 16-bit results."""
    columns = shape.steps * shape.step
    bits = 4 if shape.codes is Codes.INT4 else 8
    scales = shape.rows * 4 * (shape.steps if shape.grouped else 1)
    if shape.is_bytes and shape.grouped:
        scales = shape.rows // TILE_ROWS * SECTOR * shape.steps  # a tile's rows share one
    activations = tokens * columns * (1 if shape.is_bytes else 2)
    return shape.rows * columns * bits / 8 + scales + activations + tokens * shape.rows * 2


def programs_per_sm(code: MachineCode, tiles: Tiles, target: Target) -> int:
    """Programs that fit on a multiprocessor."""
    threads = 32 * tiles.num_warps
    by_registers = REGISTERS // (max(code.registers, 1) * threads)
    by_memory = target.shared_memory // max(code.shared, 1)
    return max(1, min(by_registers, by_memory, MAX_THREADS // threads))


def predict(gpu: Gpu, shape: GemmShape, tiles: Tiles, code: MachineCode, tokens: int) -> Prediction:
    """The four times, and the longest of them."""
    weights = shape.rows * shape.steps * shape.step
    passes = -(-tokens // tiles.block_m)
    memory = moved_bytes(shape, tokens) / gpu.bandwidth
    rate = gpu.target.num_sms * 128 * gpu.clock
    per_weight = instructions_per_weight(code, shape, tiles, gpu.target)
    issue = per_weight * weights * passes / rate
    older = gpu.target.capability >= 90 and tiles.num_warps < 4
    flops = gpu.flops * (2 if shape.is_bytes else 1) * (OLDER_INSTRUCTION if older else 1)
    matrix = 2 * weights * passes * tiles.block_m / flops
    programs = shape.rows // tiles.block_n * tiles.splits * passes
    resident = min(programs / gpu.target.num_sms, programs_per_sm(code, tiles, gpu.target))
    itemsize = 1 if shape.is_bytes else 2
    stage = tiles.block_n * shape.step * itemsize / shape.codes.planes
    in_flight = resident * (tiles.num_stages - 1) * stage * gpu.target.num_sms
    latency = memory * max(1.0, gpu.bandwidth * LATENCY / in_flight)
    ideal = weights * 2 / gpu.bandwidth
    longest = max(memory, issue, matrix, latency)
    return Prediction(memory, issue, matrix, latency, memory / longest, ideal / longest)


def rows(tokens: Iterable[int], layers: Iterable[str]) -> Iterator[tuple[str, ...]]:
    """A row of text for each GPU, kernel, layer and number of tokens."""
    for gpu, (kernel, kind), layer, count in product(GPUS, KERNELS.items(), layers, tokens):
        if kind.codes is Codes.FP8_BYTES and not gpu.target.has_fp8:
            continue
        shape = shape_for(kind, *LAYERS[layer])
        tiles = select_config(gpu.target, shape, count)
        assert tiles is not None, "beyond 1,024 tokens weights are dequantized"
        code = read_code(compile_gemm(gpu.target, shape, tiles, torch.float16))
        found = predict(gpu, shape, tiles, code, count)
        yield (
            gpu.name,
            kernel,
            layer,
            str(count),
            f"{1e6 * found.memory:.1f}",
            f"{found.issue / found.memory:.0%}",
            f"{found.matrix / found.memory:.0%}",
            f"{found.fraction:.0%}",
            f"{found.speedup:.2f}",
        )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--layer", choices=LAYERS, nargs="+", default=list(LAYERS))
    chosen = parser.parse_args()
    names = (
        "GPU",
        "kernel",
        "layer",
        "tokens",
        "memory, us",
        "slots",
        "matrix",
        "of memory",
        "x 16 bits",
    )
    print(f"| {' | '.join(names)} |\n|{'---|' * len(names)}")
    for row in rows(chosen.tokens, chosen.layer):
        print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
