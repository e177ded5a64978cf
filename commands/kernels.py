"""``qtool kernels check``: the GPU kernels' machine code against what docs/kernels.md promises."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterable
from dataclasses import asdict
from types import ModuleType
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE
from rich.table import Table

from qtool.commands import console
from qtool.errors import KernelError, UsageError

if TYPE_CHECKING:
    from qtool.runtime.kernels.triton.config import Tiles
    from qtool.runtime.kernels.triton.gate import Finding


def run(show: console.Show, *, everything: bool, arches: tuple[str, ...]) -> None:
    """Compile and count; print a row a kernel and architecture.

    Args:
        everything: all kinds of weights and tokens, not only those that have a budget.
        arches: only these; all if empty.

    Raises:
        UsageError: an unknown architecture, or an environment in which nothing compiles.
        KernelError: at least one kernel is not as it must be.
    """
    gate = load_gate()
    chosen = arches or gate.ARCHES
    if unknown := sorted(set(chosen) - set(gate.ARCHES)):
        raise UsageError(f"--arch {', '.join(unknown)}: known are {', '.join(gate.ARCHES)}")
    if note := gate.budget_note():
        show.note(note)
    cases = gate.all_cases() if everything else gate.budgeted_cases()
    cases = (*cases, *gate.rows_to_check(), *gate.attention_to_check(everything=everything))
    pairs = list(gate.pairs(cases, chosen))
    findings: list[Finding] = []
    with show.steps() as steps:
        for case, arch in pairs:
            steps.update("compile", len(findings), len(pairs), f"{case.name}, {arch}")
            findings.append(gate.check(case, arch))
        steps.update("compile", len(pairs), len(pairs))
    _print(findings, show)
    broken = [f"{f.label}: {'; '.join(f.violations)}" for f in findings if f.violations]
    if broken:
        raise KernelError(
            f"{len(broken)} of {len(findings)} kernels are not as docs/kernels.md has them: "
            + " | ".join(broken)
        )


def load_gate() -> ModuleType:
    """The gate's module; Triton is optional, and its interpreter compiles nothing.

    Raises:
        UsageError: why there is none, and what helps.
    """
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        raise UsageError(
            "TRITON_INTERPRET is set, and Triton's interpreter compiles nothing: unset it"
        )
    try:
        importlib.import_module("triton")
    except ImportError as error:
        raise UsageError(f"Triton does not import ({error}): pip install triton") from None
    return importlib.import_module("qtool.runtime.kernels.triton.gate")


def _print(findings: Iterable[Finding], show: console.Show) -> None:
    if show.as_json:
        console.emit("result", {"kernels": [_record(finding) for finding in findings]})
        return
    table = Table(box=SIMPLE)
    for name in ("kernel", "tokens", "GPU", "tile", "matrix", "registers", "shared"):
        table.add_column(name, no_wrap=True)
    table.add_column("i/weight", justify="right")  # or an element of keys and values
    table.add_column("budget", justify="right")
    table.add_column("", no_wrap=True)
    for f in findings:
        table.add_row(
            f.case.name,
            str(getattr(f.case, "tokens", "-")),
            f.arch,
            "-" if f.tiles is None else _tile(f.tiles),
            ", ".join(sorted(f.code.matrix)) or "-",
            str(f.code.registers),
            console.size(f.code.shared),
            "-" if f.per_weight is None else f"{f.per_weight:.2f}",
            "-" if f.budget is None else f"{f.budget:.1f}",
            "; ".join(f.violations) or "ok",
        )
    console.out.print(table)


def _tile(tiles: Tiles) -> str:
    return f"{tiles.block_m}x{tiles.block_n}, {tiles.num_warps} warps"


def _record(finding: Finding) -> dict[str, Any]:
    code, per_weight = finding.code, finding.per_weight
    return {
        "kernel": finding.case.name,
        "tokens": getattr(finding.case, "tokens", None),
        "arch": finding.arch,
        "tiles": None if finding.tiles is None else asdict(finding.tiles),
        "matrix": sorted(code.matrix),
        "registers": code.registers,
        "stack": code.stack,
        "shared": code.shared,
        "instructions_per_weight": None if per_weight is None else round(per_weight, 3),
        "budget": finding.budget,
        "violations": list(finding.violations),
    }
