"""Tiles measured on a GPU, kept in a file, and read back where they still hold.

A file is of one device, one minor version of Triton and one version of the layout: another
compiler makes other code of the same tiles. What does not match is not used, and says why.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from qtool.runtime.kernels.triton.config import (
    BUCKETS,
    LONG_PROMPT,
    MAX_SPLITS,
    MIN_STEPS_PER_SPLIT,
    ExpertsShape,
    GemmShape,
    ProductShape,
    Tiles,
    TileTable,
    select_config,
    select_experts_config,
)
from qtool.runtime.kernels.triton.layout import LAYOUT_VERSION, Codes
from qtool.runtime.kernels.triton.target import Target

# Seconds of one product in these tiles; ``None`` is dequantize, then the vendor's GEMM.
Timer = Callable[[ProductShape, int, Tiles | None], float]


@dataclass(frozen=True, slots=True)
class TunedFor:
    """What a table holds for: the device by name, and ``major.minor`` of Triton."""

    device: str
    triton: str
    layout: int = LAYOUT_VERSION

    @property
    def file_name(self) -> str:
        """A name of its own for each device."""
        words = "".join(c if c.isalnum() else "-" for c in self.device.lower())
        return f"tiles-{words}.json"


def minor_version(version: str) -> str:
    """``3.9`` of ``3.9.0``."""
    return ".".join(version.split(".")[:2])


def candidates(target: Target, shape: ProductShape, bucket: int) -> tuple[Tiles | None, ...]:
    """What is worth measuring: the rules' choice first, then its neighbours.

    From 256 tokens on also dequantize and the vendor's GEMM, where that is allowed.
    """
    if isinstance(shape, ExpertsShape):
        best = select_experts_config(target, shape, bucket)
        return tuple(dict.fromkeys((best, *_neighbours(shape.one, best, bucket))))
    chosen = select_config(target, shape, bucket)
    found: list[Tiles | None] = [chosen]
    if chosen is not None:
        found += _neighbours(shape, chosen, bucket)
    if bucket >= 256 and shape.dequantizes:
        found.append(None)
    return tuple(dict.fromkeys(found))


def _neighbours(shape: GemmShape, tiles: Tiles, bucket: int) -> Iterator[Tiles]:
    """Twice and half of splits; a stage more and less; the other width with its warps."""
    # A prompt of any length has no workspace for splits.
    most = 1 if bucket == LONG_PROMPT else min(MAX_SPLITS, shape.steps // MIN_STEPS_PER_SPLIT)
    for splits in (2 * tiles.splits, tiles.splits // 2):
        if 1 <= splits <= most:
            yield replace(tiles, splits=splits)
    for stages in (tiles.num_stages - 1, tiles.num_stages + 1):
        if stages >= 2:
            yield replace(tiles, num_stages=stages)
    if tiles.block_n == 128:
        yield replace(tiles, block_n=64, num_warps=max(2, tiles.num_warps // 2))
    elif shape.rows % 128 == 0:
        yield replace(tiles, block_n=128, num_warps=2 * tiles.num_warps)


def tune(
    target: Target, shapes: tuple[ProductShape, ...], seconds: Timer
) -> dict[tuple[ProductShape, int], Tiles | None]:
    """The fastest candidate of every shape and bucket."""
    best: dict[tuple[ProductShape, int], Tiles | None] = {}
    for shape in dict.fromkeys(shapes):
        for bucket in (*BUCKETS, LONG_PROMPT):
            timed = {c: seconds(shape, bucket, c) for c in candidates(target, shape, bucket)}
            best[shape, bucket] = min(timed, key=lambda c: timed[c])
    return best


def write_table(path: Path, key: TunedFor, table: TileTable) -> None:
    """Write a table; it appears all at once."""
    entries = [
        {
            **_entry_of(shape),
            "tokens": bucket,
            "tiles": None if tiles is None else asdict(tiles),
        }
        for (shape, bucket), tiles in table.items()
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps({**asdict(key), "entries": entries}, indent=1), "utf-8")
    partial.replace(path)


def read_table(folder: Path, key: TunedFor) -> tuple[TileTable | None, str | None]:
    """The table of a device, if one holds here; and why an existing one does not."""
    path = folder / key.file_name
    if not path.exists():
        return None, None
    try:
        content: dict[str, Any] = json.loads(path.read_text("utf-8"))
        found = TunedFor(content["device"], content["triton"], content["layout"])
        table = {_key(entry): _tiles(entry["tiles"]) for entry in content["entries"]}
    except (ValueError, KeyError, TypeError) as error:
        return None, f"{path} is damaged ({type(error).__name__}: {error}); run qtool tune again"
    if found != key:
        return None, (
            f"{path} was measured with Triton {found.triton} and layout {found.layout}, here are "
            f"{key.triton} and {key.layout}: not used; run qtool tune again"
        )
    return table, None


def _entry_of(shape: ProductShape) -> dict[str, Any]:
    """A shape as the file has it: a mixture's is its weight's, with two numbers beside it."""
    if isinstance(shape, ExpertsShape):
        return _entry_of(shape.one) | {"experts": shape.experts, "top_k": shape.top_k}
    return {"shape": {**asdict(shape), "codes": shape.codes.value}}


def _key(entry: dict[str, Any]) -> tuple[ProductShape, int]:
    values = entry["shape"]
    shape = GemmShape(**{**values, "codes": Codes(values["codes"])})
    bucket = int(entry["tokens"])
    if "experts" in entry:
        return ExpertsShape(shape, int(entry["experts"]), int(entry["top_k"])), bucket
    return shape, bucket


def _tiles(values: dict[str, int] | None) -> Tiles | None:
    return None if values is None else Tiles(**values)
