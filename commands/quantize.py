"""``qtool quantize``: a model in, a quantized checkpoint and its report out."""

from __future__ import annotations

from pathlib import Path

from rich.table import Table
from torch import Tensor

from qtool.calibration.logits import FinalLogits
from qtool.calibration.mix import SampleRequest, read_mix
from qtool.commands import console, quality
from qtool.commands.self_text import sample_blocks
from qtool.formats.model_source import resolve_model
from qtool.quantize.options import QuantizeOptions
from qtool.quantize.pipeline import Evaluated, Progress, quantize_model
from qtool.quantize.report import Report, summary_rows


def run(
    model: str, out: Path, options: QuantizeOptions, show: console.Show = console.TEXT
) -> Report:
    """Quantize and show the summary. Raises QtoolError."""
    # Before a model is downloaded or imported.
    parts = read_mix(options.calibration) if options.needs_calibration else None
    with show.status(f"resolving {model}"):
        source = resolve_model(model)
    with show.steps() as steps:

        def update(progress: Progress) -> None:
            steps.update(progress.phase, progress.done, progress.total, progress.detail)

        def sample(request: SampleRequest) -> Tensor:
            return sample_blocks(
                request, options.device, lambda done, total: steps.update("sample", done, total)
            )

        def compare(folder: Path, original: FinalLogits) -> Evaluated:
            return quality.compare(folder, original, options.torch_device, steps.update)

        report = quantize_model(
            source, out, options, update, parts=parts, sampler=sample, evaluator=compare
        )
    before, after = folder_bytes(source), folder_bytes(out)
    if show.as_json:
        size = {"out": str(out), "bytes": after, "source_bytes": before}
        console.emit("result", size | report.to_dict())
    else:
        console.out.print(summary_table(report))
        console.out.print(
            f"{out}: {console.size(after)}, {report.bits_per_weight:.2f} bits per quantized weight "
            f"(original {console.size(before)}, {before / after:.2f}x smaller)",
            highlight=False,
            markup=False,
        )
    return report


def summary_table(report: Report) -> Table:
    """One row for every kind of module."""
    table = Table(title=f"{report.method}, scales in {report.dtype}")
    for column in (
        "modules",
        "count",
        "scheme",
        "weight error",
        "output error",
        "worst",
        "fallbacks",
    ):
        table.add_column(
            column, justify="left" if column in ("modules", "scheme", "worst") else "right"
        )
    for row in summary_rows(report):
        output = "-" if row.output_error is None else f"{row.output_error:.4f}"
        table.add_row(
            row.kind,
            str(row.count),
            row.scheme,
            f"{row.weight_error:.4f}",
            output,
            row.worst,
            str(row.fallbacks),
        )
    return table


def folder_bytes(folder: Path) -> int:
    """Bytes of a folder's weights."""
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))
