"""Everything worth knowing about the kernels on a GPU, in one command: make gpu-check

    python benchmarks/gpu_check.py --csv gpu.csv
    TRITON_INTERPRET=1 python benchmarks/gpu_check.py --small     # the script itself, on a CPU

Installs nothing. Checks first (a wrong kernel is not timed): each kind of weight against the
dequantized product, inline assembly against the plain path bit for bit, splits of K a thousand
times over in a captured graph, norms and experts that share launches against those that do not.
Then ceilings (copy, the vendor's 16-bit GEMM) and the kernels, with weights that rotate so that
none stays in the cache, the linears of an 8B decoder's step, and steps of a whole one.
attention_check.py has the same for attention over the paged cache.
A row of the CSV has device and versions, time, and the share of the ceiling measured here.
"""

from __future__ import annotations

import argparse
import csv
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch
import triton
from attention_check import attention_checks, decode_attention
from gpu_model import decode_steps, model_checks
from torch import Tensor
from torch.nn import functional

from qtool.formats.scheme import WeightScheme, fp8_scheme, w8a8_scheme, weight_scheme
from qtool.formats.tensor import QuantizedTensor
from qtool.runtime.kernels import select_backend
from qtool.runtime.kernels.backend import LinearOp
from qtool.runtime.kernels.triton.backend import TritonBackend
from qtool.runtime.kernels.triton.config import select_config, shape_of
from qtool.runtime.kernels.triton.launch import Workspace
from qtool.runtime.kernels.triton.layout import pack
from qtool.runtime.kernels.triton.weight_gemm import weight_gemm

SCHEMES: dict[str, WeightScheme] = {
    "W4A16 g128": weight_scheme(4, False, 128),
    "W8A16": weight_scheme(8, True, None),
    "FP8 W8A16": fp8_scheme(weight_only=True),
    "W8A8 INT8": w8a8_scheme(),
    "W8A8 FP8": fp8_scheme(),
    "W8A8 FP8 blocks": fp8_scheme("block"),
}
# out features, in features of a decoder of 8B: q, k, v; o; gate, up; down.
DECODER = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is done; the small one runs in the interpreter."""

    shapes: tuple[tuple[int, int], ...]
    tokens: tuple[int, ...]
    layers: int
    replays: int
    repeats: int
    copy_bytes: int


FULL = Plan(
    shapes=((8192, 8192), (28672, 4096), (4096, 14336)),
    tokens=(1, 4, 16, 64, 256, 1024, 4096),
    layers=8,
    replays=1000,
    repeats=20,
    copy_bytes=2**30,
)
SMALL = Plan(((64, 256),), (1, 9), 1, 2, 1, 2**16)


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the CSV; a check has no time, and ``ok`` or what is wrong as its verdict."""

    device: str
    torch: str
    triton: str
    section: str
    name: str
    rows: int
    columns: int
    tokens: int
    microseconds: float
    of_ceiling: float
    speedup: float
    verdict: str


