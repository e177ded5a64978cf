"""``qtool quantize --dry-run``: what a run would do and take, and whether it would fit."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from qtool.calibration.logits import FinalLogits
from qtool.calibration.mix import SampleRequest, read_mix
from qtool.commands import cache_plan, console, native_code
from qtool.commands.self_text import sample_blocks
from qtool.errors import QuantizationError
from qtool.formats.model_source import resolve_model
from qtool.formats.tensor import QuantizedTensor
from qtool.quantize.estimate import Estimate, ModulePlan, estimate_run
from qtool.quantize.measure import Runtime
from qtool.quantize.methods import METHODS
from qtool.quantize.options import QuantizeOptions
from qtool.quantize.prepare import Progress
from qtool.quantize.skipped import skip_notes
from qtool.runtime.capacity import available_cpu_memory
from qtool.runtime.evaluate import evaluate
from qtool.runtime.kernels import select_backend
from qtool.runtime.kernels.backend import LinearOp


def run(
    model: str, out: Path, options: QuantizeOptions, show: console.Show = console.TEXT
) -> Estimate:
    """Forecast a run and show it.

    Raises:
        QuantizationError: it will not fit the memory or the disk; the forecast was shown before.
        QtoolError: what would stop the run at once.
    """
    parts = read_mix(options.calibration) if options.needs_calibration else None
    with show.status(f"resolving {model}"):
        source = resolve_model(model)
    cache_plan.require_runtime(source, options.kv_cache)
    native_code.ready(options, show)
    available = available_cpu_memory()
    with show.steps() as steps:

        def update(progress: Progress) -> None:
            if progress.phase == "format":
                show.note(progress.detail)
            else:
                steps.update(progress.phase, progress.done, progress.total, progress.detail)

        def sample(request: SampleRequest) -> Tensor:
            return sample_blocks(request, options.device)

        def score(original: FinalLogits) -> None:
            evaluate(original, original.ids[:1], original)

        estimate = estimate_run(
            source,
            out,
            options,
            update,
            parts=parts,
            sampler=sample,
            runtime=Runtime(score, partial(_linear, options.torch_device)),
        )
    obstacles = _obstacles(estimate, available)
    if show.as_json:
        facts = {"available_bytes": available, "fits": not obstacles}
        console.emit("result", facts | estimate.to_dict())
    else:
        _print(estimate, options, available)
    if obstacles:
        raise QuantizationError(f"it will not fit: {'; '.join(obstacles)}")
    return estimate


def _linear(device: torch.device, weight: QuantizedTensor) -> LinearOp:
    """What an evaluation makes of a weight."""
    backend = select_backend("auto", device, torch.float32, quantized=True).backend
    return backend.linear(weight, None)


def _obstacles(estimate: Estimate, available: int) -> list[str]:
    """What there is too little of, with the remedy."""
    found = []
    needed = estimate.peak_bytes - estimate.resident_bytes
    if needed > available:
        most = max(estimate.phases, key=lambda phase: phase.peak_bytes).name
        found.append(
            f"it needs {console.size(needed)} of memory (phase {most}) and "
            f"{console.size(available)} are free: ask for fewer or shorter --samples; "
            "--eval-windows 0 leaves the comparison out, for which the result is in memory"
        )
    if torch.cuda.is_available() and estimate.device_bytes:
        free, _ = torch.cuda.mem_get_info()
        if estimate.device_bytes > free:
            found.append(
                f"it needs {console.size(estimate.device_bytes)} on the GPU and "
                f"{console.size(free)} are free: use --device cpu"
            )
    if not estimate.fits_disk:
        needed = estimate.result_bytes + estimate.work_bytes
        found.append(
            f"it needs {console.size(needed)} of disk and {console.size(estimate.free_bytes)} are "
            "free: choose a folder on another disk"
        )
    return found


def _print(estimate: Estimate, options: QuantizeOptions, available: int) -> None:
    if METHODS[options.method].recipe.family is None:
        console.out.print("weights: as they are")
    else:
        console.out.print(_module_table(estimate.modules))
    for line in skip_notes(estimate.skipped_pairs):
        console.out.print(line, highlight=False, markup=False)
    console.out.print(_phase_table(estimate))
    lines = [
        f"memory: {console.size(estimate.peak_bytes)} at most, {console.size(available)} free",
        f"disk: {console.size(estimate.result_bytes)} for the result and "
        f"{console.size(estimate.work_bytes)} for the work folder, "
        f"{console.size(estimate.free_bytes)} free",
    ]
    if estimate.kv_cache:
        lines.append(f"KV cache: {estimate.kv_cache}")
    for size, obstacles in estimate.tensor_parallel.items():
        says = "; ".join(obstacles[:3]) if obstacles else "divides evenly"
        lines.append(f"tensor parallel over {size}: {says}")
    for line in lines:
        console.out.print(line, highlight=False, markup=False)


def _module_table(modules: tuple[ModulePlan, ...]) -> Table:
    """One row for all modules that get the same, kind by kind; ``--json`` has every one."""
    kinds: dict[tuple[Any, ...], int] = {}
    for plan in modules:
        key = (plan.name.rpartition(".")[2], plan.shape, plan.scheme, plan.method)
        kinds[key] = kinds.get(key, 0) + 1
    table = Table()
    for column in ("modules", "count", "shape", "scheme", "method"):
        table.add_column(column, justify="right" if column == "count" else "left")
    for (kind, shape, scheme, method), count in kinds.items():
        table.add_row(kind, str(count), " x ".join(map(str, shape)), scheme, method)
    return table


def _phase_table(estimate: Estimate) -> Table:
    table = Table()
    for column in ("phase", "time", "memory", "on the GPU"):
        table.add_column(column, justify="left" if column == "phase" else "right")
    for phase in estimate.phases:
        device = console.size(phase.device_bytes) if phase.device_bytes else "-"
        table.add_row(phase.name, f"{phase.seconds:.1f} s", console.size(phase.peak_bytes), device)
    table.add_row(
        "all",
        f"{estimate.seconds:.1f} s",
        console.size(estimate.peak_bytes),
        console.size(estimate.device_bytes) if estimate.device_bytes else "-",
    )
    return table
