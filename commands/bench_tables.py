"""What a benchmark prints."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict

from rich.box import SIMPLE
from rich.table import Table

from qtool.commands.bench_metrics import Spread, Summary

_MEASURES = ("mean", "median", "P99")
_ROWS = (
    "requests",
    "seconds",
    "requests/s",
    "output tokens/s",
    "all tokens/s",
    *(f"{name} {measure}, ms" for name in ("TTFT", "TPOT", "latency") for measure in _MEASURES),
    "tokens reused",
    "preemptions",
)


def as_dict(summary: Summary) -> dict[str, object]:
    """A summary for scripts, with its rates."""
    rates = ("requests_per_second", "output_per_second", "tokens_per_second")
    return asdict(summary) | {name: getattr(summary, name) for name in rates}


def comparisons(summaries: Sequence[Summary]) -> Iterator[str]:
    """Each run against the one after it."""
    for better, worse in zip(summaries, summaries[1:], strict=False):
        ratio = better.output_per_second / worse.output_per_second
        yield f"{better.name}: {ratio:.2f} times the output tokens per second of {worse.name}"


def throughput_table(summaries: Sequence[Summary]) -> Table:
    """A column for each run."""
    table = Table("", box=SIMPLE)
    for summary in summaries:
        table.add_column(summary.name, justify="right")
    for name, cells in zip(_ROWS, zip(*map(_cells, summaries), strict=True), strict=True):
        table.add_row(name, *cells)
    return table


def _cells(summary: Summary) -> list[str]:
    """A run's column, in the order of the rows."""
    spreads = (summary.ttft, summary.tpot, summary.latency)
    times = [value for spread in spreads for value in (spread.mean, spread.median, spread.p99)]
    return [
        str(summary.requests),
        f"{summary.seconds:.2f}",
        f"{summary.requests_per_second:.2f}",
        f"{summary.output_per_second:.1f}",
        f"{summary.tokens_per_second:.1f}",
        *(f"{1000 * value:.1f}" for value in times),
        f"{summary.reused_tokens:,}",
        str(summary.preemptions),
    ]


def latency_table(summaries: Sequence[Summary]) -> Table:
    """Over the iterations: each batch's time, TTFT and TPOT of its requests."""
    table = Table(box=SIMPLE)
    for column in ("", "mean", "median", "p99"):
        table.add_column(column, justify="left" if not column else "right")
    for name, values in (
        ("latency of a batch, ms", [s.seconds for s in summaries]),
        ("TTFT, ms", [s.ttft.mean for s in summaries]),
        ("TPOT, ms", [s.tpot.mean for s in summaries]),
    ):
        spread = Spread.of(values)
        table.add_row(name, *(f"{1000 * v:.2f}" for v in (spread.mean, spread.median, spread.p99)))
    return table
