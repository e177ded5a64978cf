"""Error and activations over the depth of the model, as pictures (needs the extra ``plots``)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from qtool.quantize.report import FLOAT16_SAFE, Report

# Inches; readable on a model card.
SIZE = (8, 4)


def write_plots(report: Report, folder: Path) -> list[str]:
    """Write PNG files into ``folder``; returns their names. The same report gives the same bytes.

    Raises:
        ImportError: matplotlib is not installed.
    """
    measured = all(record.output_error is not None for record in report.modules)
    errors = {
        r.name: (r.output_error if measured else r.weight_error) or 0.0 for r in report.modules
    }
    what = "output error, relative" if measured else "weight error, relative"
    plots: dict[str, tuple[Mapping[str, float], str, float | None]] = {}
    if report.modules:
        plots["errors.png"] = (errors, what, None)
    if report.activation_peaks:
        plots["activations.png"] = (report.activation_peaks, "largest |input|", FLOAT16_SAFE)
    for name, (values, label, limit) in plots.items():
        _plot(values, label, limit, folder / name)
    return list(plots)


def by_layer(values: Mapping[str, float]) -> dict[str, list[tuple[int, float]]]:
    """Values by full module name -> for each kind of module, (layer, value) in order."""
    lines: dict[str, list[tuple[int, float]]] = {}
    for name, value in values.items():
        numbers = [int(part) for part in name.split(".") if part.isdigit()]
        if numbers:
            lines.setdefault(name.rpartition(".")[2], []).append((numbers[0], value))
    return lines


def _plot(values: Mapping[str, float], label: str, limit: float | None, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=SIZE, layout="constrained")
    axes = figure.add_subplot()
    draw: Callable[..., object] = axes.plot if limit is None else axes.semilogy
    for kind, points in by_layer(values).items():
        draw(*zip(*points, strict=True), marker=".", label=kind)
    if limit is not None:
        axes.axhline(limit, color="black", linestyle=":", label="float16 at risk")
    axes.set_xlabel("layer")
    axes.set_ylabel(label)
    axes.grid(alpha=0.3)
    axes.legend(ncols=2, fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    # Without the library's version, so that nothing but the figures decides the bytes.
    figure.savefig(path, dpi=120, metadata={"Software": None})