class Bench:
    """One device, its ceilings, and rows as they come."""

    def __init__(self, device: torch.device, plan: Plan) -> None:
        self.device, self.plan = device, plan
        selection = select_backend("triton", device, torch.float16)
        assert isinstance(selection.backend, TritonBackend)
        self.backend = selection.backend
        self.bandwidth = 0.0  # bytes a second
        on_gpu = device.type == "cuda"
        self.device_name = torch.cuda.get_device_name(device) if on_gpu else "interpreter"

    def row(
        self,
        section: str,
        name: str,
        shape: tuple[int, int] = (0, 0),
        tokens: int = 0,
        *,
        seconds: float = 0.0,
        of_ceiling: float = 0.0,
        speedup: float = 0.0,
        verdict: str = "ok",
    ) -> Row:
        """A row of this device."""
        return Row(
            self.device_name, torch.__version__, triton.__version__, section, name, *shape,
            tokens, round(1e6 * seconds, 2), round(of_ceiling, 4), round(speedup, 3), verdict,
        )  # fmt: skip

    def seconds(self, calls: list[Callable[[], object]]) -> float:
        """Of one call, the calls taken in turns; on a GPU in a captured graph, by its clock."""
        if self.device.type != "cuda":
            start = time.perf_counter()
            for call in calls:
                call()
            return (time.perf_counter() - start) / len(calls)
        graph = self.captured(calls)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graph.replay()
        start.record()
        for _ in range(self.plan.repeats):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1e3 / self.plan.repeats / len(calls)

    def captured(self, calls: list[Callable[[], object]]) -> torch.cuda.CUDAGraph:
        """The calls as a graph; they have run once before."""
        for call in calls:
            call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls:
                call()
        return graph

    def random(self, *shape: int) -> Tensor:
        """float16 values near a standard deviation of 1."""
        return torch.randn(*shape, device=self.device).half()

    def weight(self, scheme: WeightScheme, shape: tuple[int, int]) -> QuantizedTensor:
        """Random codes, any scales: what they are does not change the time."""
        grid = scheme.grid_shape(shape)
        if scheme.type == "float":
            codes = torch.randn(shape, device=self.device).to(torch.float8_e4m3fn)
        else:
            codes = torch.randint(0, scheme.levels, shape, device=self.device, dtype=torch.uint8)
        zeros = torch.full(grid, scheme.symmetric_zero, dtype=torch.uint8, device=self.device)
        scales = torch.full(grid, 2.0**-8, device=self.device, dtype=torch.bfloat16)
        return QuantizedTensor(codes, scales, zeros, scheme)


def checks(bench: Bench) -> Iterator[Row]:
    """Right results before fast ones."""
    for name, scheme in SCHEMES.items():
        shape = bench.plan.shapes[0]
        weight, x = bench.weight(scheme, shape), bench.random(9, shape[1])
        found = bench.backend.linear(weight, None)(x).float()
        exact = x.float() @ weight.dequantize().T
        error = float((found - exact).norm() / exact.norm())
        # Rounded inputs differ from the exact product by what 8 bits cost.
        bound = 0.05 if scheme.activations is not None else 1e-3
        verdict = "ok" if error < bound else f"relative error {error:.2g}, bound {bound}"
        yield bench.row("check", name, shape, 9, verdict=verdict)
    for name in ("W4A16 g128", "W8A16", "FP8 W8A16"):
        weight = bench.weight(SCHEMES[name], bench.plan.shapes[0])
        yield _assembly_check(bench, name, weight)
    yield _split_check(bench)
    yield from model_checks(bench)


def _assembly_check(bench: Bench, name: str, weight: QuantizedTensor) -> Row:
    x, packed = bench.random(8, weight.shape[1]), pack(weight)
    tiles = select_config(bench.backend.target, shape_of(packed), 8)
    assert tiles is not None
    workspace = Workspace.on(bench.device)
    workspace.reserve(packed.padded[0], 8, tiles)
    outs = []
    for asm in (True, False):
        out = torch.empty(8, weight.shape[0], device=bench.device)
        weight_gemm(x, packed, out, tiles, workspace, asm=asm)
        outs.append(out)
    verdict = "ok" if torch.equal(*outs) else "assembly and plain path differ"
    return bench.row("check", f"{name}, assembly", weight.shape, 8, verdict=verdict)


def _split_check(bench: Bench) -> Row:
    """The same bits from every replay of a product whose columns are split."""
    shape = (64, 4096) if bench.device.type == "cuda" else (64, 512)
    layer = bench.backend.linear(bench.weight(SCHEMES["W4A16 g128"], shape), None)
    x = bench.random(8, shape[1])
    first, out = layer(x), torch.empty(8, shape[0], device=bench.device, dtype=torch.float16)

    def call() -> None:
        out.copy_(layer(x))

    graph = bench.captured([call]) if bench.device.type == "cuda" else None
    wrong = 0
    for _ in range(bench.plan.replays):
        out.fill_(torch.nan)
        graph.replay() if graph is not None else call()
        wrong += not torch.equal(out, first)
    verdict = "ok" if not wrong else f"{wrong} of {bench.plan.replays} replays differ"
    return bench.row("check", "split columns, replayed", shape, 8, verdict=verdict)


