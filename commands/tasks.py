"""``qtool eval --tasks``: accuracy on questions, of one model or of two side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from qtool.calibration.data import held_out_builtin
from qtool.commands import console
from qtool.errors import UsageError
from qtool.formats.checkpoint import CONFIG_NAME, read_json
from qtool.formats.model_source import resolve_model
from qtool.runtime.config import parse_decoder_config
from qtool.runtime.llm import LLM
from qtool.runtime.options import ModelOptions
from qtool.runtime.request import EngineInfo
from qtool.runtime.scoring import loglikelihoods, scorable_tokens
from qtool.runtime.task_files import BUILTIN_CLOZE, cloze_task, read_task
from qtool.runtime.tasks import (
    Continuation,
    Task,
    TaskResult,
    continuations,
    judge,
    standard_error,
)
from qtool.runtime.tokenizer import Tokenizer

# Tokens of a step. All of them get logits: 512 x 128k vocabulary in float32 is 268 MB.
TOKENS_PER_STEP = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskOptions:
    """Which questions are asked: those of built-in tasks and of files.

    Attributes:
        limit: only the first questions of each.
        batch_size: texts scored at a time; it changes the speed, not the scores.
    """

    names: tuple[str, ...] = ()
    files: tuple[Path, ...] = ()
    limit: int | None = None
    batch_size: int = 8

    def __post_init__(self) -> None:
        for name in ("limit", "batch_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"{name}={value}: must be 1 or more")
        for name in self.names:
            if name != BUILTIN_CLOZE:
                raise UsageError(f"task {name!r} is not built in; {BUILTIN_CLOZE} is")


@dataclass(frozen=True, slots=True)
class _Prepared:
    """What one model is asked, as its tokens; known before the model is loaded."""

    model: str
    texts: list[list[Continuation]]

    @property
    def longest(self) -> int:
        return max(len(text.token_ids) for texts in self.texts for text in texts)


def run(
    model: str,
    reference: str | None,
    options: TaskOptions,
    loading: ModelOptions,
    show: console.Show,
) -> list[TaskResult]:
    """Ask, print and return the model's results. Raises QtoolError."""
    tasks = [task.first(options.limit) for task in _read_tasks(options)]
    names = [model] if reference is None else [reference, model]
    prepared = [_prepare(name, tasks) for name in names]
    answered = [_ask(each, tasks, options, loading, show) for each in prepared]
    info, results = answered[-1]
    theirs = None if reference is None else answered[0][1]
    if show.as_json:
        facts = {"model": model, "reference": reference, "batch_size": options.batch_size}
        facts |= {"dtype": info.dtype, "backend": info.backend, "quantization": info.quantization}
        console.emit("result", facts | {"tasks": _to_json(results, theirs)})
    else:
        for index, result in enumerate(results):
            other = None if reference is None or theirs is None else (reference, theirs[index])
            console.out.print(result_table(model, result, other))
    return results


def _read_tasks(options: TaskOptions) -> list[Task]:
    tasks = [read_task(path) for path in options.files]
    if BUILTIN_CLOZE in options.names:
        text = held_out_builtin()
        tasks.insert(0, cloze_task(BUILTIN_CLOZE, text.documents, text.fingerprint))
    return tasks


def _prepare(model: str, tasks: Sequence[Task]) -> _Prepared:
    folder = resolve_model(model)
    limit = parse_decoder_config(read_json(folder / CONFIG_NAME)).max_position
    tokenizer = Tokenizer.load(folder)
    texts = [continuations(task, tokenizer, scorable_tokens(limit)) for task in tasks]
    return _Prepared(model, texts)


def open_llm(
    model: str, loading: ModelOptions, batch_size: int, max_model_len: int | None = None
) -> LLM:
    """An engine for ``batch_size`` sequences at a time."""
    return LLM(
        model,
        **asdict(loading),
        max_model_len=max_model_len,
        max_num_seqs=batch_size,
        max_num_batched_tokens=max(TOKENS_PER_STEP, batch_size),
    )


def _ask(
    prepared: _Prepared,
    tasks: Sequence[Task],
    options: TaskOptions,
    loading: ModelOptions,
    show: console.Show,
) -> tuple[EngineInfo, list[TaskResult]]:
    """One model's answers; it is unloaded before the next is loaded."""
    with show.status(f"loading {prepared.model}"):
        llm = open_llm(prepared.model, loading, options.batch_size, prepared.longest + 1)
    with llm, show.steps() as steps:
        for text in llm.info.notes:
            show.note(text)
        results = []
        for task, texts in zip(tasks, prepared.texts, strict=True):
            phase = f"{task.name}: {prepared.model}"

            def progress(done: int, total: int, phase: str = phase) -> None:
                steps.update(phase, done, total)

            results.append(judge(task, loglikelihoods(llm, texts, progress)))
    return llm.info, results


def _to_json(
    results: Sequence[TaskResult], references: Sequence[TaskResult] | None
) -> list[dict[str, Any]]:
    entries = []
    for index, result in enumerate(results):
        theirs = None if references is None else references[index]
        entries.append(
            {
                "task": result.task.name,
                "kind": "cloze" if result.task.is_cloze else "multiple_choice",
                "questions": len(result.right),
                "sha256": result.task.fingerprint,
                **result.to_dict(),
                "reference": None if theirs is None else theirs.to_dict(),
                "agreement": None if theirs is None else result.agreement(theirs),
            }
        )
    return entries


def result_table(
    model: str, result: TaskResult, reference: tuple[str, TaskResult] | None = None
) -> Table:
    """One task: a row a model, the reference above the model."""
    title = f"{result.task.name}, {len(result.right)} questions"
    table = Table(title=title, title_justify="left", title_style="")
    table.add_column("model", overflow="fold")
    for column in ("accuracy", "perplexity" if result.task.is_cloze else "acc_norm", "agreement"):
        table.add_column(column, justify="right", no_wrap=True)
    agreement = "-"
    if reference is not None:
        name, theirs = reference
        table.add_row(name, *_cells(theirs), "-")
        agreement = f"{result.agreement(theirs):.1%}"
    table.add_row(model, *_cells(result), agreement)
    return table


def _cells(result: TaskResult) -> tuple[str, str]:
    count = len(result.right)
    accuracy = _share(result.accuracy, count)
    if result.perplexity is not None:
        return accuracy, f"{result.perplexity:.2f}"
    return accuracy, _share(result.acc_norm, count)


def _share(share: float | None, count: int) -> str:
    """``61.2% ±3.5``: a share with its standard error."""
    if share is None:
        return "-"
    error = standard_error(share, count)
    return f"{share:.1%}" if error is None else f"{share:.1%} ±{100 * error:.1f}"
