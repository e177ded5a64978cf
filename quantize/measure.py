"""Time and memory of a run's phases, from a few of its blocks done for real."""

from __future__ import annotations

import math
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from qtool.calibration.logits import FinalLogits
from qtool.calibration.walk import Walk
from qtool.formats.scheme import WeightScheme
from qtool.formats.tensor import QuantizedTensor
from qtool.formats.writer import PARTIAL, existing_parent
from qtool.quantize.blocks import quantize_blocks
from qtool.quantize.job import Job
from qtool.quantize.kv_cache import cache_runs
from qtool.quantize.options import QuantizeOptions
from qtool.quantize.phases import Phase, PhaseClock
from qtool.quantize.plan import is_tied
from qtool.quantize.prepare import Listener, Progress, Texts, result_bytes
from qtool.quantize.rtn import quantize_rtn
from qtool.quantize.work import WorkFolder

# The first block warms caches up; the second is like all others.
MEASURED_BLOCKS = 2

# Rows on which linears are timed: as many as an evaluation's chunks have.
TIMED_ROWS = 256

# Writing reads, hashes and writes every byte, reading back hashes it again: seconds per byte. On a
# busy core of a Sapphire Rapids 390 MB took 2.0 and .4 s.
WRITE_SECONDS = 5e-9
VERIFY_SECONDS = 1e-9


@dataclass(frozen=True, slots=True)
class Runtime:
    """What a forecast asks of the half that runs results.

    Attributes:
        score: scores one window of a model against itself: what the end of an evaluation costs.
        linear: the operation that it makes of a quantized weight, in float32.
    """

    score: Callable[[FinalLogits], None]
    linear: Callable[[QuantizedTensor], Callable[[Tensor], Tensor]]


@dataclass(frozen=True, slots=True)
class _Evaluation:
    """The last phase, and what its parts take: wall and processor seconds of a window.

    Attributes:
        load: what comes before the first window, once.
        run: through the result.
        score: logits of both sides, and what is made of them.
    """

    phase: Phase
    load: tuple[float, float]
    run: tuple[float, float]
    score: tuple[float, float]


def measure_phases(
    job: Job,
    texts: Texts,
    options: QuantizeOptions,
    out: Path,
    progress: Listener,
    runtime: Runtime | None,
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
        if runtime is not None and texts.held_out_ids is not None:
            held_out = texts.held_out_ids
            evaluation = _evaluation(job, held_out, runtime, total)
            if not job.keeps_weights:
                phases.append(evaluation.phase)
            if options.kv_cache is not None:
                runs = cache_runs(options, total, *held_out.shape)
                phases.append(_cache(job, evaluation, *runs))
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


def _cache(job: Job, evaluation: _Evaluation, runs: float, scored: float) -> Phase:
    """The result's runs with other caches, of which two are scored against one another.

    The original's ends are not in memory then.
    """
    seconds, cpu_seconds = (
        load + runs * run + scored * score / 2
        for load, run, score in zip(evaluation.load, evaluation.run, evaluation.score, strict=True)
    )
    return replace(
        evaluation.phase,
        name="kv cache",
        seconds=seconds,
        cpu_seconds=cpu_seconds,
        peak_bytes=evaluation.phase.peak_bytes - _ends_bytes(job),
    )


def _ends_bytes(job: Job) -> int:
    """Embedding and head in float32; a tied head is the embedding."""
    config = job.reader.config
    count = 1 if is_tied(config, job.family) else 2
    return count * 4 * int(config["vocab_size"]) * int(config["hidden_size"])


def _result_memory(job: Job) -> int:
    """What the result adds in memory.

    Quantized, its file, which is mapped, its weights, and embedding and head in float32; weights as
    they were, all of them in float32, one tensor of the file at a time.
    """
    if job.keeps_weights:
        entries = job.reader.entries.values()
        return sum(4 * math.prod(entry.shape) for entry in entries)
    config = job.reader.config
    return 2 * 4 * int(config["vocab_size"]) * int(config["hidden_size"]) + 2 * result_bytes(job)


def rounding_seconds(job: Job, runtime: Runtime, rows: int) -> tuple[float, float]:
    """What linears that round their input take longer than dense ones, for so many rows.

    Weights of a shape and scheme are alike: one of them is timed, made up of ones. Of experts each
    gets its share of the rows.

    Returns:
        Wall and processor seconds of all linears; 0 where nothing is rounded but weights.
    """
    counts: Counter[tuple[WeightScheme, tuple[int, ...], bool]] = Counter(
        (scheme, job.reader.shape(f"{name}.weight"), ".experts." in name)
        for name, scheme in job.schemes.items()
        if scheme.activations is not None
    )
    wall = cpu = 0.0
    for (scheme, shape, is_expert), count in counts.items():
        weight = torch.ones(shape, device=job.device)
        scale = None if scheme.activations is None or scheme.activations.dynamic else weight[0, :1]
        rounded = runtime.linear(quantize_rtn(weight, scheme, job.dtype, None, scale))
        x = torch.ones(TIMED_ROWS, shape[1], device=job.device)
        slow, fast = _timed(rounded, x), _timed(partial(functional.linear, weight=weight), x)
        times = count * (_expert_share(job) if is_expert else 1.0) * rows / TIMED_ROWS
        wall += times * max(0.0, slow[0] - fast[0])
        cpu += times * max(0.0, slow[1] - fast[1])
    return wall, cpu


def _expert_share(job: Job) -> float:
    """Experts that a token is sent to, of all."""
    config = job.reader.config
    number = config.get("num_local_experts", config.get("num_experts", 1))
    return float(config.get("num_experts_per_tok", 1)) / float(number)


def _timed(operation: Callable[[Tensor], Tensor], x: Tensor) -> tuple[float, float]:
    """Wall and processor seconds of an operation on rows [T, K], when it has run before."""
    operation(x)
    wall, cpu = time.perf_counter(), time.process_time()
    operation(x)[-1, -1].item()  # waits for a GPU
    return time.perf_counter() - wall, time.process_time() - cpu


def _evaluation(job: Job, ids: Tensor, runtime: Runtime, total: int) -> _Evaluation:
    """The original's ends and one window are measured; the result is taken to run as fast.

    What its linears take longer where they round their inputs is measured too.
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
            runtime.score(final)
        with clock.phase("window"):
            runtime.score(final)
        wall, cpu = rounding_seconds(job, runtime, ids.numel())
    block, ends, window = clock.phases
    return _Evaluation(
        _evaluate_phase(job, block, ends, window, (len(ids), total), (wall, cpu)),
        load=(ends.seconds - window.seconds, ends.cpu_seconds - window.cpu_seconds),
        run=(
            (total * block.seconds + wall) / len(ids),
            (total * block.cpu_seconds + cpu) / len(ids),
        ),
        score=(window.seconds, window.cpu_seconds),
    )


def _evaluate_phase(
    job: Job,
    block: Phase,
    ends: Phase,
    window: Phase,
    counts: tuple[int, int],
    rounding: tuple[float, float],
) -> Phase:
    """The parts put together; ``counts`` are windows and blocks."""
    windows, blocks = counts
    added = _result_memory(job)
    on_gpu = job.device.type == "cuda"
    return Phase(
        "evaluate",
        ends.seconds + blocks * block.seconds + (windows - 1) * window.seconds + rounding[0],
        ends.cpu_seconds
        + blocks * block.cpu_seconds
        + (windows - 1) * window.cpu_seconds
        + rounding[1],
        max(ends.peak_bytes, window.peak_bytes) + added,
        max(ends.device_bytes, window.device_bytes) + added if on_gpu else 0,
    )