def ceilings(bench: Bench) -> Iterator[Row]:
    """What the memory gives; the vendor's GEMM stands beside each kernel."""
    source = torch.empty(bench.plan.copy_bytes, dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)
    seconds = bench.seconds([lambda: target.copy_(source)])
    bench.bandwidth = 2 * source.numel() / seconds
    yield bench.row("ceiling", f"copy, {bench.bandwidth / 1e9:.0f} GB/s", seconds=seconds)


def products(bench: Bench) -> Iterator[Row]:
    """Each kernel on each shape; of the ceiling: bytes over the measured bandwidth."""
    for shape in bench.plan.shapes:
        copies = _copies(bench, shape)
        dense = [bench.random(*shape) for _ in range(copies)]
        vendor = {m: _vendor(bench, dense, bench.random(m, shape[1])) for m in bench.plan.tokens}
        for tokens, seconds in vendor.items():
            share = 2 * shape[0] * shape[1] / bench.bandwidth / seconds
            yield bench.row(
                "product", "fp16, vendor", shape, tokens, seconds=seconds, of_ceiling=share
            )
        del dense
        for name, scheme in SCHEMES.items():
            layers = [
                bench.backend.linear(bench.weight(scheme, shape), None) for _ in range(copies)
            ]
            for tokens in bench.plan.tokens:
                x = bench.random(tokens, shape[1])
                seconds = bench.seconds([_call(layer, x) for layer in layers])
                share = layers[0].num_bytes / bench.bandwidth / seconds
                speedup = vendor[tokens] / seconds
                yield bench.row(
                    "product", name, shape, tokens,
                    seconds=seconds, of_ceiling=share, speedup=speedup,
                )  # fmt: skip


def _copies(bench: Bench, shape: tuple[int, int]) -> int:
    """Weights to take in turns: 4-bit ones together larger than any cache, 256 MiB."""
    if bench.device.type != "cuda":
        return 1
    return max(2, 2**28 // (shape[0] * shape[1] // 2))


def _vendor(bench: Bench, weights: list[Tensor], x: Tensor) -> float:
    def call(weight: Tensor) -> Callable[[], object]:
        return lambda: functional.linear(x, weight)

    return bench.seconds([call(weight) for weight in weights])


def _call(layer: LinearOp, x: Tensor) -> Callable[[], object]:
    return lambda: layer(x)


def decoder_step(bench: Bench) -> Iterator[Row]:
    """The linears of a decode step of random weights, 4 bits against 16; no attention."""
    shapes = DECODER if bench.device.type == "cuda" else ((64, 128),)
    times = {}
    for name in ("fp16, vendor", "W4A16 g128"):
        layers: list[LinearOp] = []
        for shape in shapes * bench.plan.layers:
            plain = name == "fp16, vendor"
            weight = bench.random(*shape) if plain else bench.weight(SCHEMES[name], shape)
            layers.append(bench.backend.linear(weight, None))
        inputs = {shape[1]: bench.random(1, shape[1]) for shape in shapes}
        wanted = [inputs[shape[1]] for shape in shapes * bench.plan.layers]
        calls = [_call(layer, x) for layer, x in zip(layers, wanted, strict=True)]
        times[name] = bench.seconds(calls) * len(calls)
        speedup = times["fp16, vendor"] / times[name]
        label = f"{name}, {bench.plan.layers} layers"
        yield bench.row("decode", label, tokens=1, seconds=times[name], speedup=speedup)


def main(arguments: list[str] | None = None) -> int:
    """Run all of it; the exit code is 1 if a check fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--csv", type=Path, help="write the rows here too")
    parser.add_argument("--small", action="store_true", help="small shapes, for the interpreter")
    chosen = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    bench = Bench(device, SMALL if chosen.small else FULL)
    rows: list[Row] = []
    for section in (
        checks,
        attention_checks,
        ceilings,
        products,
        decoder_step,
        decode_attention,
        decode_steps,
    ):
        for row in section(bench):
            rows.append(row)
            print(*list(asdict(row).values())[3:], sep="  ", flush=True)
        if any(row.verdict != "ok" for row in rows):
            print("a check failed: nothing is timed", file=sys.stderr)
            break
    if chosen.csv is not None:
        with chosen.csv.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, [field.name for field in fields(Row)])
            writer.writeheader()
            writer.writerows(asdict(row) for row in rows)
    return int(any(row.verdict != "ok" for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
