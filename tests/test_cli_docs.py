"""docs/cli.md says what ``--help`` says."""

from __future__ import annotations

from pathlib import Path

from qtool.cli import main
from support.cli_docs import render

ROOT = Path(__file__).resolve().parents[1]


def test_the_documented_command_line_is_the_real_one() -> None:
    documented = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    assert documented == render(main), "run `make docs` and commit docs/cli.md"
