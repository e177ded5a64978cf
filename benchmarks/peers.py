"""qtool and what a user would pick instead, side by side on this machine.

    python benchmarks/peers.py [--quick] [--json] [--save]

Every engine loads the same model, is asked for the same tokens on the same cores, and runs in
turns with the others; `make peers` installs them. Prints medians, the ratio of ours to the best
peer, how near each came to what memory and arithmetic allow, and what its weights cost in
quality.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console

import qtool
from comparison.client import PEERS, ROOT, peer_python
from comparison.contest import Conditions, Outcome, Say, compare
from comparison.models import MODELS, PACKAGED, prepare
from comparison.results import (
    FOLDER,
    Machine,
    append_csv,
    cpu_name,
    quality_table,
    speed_table,
    to_json,
)
from comparison.roofline import Probe
from comparison.scenarios import OURS
from qtool.errors import QtoolError, UsageError

TABLE_WIDTH = 140


def main() -> int:
    """Run the command line; the exit code."""
    arguments = _parser().parse_args()
    errors = Console(stderr=True)
    try:
        _require_this_checkout()
        machine, outcomes = _measure(arguments, lambda text: errors.print(text, highlight=False))
    except QtoolError as error:
        errors.print(f"error: {error}", style="red", highlight=False, soft_wrap=True)
        return error.exit_code
    _show(machine, outcomes)
    if arguments.save:
        errors.print(f"written to {append_csv(FOLDER, machine, outcomes)}", highlight=False)
    if arguments.json:
        print(json.dumps(to_json(machine, outcomes)))
    return 0


def _measure(arguments: argparse.Namespace, say: Say) -> tuple[Machine, list[Outcome]]:
    peers = {engine: peer_python(engine, arguments.peers_dir) for engine in arguments.peers}
    pythons = {OURS: Path(sys.executable), **peers}
    outcomes = []
    with Probe(arguments.threads) as probe:
        units = probe.units()
        for name in arguments.models:
            model = prepare(name, peers, say)
            windows = arguments.windows if name == PACKAGED else 0
            conditions = Conditions(arguments.threads, arguments.repetitions, windows)
            outcomes.append(compare(model, pythons, conditions, probe, units, say))
    cpu = cpu_name(Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    date = datetime.now(UTC).strftime("%Y-%m-%d %H:%M")
    return Machine(cpu, arguments.threads, date, units), outcomes


def _show(machine: Machine, outcomes: list[Outcome]) -> None:
    # A pipe counts as 80 columns, which would cut the tables' names.
    console = Console(width=max(Console().width, TABLE_WIDTH))
    units = ", ".join(f"{name} {value:.0f}" for name, value in machine.units.items())
    console.print(f"{machine.cpu}, {machine.threads} threads: {units}", highlight=False)
    for outcome in outcomes:
        reads = ", ".join(f"{name} {value:.1f}" for name, value in outcome.read_gbs.items())
        console.print(speed_table(outcome))
        console.print(quality_table(outcome))
        console.print(f"memory read at our weights' size, GB/s: {reads}", highlight=False)


def _require_this_checkout() -> None:
    found = Path(qtool.__file__).resolve().parent
    if found != ROOT:
        raise UsageError(
            f"qtool is imported from {found}, not from this checkout; install it with "
            f"pip install -e {ROOT}, or set PYTHONPATH={ROOT / '.typecheck'}"
        )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cores = len(os.sched_getaffinity(0))
    add = parser.add_argument
    add("--peers-dir", type=Path, default=ROOT / ".peers", help="where make peers installed them")
    add("--peers", nargs="*", choices=PEERS, default=list(PEERS), help="default: all")
    add("--models", nargs="+", choices=MODELS, default=list(MODELS), help="default: all")
    add("--threads", type=int, default=cores, help=f"default: the {cores} cores there are")
    add("--repetitions", type=int, default=7, help="counted runs of every scenario")
    add("--windows", type=int, default=4, help="windows of held-out text for the quality")
    add("--quick", action=_Quick, help="the packaged model only, 2 repetitions, 1 window")
    add("--json", action="store_true", help="a JSON object as the last line")
    add("--save", action="store_true", help="add the results to benchmarks/results")
    return parser


class _Quick(argparse.Action):
    """Presets; options after it still count."""

    def __init__(self, option_strings: list[str], dest: str, help: str) -> None:
        super().__init__(option_strings, dest, nargs=0, help=help)

    def __call__(self, parser: object, namespace: argparse.Namespace, *_: object) -> None:
        namespace.models, namespace.repetitions, namespace.windows = [PACKAGED], 2, 1


if __name__ == "__main__":
    sys.exit(main())
