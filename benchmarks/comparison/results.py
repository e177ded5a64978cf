"""An outcome for people, for programs, and for the record in ``benchmarks/results``."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from comparison.contest import Entry, Outcome

FOLDER = Path(__file__).resolve().parents[1] / "results"
COLUMNS = (
    *("date", "machine", "threads", "model", "engine", "version", "form", "weight_bytes"),
    *("scenario", "tokens_per_second", "slowest", "fastest", "with_prompts", "roof", "fraction"),
    *("read_gbs", "perplexity", "kl"),
)


@dataclass(frozen=True, slots=True)
class Machine:
    """Where and when.

    Attributes:
        units: Gop/s or GFLOP/s of every multiply-add unit, on ``threads`` cores.
    """

    cpu: str
    threads: int
    date: str
    units: dict[str, float]

    @property
    def file_name(self) -> str:
        """One file a kind of CPU."""
        return re.sub(r"[^a-z0-9]+", "-", self.cpu.lower()).strip("-") + ".csv"


def cpu_name(cpuinfo: str) -> str:
    """The model in the text of /proc/cpuinfo, with family, model and stepping.

    Virtual machines hide the product's name; the numbers tell the generation.
    """
    fields = dict(
        (part.strip() for part in line.split(":", 1))
        for line in cpuinfo.split("\n\n")[0].splitlines()
        if ":" in line
    )
    name = fields.get("model name", "unknown")
    numbers = [fields.get(key, "?") for key in ("cpu family", "model", "stepping")]
    return f"{name} {'.'.join(numbers)}"


def speed_table(outcome: Outcome) -> Table:
    """One row a scenario and engine."""
    table = Table(title=f"{outcome.model}: tokens per second, medians")
    table.add_column("scenario")
    table.add_column("engine")
    for column in ("median", "range", "with prompts", "roof", "of roof", "ours / best peer"):
        table.add_column(column, justify="right")
    for scenario, engines in outcome.entries.items():
        for engine, entry in engines.items():
            ratio = outcome.ratios.get(scenario) if engine == next(iter(engines)) else None
            table.add_row(scenario, engine, *_speed_cells(entry), _ratio(ratio))
        table.add_section()
    return table


def quality_table(outcome: Outcome) -> Table:
    """What each engine ran, and what its weights and arithmetic cost."""
    table = Table(title=f"{outcome.model}: what ran")
    for column in ("engine", "version", "form"):
        table.add_column(column)
    for column in ("weights", "KV a token", "perplexity", "KL", "top-1"):
        table.add_column(column, justify="right")
    for engine, about in outcome.engines.items():
        found = outcome.quality.get(engine)
        cells = (
            ("-", "-", "-")
            if found is None
            else (f"{found['perplexity']:.2f}", f"{found['kl']:.4f}", f"{found['top1']:.1%}")
        )
        sizes = f"{about.weight_bytes / 1e6:.1f} MB", f"{about.kv_bytes_per_token} B"
        table.add_row(engine, about.version, about.form, *sizes, *cells)
    return table


def to_json(machine: Machine, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Everything; ``ratios`` at the top are the first model's."""
    return {
        "ratios": outcomes[0].ratios,
        "machine": asdict(machine),
        "models": {
            outcome.model: {"ratios": outcome.ratios, **asdict(outcome)} for outcome in outcomes
        },
    }


def append_csv(folder: Path, machine: Machine, outcomes: Sequence[Outcome]) -> Path:
    """Add a row for every measurement to the machine's file."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / machine.file_name
    is_new = not path.exists()
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if is_new:
            writer.writeheader()
        for outcome in outcomes:
            writer.writerows(rows(machine, outcome))
    return path


def rows(machine: Machine, outcome: Outcome) -> Iterator[dict[str, Any]]:
    """The measurements of one model, by :data:`COLUMNS`."""
    for scenario, engines in outcome.entries.items():
        for engine, entry in engines.items():
            about, quality = outcome.engines[engine], outcome.quality.get(engine, {})
            yield {
                "date": machine.date,
                "machine": machine.cpu,
                "threads": machine.threads,
                "model": outcome.model,
                "engine": engine,
                "version": about.version,
                "form": about.form,
                "weight_bytes": about.weight_bytes,
                "scenario": scenario,
                "tokens_per_second": f"{entry.rates.phase:.1f}",
                "slowest": f"{entry.slowest:.1f}",
                "fastest": f"{entry.fastest:.1f}",
                "with_prompts": f"{entry.rates.overall:.1f}",
                "roof": f"{entry.roof:.1f}",
                "fraction": f"{entry.fraction:.3f}",
                "read_gbs": f"{outcome.read_gbs[scenario]:.1f}",
                "perplexity": f"{quality['perplexity']:.3f}" if quality else "",
                "kl": f"{quality['kl']:.4f}" if quality else "",
            }


def _speed_cells(entry: Entry) -> tuple[str, ...]:
    return (
        f"{entry.rates.phase:.1f}",
        f"{entry.slowest:.0f} to {entry.fastest:.0f}",
        f"{entry.rates.overall:.1f}",
        f"{entry.roof:.0f}",
        f"{entry.fraction:.0%}",
    )


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}x"
