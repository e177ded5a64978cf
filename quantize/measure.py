"""Time and memory of a run's phases, from a few of its blocks done for real."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from qtool.calibration.logits import FinalLogits
from qtool.calibration.walk import Walk
from qtool.formats.writer import PARTIAL, existing_parent
from qtool.quantize.blocks import quantize_blocks
from qtool.quantize.job import Job
from qtool.quantize.kv_cache import num_window_runs
from qtool.quantize.options import QuantizeOptions
from qtool.quantize.phases import Phase, PhaseClock
from qtool.quantize.prepare import Listener, Progress, Texts, result_bytes
from qtool.quantize.work import WorkFolder

# The first block warms caches up; the second is like all others.
MEASURED_BLOCKS = 2

# Scores one window of a model against itself: what the end of an evaluation costs per window.
Scorer = Callable[[FinalLogits], None]

# Writing reads, hashes and writes every byte, reading back hashes it again: seconds per byte. On a
# busy core of a Sapphire Rapids 390 MB took 2.0 and .4 s.
WRITE_SECONDS = 5e-9
VERIFY_SECONDS = 1e-9


def measure_phases(
    job: Job,
    texts: Texts,
    options: QuantizeOptions,
    out: Path,
    progress: Listener,
    scorer: Scorer | None,
) -> list[Phase]:
    """Phases of a run after its texts are read: quantize, write, verify, evaluate, kv cache.

    A folder beside ``out`` holds the measured blocks for a moment.
    """
    total = len(job.family.block_prefixes(job.reader.config))
    count = min(MEASURED_BLOCKS, total)
    stamps: list[tuple[float, float]] = []
    clock = PhaseClock()

    def listen(step: Progress) -> None:
        stamps.append((time.perf_counter(), time.process_time()))
        progress(Progress("measure", step.done, count, step.detail))

    parent = existing_parent(out)
    with (
        tempfile.TemporaryDirectory(prefix=f"{out.name}{PARTIAL}", dir=parent) as folder,
        WorkFolder(Path(folder) / "dry", {}) as work,
    ):
        with clock.phase("quantize"):
            quantize_blocks(job, texts, options, work, listen, stop=count)
        quantize = _all_blocks(clock.phases[0], stamps, total)
        phases = [quantize, *_copying(result_bytes(job), quantize)]
        if scorer is not None and texts.held_out_ids is not None:
            held_out = texts.held_out_ids
            evaluation = _evaluation(job, held_out, scorer, total)
            if not job.keeps_weights:
                phases.append(evaluation)
            if options.kv_cache is not None:
                runs = num_window_runs(options, total, len(held_out))
                phases.append(_cache(evaluation, runs / len(held_out)))
    return phases


def _all_blocks(measured: Phase, stamps: list[tuple[float, float]], total: int) -> Phase:
    """The phase with all blocks, each like the last measured one."""
    rest = total - len(stamps)
    if len(stamps) < 2:
        return measured
    wall, cpu = (stamps[-1][i] - stamps[-2][i] for i in (0, 1))
    return replace(
        measured,
        seconds=measured.seconds + rest * wall,
        cpu_seconds=measured.cpu_seconds + rest * cpu,
    )


def _copying(num_bytes: int, before: Phase) -> list[Phase]:
    """The result written and read back; one tensor at a time adds nothing to the memory."""
    return [
        replace(before, name=name, seconds=num_bytes * cost, cpu_seconds=num_bytes * cost)
        for name, cost in (("write", WRITE_SECONDS), ("verify", VERIFY_SECONDS))
    ]


def _cache(evaluation: Phase, times: float) -> Phase:
    """The result's runs with other caches: each window takes what one of the evaluation does."""
    return replace(
        evaluation,
        name="kv cache",
        seconds=times * evaluation.seconds,
        cpu_seconds=times * evaluation.cpu_seconds,
    )


def _evaluation(job: Job, ids: torch.Tensor, scorer: Scorer, total: int) -> Phase:
    """The original's ends and one window are measured; the result is taken to run as fast.

    In memory the result adds its file, which is mapped, its weights, and embedding and head in
    float32.
    """
    clock = PhaseClock()
    with torch.no_grad():
        walk = Walk(job.reader, job.family, job.device, held_out=ids)
        walk.advance()
        if total > 1:
            with clock.phase("block"):
                walk.advance()
        else:
            clock.phases.append(Phase("block", 0.0, 0.0, 0))
        hidden = walk.state.held_out
        assert hidden is not None
        del walk
        with clock.phase("ends"):
            final = FinalLogits(job.reader, job.family, job.device, ids, hidden)
            scorer(final)
        with clock.phase("window"):
            scorer(final)
    block, ends, window = clock.phases
    config = job.reader.config
    added = 2 * 4 * int(config["vocab_size"]) * int(config["hidden_size"])
    added += 2 * result_bytes(job)
    return Phase(
        "evaluate",
        ends.seconds + total * block.seconds + (len(ids) - 1) * window.seconds,
        ends.cpu_seconds + total * block.cpu_seconds + (len(ids) - 1) * window.cpu_seconds,
        max(ends.peak_bytes, window.peak_bytes) + added,
        max(ends.device_bytes, window.device_bytes) + added if job.device.type == "cuda" else 0,
    )
