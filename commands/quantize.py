"""``qtool quantize``: a model in, a quantized checkpoint and its report out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.table import Table
from torch import Tensor

from qtool.calibration.logits import FinalLogits
from qtool.calibration.mix import SampleRequest, read_mix
from qtool.commands import cache_plan, console, native_code, quality
from qtool.commands.self_text import sample_blocks
from qtool.formats.checkpoint import read_json
from qtool.formats.kv_plan import KVPlan
from qtool.formats.model_source import resolve_model
from qtool.quantize.card import command_line, public_name
from qtool.quantize.kv_cache import CacheTask
from qtool.quantize.options import QuantizeOptions
from qtool.quantize.phases import RUN_PATH
from qtool.quantize.pipeline import Evaluated, Origin, Progress, quantize_model
from qtool.quantize.report import FLOAT16_SAFE, Report, summary_rows
from qtool.quantize.work import work_path

# Phases that are news rather than progress.
_NEWS = ("resume", "publish", "format")


def run(
    model: str, out: Path, options: QuantizeOptions, show: console.Show = console.TEXT
) -> Report:
    """Quantize and show the summary. Raises QtoolError."""
    # Before a model is downloaded or imported.
    parts = read_mix(options.calibration) if options.needs_calibration else None
    with show.status(f"resolving {model}"):
        source = resolve_model(model)
    cache_plan.require_runtime(source, options.kv_cache)
    native_code.ready(options, show)
    with _stop_explained(out, show), show.steps() as steps:

        def update(progress: Progress) -> None:
            if progress.phase in _NEWS:
                show.note(progress.detail)
            else:
                steps.update(progress.phase, progress.done, progress.total, progress.detail)

        def sample(request: SampleRequest) -> Tensor:
            return sample_blocks(
                request, options.device, lambda done, total: steps.update("sample", done, total)
            )

        def compare(folder: Path, original: FinalLogits) -> Evaluated:
            return quality.compare(folder, original, options.torch_device, steps.update)

        def plan(task: CacheTask) -> KVPlan:
            return cache_plan.plan(task, steps.update)

        report = quantize_model(
            source,
            out,
            options,
            update,
            parts=parts,
            sampler=sample,
            evaluator=compare,
            planner=plan,
            origin=Origin(public_name(model), command_line(model, options)),
        )
    _show(report, source, out, show)
    return report


@contextmanager
def _stop_explained(out: Path, show: console.Show) -> Iterator[None]:
    """Whoever stops a run is told what it left, and how it goes on."""
    try:
        yield
    except KeyboardInterrupt:
        blocks = len(list(work_path(out).glob("block-*.json")))
        if blocks:
            show.note(
                f"{blocks} finished blocks are in {work_path(out)}: the same command goes on from "
                "there, --restart begins again"
            )
        raise


def _show(report: Report, source: Path, out: Path, show: console.Show) -> None:
    before, after = folder_bytes(source), folder_bytes(out)
    for name in sorted(report.float16_risks):
        show.note(
            f"{name}: activations reach {report.activation_peaks[name]:.0f}; beyond "
            f"{FLOAT16_SAFE:.0f} float16 may overflow: serve this model in bfloat16"
        )
    if report.evaluation is not None and report.calibrated_on_held_out:
        show.note(
            f"{report.evaluation.text} was calibrated on and compared on: other text may lose "
            "more; give another --eval-text"
        )
    for record in report.fallbacks:
        show.note(f"{record.name}: {record.used} instead of {record.asked} ({record.fallback})")
    phases = read_json(out / RUN_PATH)["phases"]
    if show.as_json:
        size = {"out": str(out), "bytes": after, "source_bytes": before, "phases": phases}
        console.emit("result", size | report.to_dict())
        return
    if report.modules:
        console.out.print(summary_table(report))
    if report.evaluation is not None:
        console.out.print(quality.quality_table(report.evaluation))
    if report.kv_cache is not None:
        console.out.print(cache_plan.cache_table(report.kv_cache))
    weights = (
        f"{report.bits_per_weight:.2f} bits per quantized weight (original {console.size(before)}, "
        f"{before / after:.2f}x smaller)"
        if report.modules
        else f"weights as they are, {report.bits_per_weight:.2f} bits each"
    )
    console.out.print(
        f"{out}: {console.size(after)}, {weights}, {report.verified_tensors} tensors read back as "
        "they were written",
        highlight=False,
        markup=False,
    )
    if not show.quiet:
        for phase in phases:
            spent = f"{phase['seconds']:.1f} s, {console.size(phase['peak_bytes'])}"
            console.err.print(f"{phase['name']}: {spent}", highlight=False)


def summary_table(report: Report) -> Table:
    """One row for every kind of module; a scheme that all have stands in the title."""
    rows = summary_rows(report)
    schemes = list(dict.fromkeys(row.scheme for row in rows))
    shared = len(schemes) == 1
    table = Table(
        title=f"{schemes[0] if shared else report.method}, scales in {report.dtype}",
        title_justify="left",
    )
    for column in ("modules", *([] if shared else ["scheme"]), "worst"):
        table.add_column(column)
    for column in ("count", "weight error", "output error", "fallbacks"):
        table.add_column(column, justify="right")
    for row in rows:
        output = "-" if row.output_error is None else f"{row.output_error:.4f}"
        words = [row.kind, *([] if shared else [row.scheme]), _place(row.worst)]
        table.add_row(*words, str(row.count), f"{row.weight_error:.4f}", output, str(row.fallbacks))
    return table


def _place(name: str) -> str:
    """Where a module is, without what its row says already: its layer, and of experts which."""
    numbers = [part for part in name.split(".") if part.isdigit()]
    if not numbers:
        return name
    expert = f", expert {numbers[-1]}" if ".experts." in name else ""
    return f"layer {numbers[0]}{expert}"


def folder_bytes(folder: Path) -> int:
    """Bytes of a folder's weights."""
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))
