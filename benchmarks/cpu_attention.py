"""Attention of a decode step over each form of the cache, in native code, against 16 bits.

Usage: python benchmarks/cpu_attention.py [--shapes 9x3x64 32x8x128] [--context 4096]
       [--batch 1 4] [--layers 12] [--rounds 40]

Shapes are query heads x KV heads x head size. Forms take turns, layer by layer of a cache that no
processor cache holds; a ratio is the median over rounds of a form's time by that of 16 bits in the
same round, so that a busy machine is unfair to none of them.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from qtool.runtime.batch import QuerySpan
from qtool.runtime.kernels.backend import AttentionScope
from qtool.runtime.kernels.cpu.build import load_native
from qtool.runtime.kernels.cpu.kv_attention import LayerCall
from qtool.runtime.kernels.cpu.kv_pages import KvForm, KvPages
from qtool.runtime.kv_schemes import SCHEMES, WIDE, KVScheme

CHUNK = 512


@dataclass(frozen=True, slots=True)
class Layout:
    """Sequences side by side in a pool."""

    spans: tuple[QuerySpan, ...]
    block_tables: torch.Tensor
    is_decode: bool = True


@dataclass(frozen=True, slots=True)
class Case:
    """One shape of heads, and what stands in the cache."""

    heads: int
    kv_heads: int
    head_dim: int
    context: int
    batch: int
    layers: int

    def layout(self, start: int, end: int, block_size: int) -> Layout:
        """Rows [start, end) of every sequence."""
        width = -(-self.context // block_size)
        # Blocks in an order of chance, as a running engine has them.
        order = torch.randperm(self.batch * width, generator=torch.Generator().manual_seed(0))
        spans = (QuerySpan(i * (end - start), end - start, end) for i in range(self.batch))
        return Layout(tuple(spans), order.view(self.batch, width))


def fill(library: ctypes.CDLL, scheme: KVScheme, case: Case) -> KvPages:
    """Pages of random keys and values, the same in every layer."""
    form = KvForm((scheme,) * case.layers, torch.bfloat16, case.kv_heads, case.head_dim)
    size = scheme.block_size(None)
    pages = KvPages(form, case.batch * -(-case.context // size), size, case.batch)
    generator, tails = torch.Generator().manual_seed(1), tuple(range(case.batch))
    for start in range(0, case.context, CHUNK):
        end = min(start + CHUNK, case.context)
        shape = (case.batch * (end - start), case.kv_heads, case.head_dim)
        keys, values = (torch.randn(shape, generator=generator) for _ in "kv")
        layout = case.layout(start, end, size)
        LayerCall(pages, 0, keys, (keys, values), layout, tails, AttentionScope(1, 1)).run(library)
    for blocks in pages.blocks[1:]:
        blocks.copy_(pages.blocks[0])
    if pages.tails is not None:
        pages.tails.copy_(pages.tails[:, :1].expand_as(pages.tails))
    return pages


def decode_calls(library: ctypes.CDLL, scheme: KVScheme, case: Case) -> list[LayerCall]:
    """A call a layer."""
    pages = fill(library, scheme, case)
    layout = case.layout(case.context - 1, case.context, pages.block_size)
    q = torch.randn(case.batch, case.heads, case.head_dim)
    scope, tails = AttentionScope(case.head_dim**-0.5), tuple(range(case.batch))
    return [LayerCall(pages, layer, q, None, layout, tails, scope) for layer in range(case.layers)]


def rounds(
    library: ctypes.CDLL, forms: dict[str, list[LayerCall]], count: int
) -> dict[str, list[float]]:
    """Seconds of all layers' calls, forms in turn, in each of ``count`` rounds."""
    times: dict[str, list[float]] = {name: [] for name in forms}
    for _ in range(count):
        for name, calls in forms.items():
            start = time.perf_counter()
            for call in calls:
                call.run(library)
            times[name].append(time.perf_counter() - start)
    return times


def report(library: ctypes.CDLL, case: Case, schemes: Sequence[KVScheme], count: int) -> None:
    """One line a form."""
    times = rounds(library, {s.name: decode_calls(library, s, case) for s in schemes}, count)
    for name, found in times.items():
        ratios = [a / b for a, b in zip(found, times[WIDE.name], strict=True)]
        micro = statistics.median(found) / case.layers * 1e6
        label = "16 bits" if name == WIDE.name else name
        shape = f"{case.heads}x{case.kv_heads}x{case.head_dim}"
        print(
            f"{shape:>10} {case.batch:>5} {case.context:>7} {label:>8} {micro:>9.0f}"
            f" {statistics.median(ratios):>8.2f}",
            flush=True,
        )


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--shapes", nargs="+", default=["9x3x64", "32x8x128"])
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--threads", type=int, default=0, help="0: all cores")
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    native = load_native()
    if native.library is None:
        raise SystemExit(native.reason)
    if options.threads:
        native.library.qt_pool_start(options.threads)
    print(f"native level {native.level}, torch {torch.__version__}")
    print("     shape batch context     form microseconds ratio")
    for shape in options.shapes:
        heads, kv_heads, head_dim = (int(part) for part in shape.split("x"))
        for batch in options.batch:
            case = Case(heads, kv_heads, head_dim, options.context, batch, options.layers)
            report(native.library, case, list(SCHEMES.values()), options.rounds)


if __name__ == "__main__":
    main()
