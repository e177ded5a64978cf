"""What a command shows: results on standard output, progress and notes on standard error.

Under ``--json`` everything a script may want comes on standard output, one JSON object a line,
each with its kind in ``event``:

    {"event": "progress", "phase": "quantize", "done": 3, "total": 30, "detail": "model.layers.2"}
    {"event": "note", "text": "..."}
    {"event": "result", ...}        the last line, if the command succeeds

Errors are always text on standard error, with an exit code that is not 0. ``--quiet`` leaves out
progress and nothing else; together they give the notes and the result.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from rich.console import Console
from rich.markup import escape
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


@dataclass(frozen=True, slots=True)
class Show:
    """How a command shows itself; the default is text for people."""

    as_json: bool = False
    quiet: bool = False

    def steps(self) -> Steps:
        """Progress of long work; use as a context manager."""
        return Steps(self)

    @contextmanager
    def status(self, text: str) -> Iterator[None]:
        """:func:`status`, where progress is shown as text."""
        if self.quiet or self.as_json:
            yield
        else:
            with status(text):
                yield

    def note(self, text: str) -> None:
        """Something a user should know: what was not as asked. Quiet commands say it too."""
        if self.as_json:
            emit("note", {"text": text})
        else:
            note(text)


# Text for people, with progress.
TEXT = Show()


class Steps:
    """Progress of long work: one line a phase, a bar while it runs.

    Without a terminal (a log file, CI) a phase is a line when it begins and for every tenth done,
    with the time left at the pace so far.
    """

    def __init__(self, show: Show = TEXT) -> None:
        self._show = show
        self._text = not (show.quiet or show.as_json)
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[detail]}", markup=False),
            console=err,
            disable=not (self._text and err.is_terminal),
        )
        self._tasks: dict[str, int] = {}
        self._tenths: dict[str, int] = {}
        self._begun: dict[str, tuple[float, int]] = {}

    def update(self, phase: str, done: int, total: int, detail: str = "") -> None:
        """``done`` of ``total`` in ``phase``; the first call opens it."""
        if self._text:
            self._update_text(phase, done, total, detail)
        elif self._show.as_json and not self._show.quiet:
            emit("progress", {"phase": phase, "done": done, "total": total, "detail": detail})

    def _update_text(self, phase: str, done: int, total: int, detail: str) -> None:
        if phase not in self._tasks:
            self._tasks[phase] = self._bar.add_task(phase, total=total, detail=detail)
            self._begun[phase] = time.monotonic(), done
            if not err.is_terminal:
                err.print(f"{phase}: {total} to do")
        self._bar.update(self._tasks[phase], completed=done, detail=detail)  # type: ignore[arg-type]
        tenth = 10 * done // total if total else 10
        if not err.is_terminal and tenth > self._tenths.get(phase, 0):
            self._tenths[phase] = tenth
            parts = [f"{phase}: {done} of {total} done", self._left(phase, done, total), detail]
            err.print(", ".join(filter(None, parts)), highlight=False, markup=False)

    def _left(self, phase: str, done: int, total: int) -> str:
        """Time left of a phase, for people; empty where nothing tells, or nothing is left."""
        since, first = self._begun[phase]
        if not first < done < total:
            return ""
        # The first call of most phases comes when their first step is done: its time is not known.
        seconds = (time.monotonic() - since) / (done - first) * (total - done)
        return f"{timedelta(seconds=round(seconds))} left"

    def __enter__(self) -> Steps:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()


def emit(event: str, fields: Mapping[str, Any]) -> None:
    """One JSON object on one line of standard output, at once, so that a pipe can follow."""
    print(json.dumps({"event": event, **fields}), file=out.file, flush=True)


@contextmanager
def status(text: str) -> Iterator[None]:
    """A spinner for work of unknown length; a plain line without a terminal."""
    if err.is_terminal:
        with err.status(escape(text)):
            yield
    else:
        err.print(text, markup=False, highlight=False)
        yield


def note(text: str) -> None:
    """Something a user should know: what was not as asked."""
    err.print(f"[yellow]note:[/] {escape(text)}", highlight=False)


def size(num_bytes: float) -> str:
    """Bytes for people: ``86.7 MB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.3g} TB"
