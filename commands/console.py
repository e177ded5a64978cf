"""What a terminal shows: messages and progress on standard error, results on standard output."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

# Results: what a script would read.
out = Console(soft_wrap=True)
# Progress and notes: what a person reads.
err = Console(stderr=True, soft_wrap=True)


class Steps:
    """Progress of long work: one line a phase, a bar while it runs.

    Without a terminal (a log file, CI) each phase is one line when it begins and ends.
    """

    def __init__(self) -> None:
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[detail]}"),
            console=err,
            disable=not err.is_terminal,
        )
        self._tasks: dict[str, int] = {}

    def update(self, phase: str, done: int, total: int, detail: str = "") -> None:
        """``done`` of ``total`` in ``phase``; the first call opens it."""
        if phase not in self._tasks:
            self._tasks[phase] = self._bar.add_task(phase, total=total, detail=detail)
            if not err.is_terminal:
                err.print(f"{phase}: {total} to do")
        self._bar.update(self._tasks[phase], completed=done, detail=detail)  # type: ignore[arg-type]
        if done == total and not err.is_terminal:
            err.print(f"{phase}: done")

    def __enter__(self) -> Steps:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()


@contextmanager
def status(text: str) -> Iterator[None]:
    """A spinner for work of unknown length; a plain line without a terminal."""
    if err.is_terminal:
        with err.status(text):
            yield
    else:
        err.print(text)
        yield


def note(text: str) -> None:
    """Something a user should know: what was not as asked."""
    err.print(f"[yellow]note:[/] {text}", highlight=False)


def size(num_bytes: float) -> str:
    """Bytes for people: ``86.7 MB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.3g} TB"
