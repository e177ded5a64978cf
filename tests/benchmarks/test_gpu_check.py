"""The GPU script runs from end to end on small shapes in the interpreter."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
import gpu_check
import gpu_model

from qtool.runtime.config import parse_decoder_config


def test_every_section_reports_and_the_csv_has_it_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_check.main(["--small", "--csv", str(tmp_path / "rows.csv")]) == 0
    with (tmp_path / "rows.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    sections = [row["section"] for row in rows]
    assert sections.count("check") == len(gpu_check.SCHEMES) + 3 + 1 + 4
    assert sections.count("ceiling") == 1 and sections.count("decode") == 2
    steps = [row for row in rows if row["section"] == "model"]
    assert [(row["name"], row["tokens"]) for row in steps] == [
        (f"decode, {name}, captured", batch) for name in ("bf16", "W4A16 g128") for batch in "12"
    ]
    assert all(float(row["microseconds"]) > 0 for row in steps)
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


def test_the_model_has_the_shape_of_llama_3_8b() -> None:
    config = parse_decoder_config(gpu_model.FULL.config)
    hidden, width = config.hidden_size, config.intermediate_size
    attention = hidden * (2 * hidden + 2 * config.num_kv_heads * config.head_dim)
    linears = config.num_layers * (attention + 3 * hidden * width)
    assert round((linears + 2 * config.vocab_size * hidden) / 1e9, 2) == 8.03


def test_a_step_that_cannot_be_captured_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(calls: object) -> float:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    bench = gpu_check.Bench(torch.device("cpu"), gpu_check.SMALL)
    bench.bandwidth = 1e9
    monkeypatch.setattr(bench, "seconds", refused)
    row = next(gpu_model.decode_steps(bench))
    assert row.name == "decode, bf16, launched" and row.microseconds > 0
