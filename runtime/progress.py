"""A bar for offline generation: requests done and tokens per second."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


class RequestProgress:
    """Shows itself on standard error if that is a terminal; silent otherwise."""

    def __init__(self, total: int, *, enabled: bool) -> None:
        self._tokens = 0
        self._bar = Progress(
            TextColumn("generating"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[rate]}"),
            console=Console(stderr=True),
            disable=not (enabled and sys.stderr.isatty()),
        )
        self._task = self._bar.add_task("", total=total, rate="")

    def advance(self, num_tokens: int, finished: bool) -> None:
        """Count tokens, and a request that ended with them."""
        self._tokens += num_tokens
        elapsed = self._bar.tasks[0].elapsed or 0.0
        rate = f"{self._tokens / elapsed:.0f} tok/s" if elapsed else ""
        self._bar.update(self._task, advance=int(finished), rate=rate)

    def __enter__(self) -> RequestProgress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()
