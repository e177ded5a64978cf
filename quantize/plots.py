"""Error, loss and activations over the depth of a model, as pictures (extra ``plots``)."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from qtool.quantize.report import FLOAT16_SAFE, Report

# Inches; readable on a model card.
SIZE = (8, 4)


@dataclass(frozen=True, slots=True)
class Picture:
    """One picture.

    Attributes:
        values: by full module name.
        label: what they are.
        limit: a line not to be crossed, on a logarithmic axis.
    """

    values: Mapping[str, float]
    label: str
    limit: float | None = None


def draw_plots(report: Report) -> dict[str, bytes]:
    """PNG files by name; the same report gives the same bytes.

    Raises:
        ImportError: matplotlib is not installed.
    """
    return {name: _draw(picture) for name, picture in pictures(report).items()}


def pictures(report: Report) -> dict[str, Picture]:
    """What there is to be seen, by file name."""
    found: dict[str, Picture] = {}
    if report.modules:
        errors = {record.name: record.weight_error for record in report.modules}
        found["errors.png"] = Picture(errors, "weight error, relative")
    losses = {r.name: r.output_error for r in report.modules if r.output_error is not None}
    if losses:
        found["losses.png"] = Picture(losses, "output error on calibration text, relative")
    if report.activation_peaks:
        peaks = report.activation_peaks
        found["activations.png"] = Picture(peaks, "largest |input|", FLOAT16_SAFE)
    return found


def by_layer(values: Mapping[str, float]) -> dict[str, list[tuple[int, float]]]:
    """Values by full module name -> for each kind of module, (layer, value) in order.

    Of many modules of a kind in one layer, which are experts, the largest value counts.
    """
    lines: dict[str, dict[int, float]] = {}
    for name, value in values.items():
        numbers = [int(part) for part in name.split(".") if part.isdigit()]
        if numbers:
            line = lines.setdefault(name.rpartition(".")[2], {})
            line[numbers[0]] = max(value, line.get(numbers[0], value))
    return {kind: list(line.items()) for kind, line in lines.items()}


def lines(values: Mapping[str, float]) -> list[tuple[list[str], list[tuple[int, float]]]]:
    """:func:`by_layer` as lines to draw: kinds that have the same values share one.

    Linears that read the same input have the same activations, and one line would hide another.
    """
    found: dict[tuple[tuple[int, float], ...], list[str]] = {}
    for kind, points in by_layer(values).items():
        found.setdefault(tuple(points), []).append(kind)
    return [(kinds, list(points)) for points, kinds in found.items()]


def _draw(picture: Picture) -> bytes:
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=SIZE, layout="constrained")
    axes = figure.add_subplot()
    draw: Callable[..., object] = axes.plot if picture.limit is None else axes.semilogy
    for kinds, points in lines(picture.values):
        draw(*zip(*points, strict=True), marker=".", label=", ".join(kinds))
    if picture.limit is not None:
        axes.axhline(picture.limit, color="black", linestyle=":", label="float16 at risk")
    axes.set_xlabel("layer")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylabel(picture.label)
    axes.grid(alpha=0.3)
    # Beside the lines, which may be anywhere.
    figure.legend(loc="outside right upper", fontsize="small")
    file = io.BytesIO()
    # Without the library's version, so that nothing but the figures decides the bytes.
    figure.savefig(file, format="png", dpi=120, metadata={"Software": None})
    return file.getvalue()
