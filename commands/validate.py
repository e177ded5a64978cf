"""``qtool validate``: would other loaders take this checkpoint?"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.markup import escape

from qtool.commands import console
from qtool.errors import CheckpointError
from qtool.formats.validation.finding import TARGETS, Finding, Target
from qtool.formats.validation.validate import validate


def run(folder: Path, targets: Sequence[Target], show: console.Show = console.TEXT) -> None:
    """Run all rules and show what they find.

    Args:
        folder: the checkpoint.
        targets: whose loaders; none means all.
        show: how.

    Raises:
        CheckpointError: a loader would refuse it; what and why was shown before.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder; give the folder of a checkpoint")
    chosen = tuple(dict.fromkeys(targets)) or TARGETS
    findings = validate(folder, chosen)
    errors = sum(finding.level == "error" for finding in findings)
    warnings = len(findings) - errors
    if show.as_json:
        facts = {"folder": str(folder), "targets": list(chosen), "valid": not errors}
        found = [finding.to_dict() for finding in findings]
        counts = {"errors": errors, "warnings": warnings}
        console.emit("result", {**facts, **counts, "findings": found})
    else:
        for finding in findings:
            _print(finding)
    names = ", ".join(chosen)
    if errors:
        raise CheckpointError(
            f"{folder}: {errors} errors and {warnings} warnings for {names}; repair what is listed"
        )
    if not show.as_json:
        console.out.print(
            f"{folder}: loads in {names} as far as files tell, {warnings} warnings",
            highlight=False,
            markup=False,
        )


def _print(finding: Finding) -> None:
    """Three lines: what and where; what a loader expects; what to do."""
    color = "red" if finding.level == "error" else "yellow"
    whose = "all" if finding.targets == TARGETS else ", ".join(finding.targets)
    head = f"[{color}]{finding.level}[/] [bold]{finding.check}[/] for {whose}"
    console.out.print(f"{head}: {escape(finding.found)}", highlight=False)
    console.out.print(
        f"    {finding.rule}", f"    {finding.remedy}", sep="\n", highlight=False, markup=False
    )
