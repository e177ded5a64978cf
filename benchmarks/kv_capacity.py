"""How many tokens fit the same memory under each form of the cache, tail pages counted.

    python benchmarks/kv_capacity.py [--kv-cache-memory 16G] [--max-num-seqs 64] [SHAPE ...]

A shape is LAYERSxKV_HEADSxHEAD_DIM of keys and values in bfloat16, or one of the names below. The
cache is sized and laid out as an engine does it, but on torch's meta device, and its buffers are
added up: a tail page for each sequence that may run at a time is among them.

A second table has models in which only some layers see everything: sequences of a length that fit
in one block table for all layers, and in tables of their own for layers with a window.
tests/benchmarks/test_kv_capacity.py holds it against engines.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table

from qtool.commands.cli_options import parse_size
from qtool.runtime.capacity import cache_size
from qtool.runtime.kv_cache import CacheForm, LayerCache
from qtool.runtime.kv_groups import LayerGroups, group_layers
from qtool.runtime.kv_schemes import SCHEMES, KVScheme, LayerSchemes
from qtool.runtime.options import EngineOptions

SHAPES = {"8b": "32x8x128", "smollm2-135m": "30x3x64"}
DTYPE = torch.bfloat16
# Of Gemma 3: the shape, layers that see everything and the window of the others.
MIXED = {"gemma3-270m": ("18x1x256", 3, 512), "gemma3-27b": ("62x16x128", 10, 1024)}
LENGTHS = (512, 2048, 8192, 32768)
# Longer than what fits: nothing but memory bounds the cache.
LONGEST = 2**24


@dataclass(frozen=True, slots=True)
class Capacity:
    """One form.

    Attributes:
        tokens: that fit.
        allocated: bytes of all buffers, tail pages among them.
        tails: bytes of tail pages alone.
    """

    name: str
    tokens: int
    allocated: int
    tails: int


def capacity(scheme: KVScheme, shape: str, options: EngineOptions) -> Capacity:
    """Allocate one form's cache and add it up.

    Raises:
        EngineError: not even one block fits.
    """
    shape = SHAPES.get(shape, shape)
    groups = LayerGroups.single((None,) * int(shape.split("x")[0]))
    blocks, size, cache = _allocate(scheme, shape, groups, options)
    tails = sum(tail.nbytes for tail in cache.tails)
    allocated = sum(pool.nbytes for pool in cache.pools) + tails
    return Capacity(scheme.name, blocks * size, allocated, tails)


def sequences(
    scheme: KVScheme, name: str, length: int, options: EngineOptions
) -> tuple[float, float]:
    """Sequences of a length that fit: in one table, and with windows that give blocks back.

    Args:
        name: of :data:`MIXED`; the model is loaded for the longest of :data:`LENGTHS`.
    """
    shape, full, window = MIXED[name]
    layers, size = int(shape.split("x")[0]), scheme.block_size(None)
    windows = [None] * full + [window] * (layers - full)
    found = []
    for groups in (LayerGroups.single(windows), group_layers(windows, size, max(LENGTHS))):
        blocks, _, cache = _allocate(scheme, shape, groups, options)
        allocated = sum(tensor.nbytes for tensor in (*cache.pools, *cache.tails))
        assert options.kv_cache_memory is not None and allocated <= options.kv_cache_memory
        found.append(blocks / groups.blocks(length, size))
    return found[0], found[1]


def _allocate(
    scheme: KVScheme, shape: str, groups: LayerGroups, options: EngineOptions
) -> tuple[int, int, LayerCache]:
    """Blocks, their size, and a cache of them: shapes and sizes without memory."""
    layers, heads, head_dim = map(int, shape.split("x"))
    schemes = LayerSchemes.uniform(scheme, layers)
    block_size, wide = schemes.block_size(None), DTYPE.itemsize
    bytes_per_token = schemes.page_bytes(block_size, heads, head_dim, wide) // block_size
    tail_bytes = schemes.tail_bytes(heads, head_dim, wide)
    slot_bytes = groups.slot_bytes(bytes_per_token)
    size = cache_size(options, LONGEST, block_size, slot_bytes, tail_bytes, torch.device("cpu"))
    form, pages = CacheForm(schemes), (size.blocks, block_size, heads, head_dim)
    cache = LayerCache(form, pages, size.tails, DTYPE, torch.device("meta"), groups=groups)
    return size.blocks, block_size, cache


def main() -> None:
    """Measure and print."""
    arguments = _parser().parse_args()
    options = EngineOptions(
        model="shape",
        kv_cache_memory=parse_size(arguments.kv_cache_memory),
        max_num_seqs=arguments.max_num_seqs,
    )
    console = Console()
    for shape in arguments.shapes or SHAPES:
        rows = [capacity(scheme, shape, options) for scheme in SCHEMES.values()]
        console.print(_table(shape, rows))
    if not arguments.shapes:
        for name in MIXED:
            console.print(_mixed_table(name, options))


def _table(shape: str, rows: list[Capacity]) -> Table:
    table = Table("cache", "tokens", "of 16 bits", "GiB allocated", "of tail pages", title=shape)
    for row in rows:
        table.add_row(
            row.name,
            f"{row.tokens:,}",
            f"{row.tokens / rows[0].tokens:.3f}",
            f"{row.allocated / 2**30:.3f}",
            f"{row.tails / 2**30:.3f}",
        )
    return table


def _mixed_table(name: str, options: EngineOptions) -> Table:
    lengths = [f"{length:,} tokens" for length in LENGTHS]
    table = Table("cache", *lengths, title=f"{name}: sequences in one table, and in groups")
    for scheme in SCHEMES.values():
        pairs = [sequences(scheme, name, length, options) for length in LENGTHS]
        cells = [f"{one:,.0f}  {groups:,.0f}  x{groups / one:.2f}" for one, groups in pairs]
        table.add_row(scheme.name, *cells)
    return table


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shapes", nargs="*", metavar="SHAPE", help=f"default: {', '.join(SHAPES)}")
    parser.add_argument("--kv-cache-memory", default="16G")
    parser.add_argument("--max-num-seqs", type=int, default=64)
    return parser


if __name__ == "__main__":
    main()
