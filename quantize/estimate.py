"""What a run would do and take, before it is done: ``qtool quantize --dry-run``.

Plans come from the headers. Time and memory are measured: texts are read, the source is hashed,
and the first blocks are quantized and committed to a folder that is then deleted; all blocks are
alike, so the rest follows. Only the last phase, in which the result runs, is reckoned from the
parts of it that can be measured without a result.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from qtool.calibration.mix import Part, Sampler
from qtool.formats.checkpoint import CheckpointReader
from qtool.formats.tensor_parallel import SIZES, obstacles
from qtool.formats.writer import existing_parent
from qtool.quantize.fingerprint import run_fingerprint
from qtool.quantize.job import Job
from qtool.quantize.kv_cache import describe_request
from qtool.quantize.measure import Runtime, measure_phases
from qtool.quantize.methods import METHODS
from qtool.quantize.options import QuantizeOptions
from qtool.quantize.phases import Phase, PhaseClock, resident_memory
from qtool.quantize.plan import linear_names, weight_name
from qtool.quantize.prepare import (
    Listener,
    Progress,
    check_targets,
    gather_texts,
    plan_job,
    plan_notes,
    result_bytes,
    work_bytes,
)
from qtool.quantize.report import SkippedPair
from qtool.quantize.skipped import skipped_pairs


@dataclass(frozen=True, slots=True)
class ModulePlan:
    """What one linear gets: its scheme, or why it stays as it is."""

    name: str
    shape: tuple[int, ...]
    scheme: str
    method: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """The whole forecast.

    Attributes:
        modules: every linear of the blocks.
        skipped_pairs: smoothing pairs that are left out.
        phases: time and peak memory, in order.
        result_bytes: tensors of the result.
        work_bytes: most that the work folder takes beside them.
        free_bytes: what the output's disk has.
        tensor_parallel: what is in the way of so many devices.
        resident_bytes: memory the process had before it began.
        kv_cache: what is asked of the cache, in words.
    """

    modules: tuple[ModulePlan, ...]
    skipped_pairs: tuple[SkippedPair, ...]
    phases: tuple[Phase, ...]
    result_bytes: int
    work_bytes: int
    free_bytes: int
    tensor_parallel: dict[int, list[str]]
    resident_bytes: int
    kv_cache: str = ""

    @property
    def seconds(self) -> float:
        """Wall time of the whole run."""
        return sum(phase.seconds for phase in self.phases)

    @property
    def peak_bytes(self) -> int:
        """Largest resident set of the whole run."""
        return max(phase.peak_bytes for phase in self.phases)

    @property
    def device_bytes(self) -> int:
        """Largest memory on the GPU."""
        return max(phase.device_bytes for phase in self.phases)

    @property
    def fits_disk(self) -> bool:
        """Whether there is room for the result and the work folder."""
        return self.result_bytes + self.work_bytes <= self.free_bytes

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        totals = {
            "seconds": self.seconds,
            "peak_bytes": self.peak_bytes,
            "peak_device_bytes": self.device_bytes,
            "fits_disk": self.fits_disk,
        }
        return asdict(self) | totals


def estimate_run(
    source: Path,
    out: Path,
    options: QuantizeOptions,
    progress: Listener = lambda _: None,
    *,
    parts: Sequence[Part] | None = None,
    sampler: Sampler | None = None,
    runtime: Runtime | None = None,
) -> Estimate:
    """Forecast :func:`~qtool.quantize.pipeline.quantize_model` with the same arguments.

    ``runtime`` stands for its evaluator. A folder beside ``out`` holds the measured blocks for a
    moment; nothing else is written.

    Raises:
        QtoolError: whatever would stop the run before its first block.
    """
    check_targets(source, out, options)
    resident = resident_memory()
    clock = PhaseClock()
    with CheckpointReader(source) as reader:
        job = plan_job(reader, options)
        for note in plan_notes(job, options):
            progress(Progress("format", 1, 1, note))
        with clock.phase("calibration"):
            texts = gather_texts(
                job, options, parts, sampler, progress, evaluate=runtime is not None
            )
            job = replace(job, ids=texts.ids)
            run_fingerprint(reader, options, texts.ids, texts.held_out_ids)
        phases = [*clock.phases, *measure_phases(job, texts, options, out, progress, runtime)]
        return Estimate(
            modules=_modules(job, options),
            skipped_pairs=skipped_pairs(job, METHODS[options.method].recipe),
            phases=tuple(phases),
            result_bytes=result_bytes(job) * len(options.formats),
            work_bytes=work_bytes(job, texts, options),
            free_bytes=shutil.disk_usage(existing_parent(out)).free,
            tensor_parallel={n: _obstacles(job, n) for n in SIZES},
            resident_bytes=resident,
            kv_cache=describe_request(options),
        )


def _modules(job: Job, options: QuantizeOptions) -> tuple[ModulePlan, ...]:
    config = job.reader.config
    plans = []
    for name in dict.fromkeys([*linear_names(config, job.family), *job.schemes]):
        scheme = job.schemes.get(name)
        weight = weight_name(name, config, job.family)
        shape = job.reader.shape(weight) if weight in job.reader else ()
        used = ("as it is", "-") if scheme is None else (scheme.describe(), options.method)
        plans.append(ModulePlan(name, shape, *used))
    return tuple(plans)


def _obstacles(job: Job, size: int) -> list[str]:
    config = job.reader.config
    weights = {name: weight_name(name, config, job.family) for name in job.schemes}
    shapes = {name: job.reader.shape(weight) for name, weight in weights.items()}
    return obstacles(shapes, config, job.schemes, size)
