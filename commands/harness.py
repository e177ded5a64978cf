"""``qtool eval --harness``: lm-evaluation-harness with our engine as its model, in this process.

The package is an optional extra, so it is imported only inside functions.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.table import Table

from qtool.commands import console
from qtool.commands.harness_model import HarnessModel
from qtool.commands.tasks import open_llm
from qtool.errors import CalibrationError, UsageError
from qtool.formats.model_source import resolve_model
from qtool.runtime.llm import LLM
from qtool.runtime.options import ModelOptions
from qtool.runtime.request import EngineInfo
from qtool.runtime.tokenizer import Tokenizer

# Draws for standard errors that have no formula. The harness takes 100,000, which costs minutes.
BOOTSTRAP_ITERS = 1000

_NO_FORKS = "DISABLE_MULTIPROC"

Metrics = dict[str, dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class HarnessOptions:
    """Which of the harness's tasks are run.

    Attributes:
        tasks: names of tasks, groups or tags.
        limit: only the first documents of each.
        include_path: folder with task files of one's own.
        batch_size: requests computed at a time.
    """

    tasks: tuple[str, ...]
    limit: int | None = None
    include_path: Path | None = None
    batch_size: int = 8

    def __post_init__(self) -> None:
        for name in ("limit", "batch_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"{name}={value}: must be 1 or more")
        if not self.tasks:
            raise UsageError("no tasks: name at least one")
        if self.include_path is not None and not self.include_path.is_dir():
            raise UsageError(f"{self.include_path}: is no folder; give one with task files")


def run(
    model: str,
    reference: str | None,
    options: HarnessOptions,
    loading: ModelOptions,
    show: console.Show,
) -> Metrics:
    """Evaluate, print and return the model's metrics by task. Raises QtoolError."""
    require_harness()
    tasks = _load_tasks(options)
    for name in (model, reference):
        if name is not None:
            resolve_model(name)
    theirs = None
    if reference is not None:
        _, theirs = _evaluate(reference, tasks, options, loading, show)
    info, metrics = _evaluate(model, tasks, options, loading, show)
    if show.as_json:
        facts = {"model": model, "reference": reference, "limit": options.limit}
        facts |= {"dtype": info.dtype, "backend": info.backend, "quantization": info.quantization}
        console.emit("result", facts | {"tasks": metrics, "reference_tasks": theirs})
    else:
        console.out.print(metrics_table(model, metrics, reference, theirs))
    return metrics


def require_harness() -> None:
    """Raise UsageError, with the command that mends it, if the package is missing."""
    if find_spec("lm_eval") is None:
        raise UsageError(
            "--harness: lm-evaluation-harness is not installed; run: pip install 'qtool[lm-eval]' "
            "(or pip install lm_eval)"
        )


def _load_tasks(options: HarnessOptions) -> Any:
    """The harness's TaskManager, once the tasks and their data were found to load."""
    with _tamed_harness():
        manager = _task_manager(options)
        unknown = [name for name in options.tasks if not manager.match_tasks([name])]
        if unknown:
            raise UsageError(
                f"--harness: there is no task {unknown[0]!r}; `lm_eval ls tasks` lists them, "
                "--include-path adds a folder of your own"
            )
        try:
            manager.load(list(options.tasks))
        # A task is code and data from elsewhere: a network, a script, a format may fail in any way.
        except Exception as error:
            raise CalibrationError(
                f"--harness {','.join(options.tasks)}: cannot be loaded ({type(error).__name__}: "
                f"{error}); check the task's files and the network"
            ) from error
    return manager


def _task_manager(options: HarnessOptions) -> Any:
    from lm_eval.tasks import TaskManager

    # Reading the several thousand files of its own tasks takes seconds: once a run.
    return TaskManager(include_path=options.include_path)


@contextlib.contextmanager
def _tamed_harness() -> Iterator[None]:
    """As part of our process: results alone on standard output, errors alone in the log, no forks.

    It forks for the standard errors of perplexities, and a child of a process with an engine's
    threads can wait forever for a lock that one of them held. The variable is its own switch.
    """
    logger = logging.getLogger("lm_eval")
    level, forks = logger.level, os.environ.get(_NO_FORKS)
    logger.setLevel(logging.ERROR)
    os.environ[_NO_FORKS] = "1"
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        logger.setLevel(level)
        del os.environ[_NO_FORKS]
        if forks is not None:
            os.environ[_NO_FORKS] = forks


def _evaluate(
    model: str,
    tasks: Any,
    options: HarnessOptions,
    loading: ModelOptions,
    show: console.Show,
) -> tuple[EngineInfo, Metrics]:
    from lm_eval import simple_evaluate

    tokenizer = Tokenizer.load(resolve_model(model))
    with show.status(f"loading {model}"):
        llm = open_llm(model, loading, options.batch_size)
    with llm:
        for text in llm.info.notes:
            show.note(text)
        adapter = harness_model(llm, tokenizer)
        with _tamed_harness(), show.status(f"evaluating {model}: {', '.join(options.tasks)}"):
            results = simple_evaluate(
                model=adapter,
                tasks=list(options.tasks),
                limit=options.limit,
                task_manager=tasks,
                bootstrap_iters=BOOTSTRAP_ITERS,
                log_samples=False,
            )
        if adapter.shortened:
            show.note(
                f"{adapter.shortened} texts were longer than the model's context of "
                f"{llm.info.max_model_len} tokens and lost their beginning"
            )
    return llm.info, _metrics(results["results"])


def _metrics(results: Mapping[str, Mapping[str, Any]]) -> Metrics:
    """Task to metric to value. The harness's names are ``acc,none``: metric and filter."""
    return {
        task: {name: _plain(value) for name, value in values.items() if "," in name}
        for task, values in results.items()
    }


def _plain(value: Any) -> Any:
    """A number as JSON holds it; "N/A" and what is not finite are ``None``."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None


def harness_model(llm: LLM, tokenizer: Tokenizer) -> Any:
    """A :class:`HarnessModel` that is an ``lm_eval.api.model.LM`` too."""
    from lm_eval.api.model import LM

    return type("QtoolLM", (HarnessModel, LM), {})(llm, tokenizer)


def metrics_table(
    model: str, metrics: Metrics, reference: str | None = None, theirs: Metrics | None = None
) -> Table:
    """One row a task and metric, one column a model."""
    table = Table()
    for column in ("task", "metric"):
        table.add_column(column)
    for name in (reference, model):
        if name is not None:
            table.add_column(name, justify="right")
    for task, values in metrics.items():
        for metric in (key for key in values if "_stderr," not in key):
            cells = [] if theirs is None else [_cell(theirs[task], metric)]
            table.add_row(task, metric.removesuffix(",none"), *cells, _cell(values, metric))
    return table


def _cell(values: Mapping[str, Any], name: str) -> str:
    metric, _, chosen_filter = name.partition(",")
    value, error = values.get(name), values.get(f"{metric}_stderr,{chosen_filter}")
    if value is None:
        return "-"
    return f"{value:.4f}" if error is None else f"{value:.4f} ±{error:.4f}"
