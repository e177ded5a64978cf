"""One model, every engine, every scenario: in turns, only one working at a time."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
import torch

from comparison.client import Worker
from comparison.models import Prepared
from comparison.roofline import Ceilings, ModelShape, Probe, fastest_int8, roof
from comparison.scenarios import (
    OURS,
    SCENARIOS,
    Rates,
    Scenario,
    median_rates,
    prompts,
    rates,
    ratios,
    rotated,
)
from comparison.worker import About, reference_file
from qtool.calibration.data import evaluation_windows, held_out_builtin, load_tokenizer
from qtool.runtime.evaluate import CHUNK, WindowRun
from qtool.runtime.loaded_model import load_model
from qtool.runtime.options import ModelOptions

MOST_SEQUENCES = max(scenario.sequences for scenario in SCENARIOS)
# Text the prompts are cut from: four rounds of the largest scenario before any repeats.
PROMPT_TOKENS = 4 * 32 * 128
WINDOW = 512

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Entry:
    """One engine in one scenario.

    Attributes:
        slowest, fastest: of all runs, as ``rates.phase``.
        roof: tokens per second the machine could do with this engine's weights and cache.
    """

    rates: Rates
    slowest: float
    fastest: float
    roof: float

    @property
    def fraction(self) -> float:
        """Of the roof."""
        return self.rates.phase / self.roof


@dataclass(frozen=True, slots=True)
class Outcome:
    """All about one model.

    Attributes:
        entries: by scenario, then engine.
        read_gbs: memory reads at the size of our weights, by scenario: it varies with time.
        quality: by engine; empty for random weights, which predict nothing.
    """

    model: str
    engines: dict[str, About]
    entries: dict[str, dict[str, Entry]]
    read_gbs: dict[str, float]
    quality: dict[str, dict[str, float]]

    @property
    def ratios(self) -> dict[str, float]:
        """Ours over the best peer."""
        return ratios(
            {
                scenario: {engine: entry.rates for engine, entry in row.items()}
                for scenario, row in self.entries.items()
            }
        )


@dataclass(frozen=True, slots=True)
class Conditions:
    """The same for every engine."""

    threads: int
    repetitions: int
    windows: int

    def __post_init__(self) -> None:
        if min(self.threads, self.repetitions) < 1 or self.windows < 0:
            raise ValueError(f"{self}: threads and repetitions must be at least 1, windows 0")


def compare(
    model: Prepared,
    pythons: Mapping[str, Path],
    conditions: Conditions,
    probe: Probe,
    units: dict[str, float],
    say: Say,
) -> Outcome:
    """Load every engine, let them take turns. Raises QtoolError."""
    tokens = _text_tokens(model.source)
    shape = ModelShape.of(model.source)
    with ExitStack() as stack:
        workers: dict[str, Worker] = {}
        for engine, python in pythons.items():
            say(f"{model.name}: loading {engine}")
            worker = Worker(engine, python, model.forms[engine], conditions.threads, MOST_SEQUENCES)
            workers[engine] = stack.enter_context(worker)
        abouts = {engine: worker.about for engine, worker in workers.items()}
        entries, reads = {}, {}
        for scenario in SCENARIOS:
            say(f"{model.name}: {scenario.name}")
            runs, read = _take_turns(scenario, workers, tokens, conditions.repetitions, probe)
            ceilings = Ceilings(read, fastest_int8(units), units)
            reads[scenario.name] = read
            entries[scenario.name] = {
                engine: _entry(scenario, of, roof(scenario, shape, abouts[engine], ceilings))
                for engine, of in runs.items()
            }
        say(f"{model.name}: quality" if conditions.windows else f"{model.name}: done")
        quality = _quality(model.source, workers, conditions.windows)
    return Outcome(model.name, abouts, entries, reads, quality)


def _take_turns(
    scenario: Scenario,
    workers: Mapping[str, Worker],
    tokens: Sequence[int],
    repetitions: int,
    probe: Probe,
) -> tuple[dict[str, list[Rates]], float]:
    """Runs of every engine, and the median GB/s that memory gave in between."""
    runs: dict[str, list[Rates]] = {engine: [] for engine in workers}
    reads: list[float] = []
    size = workers[OURS].about.weight_bytes
    # The first turn warms up: buffers, caches, code compiled for a batch's shape.
    for turn in range(repetitions + 1):
        asked = prompts(scenario, tokens, turn)
        for engine in rotated(list(workers), turn):
            times = workers[engine].run(asked, scenario.new_tokens)
            if turn:
                runs[engine].append(rates(scenario, times))
        reads.append(probe.read_gbs(size))
    return runs, median(reads)


def _entry(scenario: Scenario, runs: list[Rates], highest: float) -> Entry:
    phases = [run.phase for run in runs]
    return Entry(median_rates(runs), min(phases), max(phases), highest)


def _text_tokens(folder: Path) -> list[int]:
    text, tokenizer = held_out_builtin(), load_tokenizer(folder)
    windows = evaluation_windows(text, tokenizer, WINDOW, PROMPT_TOKENS // WINDOW)
    tokens: list[int] = windows.flatten().tolist()
    return tokens


def _quality(
    source: Path, workers: Mapping[str, Worker], count: int
) -> dict[str, dict[str, float]]:
    """Every engine against the unquantized model in float32, on held-out text."""
    if count == 0:
        return {}
    windows = evaluation_windows(held_out_builtin(), load_tokenizer(source), WINDOW, count)
    with tempfile.TemporaryDirectory(prefix="qtool-reference-") as folder:
        _write_reference(source, windows, Path(folder))
        return {
            engine: worker.quality(windows.tolist(), Path(folder))
            for engine, worker in workers.items()
        }


def _write_reference(source: Path, windows: torch.Tensor, folder: Path) -> None:
    """Log-probabilities [n - 1, vocab] of every window: the last token predicts nothing known."""
    decoder = load_model(source, ModelOptions(device="cpu", dtype="fp32"), WINDOW).decoder
    for index, window in enumerate(windows.tolist()):
        run, last = WindowRun(decoder, window), len(window) - 1
        rows = [run.logits(at, min(at + CHUNK, last)) for at in range(0, last, CHUNK)]
        np.save(reference_file(folder, index), torch.cat(rows).log_softmax(-1).numpy())
