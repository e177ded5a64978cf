"""Linear layers on this CPU: native kernels, torch's, and what the machine could do at most.

Usage: python benchmarks/cpu_linear.py [--rows 1 8 32 128 512] [--shapes 1536x576 ...]
       [--bits 4] [--group-size 64] [--seconds 0.3]

Shapes are in_features x out_features. Contestants take turns, so that a busy machine is unfair to
none of them. Times are medians; "of roof" is the time that reading the weights, or the products
at the peak, would take at least, over the time it took.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from qtool.formats import affine
from qtool.formats.scheme import weight_scheme
from qtool.formats.tensor import QuantizedTensor
from qtool.runtime.kernels.cpu.build import Native, load_native
from qtool.runtime.kernels.cpu.cores import available_cores
from qtool.runtime.kernels.cpu.native_ops import COMPUTE, NativeLinear
from qtool.runtime.kernels.cpu.torch_ops import Int4Linear, fits_int4pack

READ_BYTES = 1 << 28
PEAK_ROWS = 1536


@dataclass(frozen=True, slots=True)
class Roof:
    """What the machine can do: bytes read a second, operations a second of the int8 kernels."""

    bandwidth: float
    operations: float

    def seconds(self, num_bytes: int, operations: int) -> float:
        """The least time for so much."""
        return max(num_bytes / self.bandwidth, operations / self.operations)


def medians(calls: Mapping[str, Callable[[], object]], seconds: float) -> dict[str, float]:
    """Median seconds of calls that take turns.

    A turn starts with a call that does not count: the threads of the one before still spin then.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    end = time.perf_counter() + seconds * len(calls)
    while time.perf_counter() < end or len(next(iter(times.values()))) < 5:
        for name, call in calls.items():
            call()
            start = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def measure_roof(native: Native, seconds: float) -> Roof:
    """Bandwidth of summing a large buffer; products of a GEMM whose operands stay in the cache.

    The peak is that of our own tile, 95% of the instruction's where that was measured by itself.
    """
    buffer = torch.ones(READ_BYTES // 8, dtype=torch.int64)
    linear = NativeLinear(native, quantized(8, 128, 1024, 512), None, "int8")
    x = torch.randn(PEAK_ROWS, 1024)
    found = medians({"read": buffer.sum, "peak": lambda: linear(x)}, seconds)
    return Roof(READ_BYTES / found["read"], 2 * PEAK_ROWS * 1024 * 512 / found["peak"])


def quantized(bits: int, group_size: int, in_features: int, out_features: int) -> QuantizedTensor:
    """A random weight."""
    scheme = weight_scheme(bits, bits == 8, group_size)
    weight = torch.randn(out_features, in_features, generator=torch.Generator().manual_seed(0))
    scales, zeros = affine.choose_grid(weight, scheme, torch.bfloat16)
    return QuantizedTensor(affine.quantize(weight, scales, zeros, scheme), scales, zeros, scheme)


def contestants(native: Native, weight: QuantizedTensor) -> dict[str, Callable[[Tensor], Tensor]]:
    """Every way to compute one layer, by name; x is bfloat16."""
    dense = weight.dequantize(torch.bfloat16)
    ways: dict[str, Callable[[Tensor], Tensor]] = {
        f"native {compute}": NativeLinear(native, weight, None, compute) for compute in COMPUTE
    }
    ways["torch bf16"] = lambda x: functional.linear(x, dense)
    if fits_int4pack(weight, torch.bfloat16):
        ways["torch int4pack"] = Int4Linear(weight, None)
    return ways


def report(native: Native, options: argparse.Namespace, roof: Roof) -> None:
    """One line a shape and number of rows."""
    print(f"{'shape':>12} {'rows':>5} | microseconds, ratio to native int8 | of roof")
    for shape in options.shapes:
        in_features, out_features = (int(part) for part in shape.split("x"))
        weight = quantized(options.bits, options.group_size, in_features, out_features)
        ways = contestants(native, weight)
        num_bytes = NativeLinear(native, weight, None).num_bytes
        for rows in options.rows:
            x = torch.randn(rows, in_features).bfloat16()
            calls = {name: partial(way, x) for name, way in ways.items()}
            found = medians(calls, options.seconds)
            ours = found["native int8"]
            share = roof.seconds(num_bytes, 2 * rows * in_features * out_features) / ours
            cells = [f"{n} {t * 1e6:.0f} ({t / ours:.2f})" for n, t in found.items()]
            print(f"{shape:>12} {rows:>5} | {' | '.join(cells)} | {share:.0%}", flush=True)


def machine() -> str:
    """The processor's name, and what may be used of it."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else 'unknown CPU'}, {available_cores()} cores in use"


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 128, 512])
    shapes = ["576x960", "576x3072", "1536x576", "2048x8192"]
    parser.add_argument("--shapes", nargs="+", default=shapes)
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--group-size", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=0.3, help="of each contestant in a cell")
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    native = load_native()
    if native.library is None:
        raise SystemExit(native.reason)
    torch.set_num_threads(available_cores())
    roof = measure_roof(native, options.seconds)
    print(f"{machine()}, native level {native.level}, torch {torch.__version__}")
    print(f"read {roof.bandwidth / 1e9:.0f} GB/s, int8 peak {roof.operations / 1e9:.0f} Gop/s")
    report(native, options, roof)


if __name__ == "__main__":
    main()
