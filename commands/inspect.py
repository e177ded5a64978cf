"""``qtool inspect``: what a checkpoint is, from its headers and what lies beside its weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.markup import escape
from rich.table import Table

from qtool.commands import console
from qtool.errors import CheckpointError
from qtool.formats.inventory import KINDS, Inventory, Module, take_inventory
from qtool.formats.kv_plan import KVPlan, read_kv_plan
from qtool.formats.reader import read_json
from qtool.formats.registry import quantization_source
from qtool.formats.validation.validate import layer_pattern
from qtool.quantize.report import REPORT_PATH

# What a report says about a run, without its records of modules.
_MANIFEST = ("base_model", "command", "method", "qtool_version", "dtype", "calibration")


@dataclass(frozen=True, slots=True)
class Row:
    """All modules that differ only by the number of their layer; or one module."""

    name: str
    kind: str
    count: int
    shape: tuple[int, ...]
    scheme: str
    parameters: int
    num_bytes: int


def run(path: Path, show: console.Show = console.TEXT, *, every: bool = False) -> None:
    """Look and show.

    Args:
        path: a model folder, a safetensors file or a GGUF file.
        show: how.
        every: a row for each module, instead of one for all layers.

    Raises:
        CheckpointError: there is nothing of that name, or it is damaged.
    """
    if not path.exists():
        raise CheckpointError(f"{path} does not exist; give a folder, .safetensors or .gguf file")
    inventory = take_inventory(path)
    modules = rows(inventory.modules, every=every)
    beside = _beside(path, inventory) if path.is_dir() else {}
    if show.as_json:
        console.emit("result", _facts(path, inventory, modules) | beside)
        return
    console.out.print(_summary(path, inventory, beside))
    console.out.print(_kind_table(inventory.modules))
    console.out.print(_module_table(modules))


def rows(modules: Sequence[Module], *, every: bool = False) -> list[Row]:
    """Modules, those that differ only by layer in one row."""
    groups: dict[tuple[Any, ...], list[Module]] = {}
    for module in modules:
        name = module.name if every else layer_pattern(module.name)
        groups.setdefault((name, module.kind, module.shape, module.scheme), []).append(module)
    return [
        Row(
            name=name,
            kind=kind,
            count=len(same),
            shape=shape,
            scheme=scheme,
            parameters=sum(module.parameters for module in same),
            num_bytes=sum(module.num_bytes for module in same),
        )
        for (name, kind, shape, scheme), same in groups.items()
    ]


def _facts(path: Path, inventory: Inventory, modules: Sequence[Row]) -> dict[str, Any]:
    return {
        "path": str(path),
        "format": inventory.format,
        "architecture": inventory.architecture,
        "parameters": inventory.parameters,
        "weight_bytes": inventory.num_bytes,
        "bits_per_weight": _bits(inventory.num_bytes, inventory.parameters),
        "files": dict(inventory.files),
        "kinds": [asdict(kind) for kind in kinds(inventory.modules)],
        "modules": [asdict(row) for row in modules],
    }


@dataclass(frozen=True, slots=True)
class KindRow:
    """All modules of a kind."""

    kind: str
    modules: int
    parameters: int
    num_bytes: int
    bits_per_weight: float | None


def kinds(modules: Sequence[Module]) -> list[KindRow]:
    """Sums over the modules of each kind that is there."""
    found = []
    for kind in KINDS:
        same = [module for module in modules if module.kind == kind]
        parameters, num_bytes = (
            sum(module.parameters for module in same),
            sum(module.num_bytes for module in same),
        )
        if same:
            row = KindRow(kind, len(same), parameters, num_bytes, _bits(num_bytes, parameters))
            found.append(row)
    return found


def _bits(num_bytes: int, parameters: int) -> float | None:
    return 8 * num_bytes / parameters if parameters else None


def _beside(folder: Path, inventory: Inventory) -> dict[str, Any]:
    """What the config and the files in the folder ``qtool`` say."""
    block, _ = quantization_source(folder, inventory.config)
    report, plan = _optional(folder / REPORT_PATH), read_kv_plan(folder)
    evaluation = report.get("evaluation") or {}
    return {
        "kv_cache_scheme": (block or {}).get("kv_cache_scheme"),
        "kv_plan": None if plan is None else plan.to_dict(),
        "manifest": {key: report[key] for key in _MANIFEST if key in report} or None,
        "quality": evaluation or None,
    }


def _plan_words(plan: Mapping[str, Any]) -> str:
    """Schemes by number of layers, bits, and the cost on held-out text."""
    words = [KVPlan(plan["name"], tuple(plan["layers"])).describe()]
    if plan["bits"] is not None:
        words.append(f"{plan['bits']:.2f} bits an element")
    if measured := plan["measured"]:
        words.append(f"KL {measured['kl']:.5f} on {measured['text']}")
    return ", ".join(words)


def _optional(path: Path) -> dict[str, Any]:
    """A JSON object that need not be there.

    Raises:
        CheckpointError: it is there and damaged.
    """
    return read_json(path) if path.is_file() else {}


def _summary(path: Path, inventory: Inventory, beside: Mapping[str, Any]) -> Table:
    table = Table(show_header=False, box=None)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in (*_identity(path, inventory), *_records(beside)):
        table.add_row(name, escape(value))
    return table


def _identity(path: Path, inventory: Inventory) -> Iterator[tuple[str, str]]:
    bits = _bits(inventory.num_bytes, inventory.parameters)
    yield "model", str(path)
    yield "architecture", inventory.architecture
    yield "format", inventory.format
    yield "parameters", f"{inventory.parameters:,}"
    yield "bits per weight", "-" if bits is None else f"{bits:.3f}, everything included"
    files = inventory.files
    yield "on disk", f"{console.size(sum(files.values()))} in {len(files)} weight files"
    if inventory.config.get("tie_word_embeddings") is True:
        yield "head", "tied to the embedding"


def _records(beside: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if scheme := beside.get("kv_cache_scheme"):
        told = ", ".join(f"{key} {scheme[key]}" for key in ("num_bits", "type", "strategy"))
        yield "KV cache", f"static scales: {told}"
    if plan := beside.get("kv_plan"):
        yield "KV plan", _plan_words(plan)
    manifest = beside.get("manifest") or {}
    for name, key in (("made from", "base_model"), ("command", "command"), ("by", "qtool_version")):
        if manifest.get(key):
            yield name, f"qtool {manifest[key]}" if name == "by" else str(manifest[key])
    if calibration := manifest.get("calibration"):
        sources = ", ".join(str(source.get("source")) for source in calibration["sources"])
        yield "calibration", f"{calibration['tokens']} tokens of {sources}"
    if quality := (beside.get("quality") or {}).get("quality"):
        yield "quality", ", ".join(f"{key} {value:.4g}" for key, value in quality.items())


def _kind_table(modules: Sequence[Module]) -> Table:
    table = Table()
    for column in ("kind", "modules", "parameters", "bytes", "bits per weight"):
        table.add_column(column, justify="left" if column == "kind" else "right")
    for row in kinds(modules):
        bits = "-" if row.bits_per_weight is None else f"{row.bits_per_weight:.3f}"
        count, size = str(row.modules), console.size(row.num_bytes)
        table.add_row(row.kind, count, f"{row.parameters:,}", size, bits)
    return table


def _module_table(modules: Sequence[Row]) -> Table:
    table = Table(box=SIMPLE, padding=(0, 1, 0, 0))
    for column in ("module", "count", "shape", "scheme", "bits"):
        justify = "right" if column in ("count", "bits") else "left"
        table.add_column(column, justify=justify, overflow="fold")  # type: ignore[arg-type]
    for row in modules:
        bits = _bits(row.num_bytes, row.parameters)
        table.add_row(
            escape(row.name),
            str(row.count),
            " x ".join(map(str, row.shape)),
            escape(row.scheme),
            "-" if bits is None else f"{bits:.3f}",
        )
    return table
