"""The GPU script runs from end to end on small shapes in the interpreter."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
import gpu_check


def test_every_section_reports_and_the_csv_has_it_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_check.main(["--small", "--csv", str(tmp_path / "rows.csv")]) == 0
    with (tmp_path / "rows.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    sections = [row["section"] for row in rows]
    assert sections.count("check") == len(gpu_check.SCHEMES) + 3 + 1
    assert sections.count("ceiling") == 1 and sections.count("decode") == 2
    forms = ["16-bit", "fp8", "int8", "k8v4", "int4"]
    assert sections.count("attention check") == len(forms)
    attention = [(r["name"], r["rows"], r["columns"]) for r in rows if r["section"] == "attention"]
    assert attention == [(form, batch, "70") for batch in "12" for form in forms]
    products = [row for row in rows if row["section"] == "product"]
    assert len(products) == 2 * (1 + len(gpu_check.SCHEMES))
    assert all(row["verdict"] == "ok" and row["device"] == "interpreter" for row in rows)
    assert all(float(row["microseconds"]) > 0 for row in products)


def test_a_wrong_kernel_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def failing(bench: gpu_check.Bench):  # type: ignore[no-untyped-def]
        yield bench.row("check", "broken", verdict="relative error 1")

    monkeypatch.setattr(gpu_check, "checks", failing)
    monkeypatch.setattr(gpu_check, "products", lambda _: pytest.fail("timed a wrong kernel"))
    assert gpu_check.main(["--small"]) == 1
