"""The GPU script runs from end to end on small shapes in the interpreter."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
import gpu_check
import gpu_model
from gpu_limits import Allowance, attention_target_of, target_of

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
    aimed = [row["name"] for row in rows if row["target"]]
    assert aimed == ["W4A16 g128"] * 2 + forms[1:] * 2 and "left out" not in sections


def test_a_wrong_kernel_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def failing(bench: gpu_check.Bench):  # type: ignore[no-untyped-def]
        yield bench.row("check", "broken", verdict="relative error 1")

    timed = ((failing, 9), (lambda _: pytest.fail("timed a wrong kernel"), 9))
    monkeypatch.setattr(gpu_check, "SECTIONS", timed)
    assert gpu_check.main(["--small"]) == 1


def test_it_ends_in_time_and_names_what_is_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    now = [0.0]

    def slow(bench: gpu_check.Bench):  # type: ignore[no-untyped-def]
        for name in "abcdefgh":
            now[0] += 20
            yield bench.row("product", name)

    def later(bench: gpu_check.Bench):  # type: ignore[no-untyped-def]
        yield bench.row("model", "after it")

    monkeypatch.setattr(gpu_check, "Allowance", lambda: Allowance(lambda: now[0]))
    monkeypatch.setattr(gpu_check, "SECTIONS", ((slow, 50), (later, 50)))
    assert gpu_check.main(["--small"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[1] for line in lines[:-1]] == [
        "a", "b", "c", "the rest of slow", "after it",
    ]  # fmt: skip
    assert "stopped when its 50 s were over" in lines[3]


def test_what_a_section_leaves_the_next_one_has() -> None:
    now = [0.0]

    def items(count: int):  # type: ignore[no-untyped-def]
        for index in range(count):
            now[0] += 10
            yield index

    allowance = Allowance(lambda: now[0])
    assert list(allowance.taken(items(1), 50)) == [0] and not allowance.cut
    assert list(allowance.taken(items(9), 20)) == [0, 1, 2, 3, 4, 5, 6] and allowance.cut


def test_sections_fit_in_eight_minutes() -> None:
    assert sum(seconds for _, seconds in gpu_check.SECTIONS) <= 460


@pytest.mark.parametrize(
    ("tokens", "of_ceiling", "speedup", "expected"),
    [
        (1, 0.81, 0.1, "80% of the ceiling: met"),
        (16, 0.79, 9.0, "80% of the ceiling: missed"),
        (64, 0.1, 1.3, "1.3 x fp16: met"),
        (256, 0.1, 0.89, "0.9 x fp16: missed"),
        (4096, 0.1, 0.94, "0.95 x fp16: missed"),
    ],
)
def test_targets_follow_from_the_number_of_tokens(
    tokens: int, of_ceiling: float, speedup: float, expected: str
) -> None:
    assert target_of(tokens, of_ceiling, speedup) == expected


@pytest.mark.parametrize(
    ("form", "context", "speedup", "expected"),
    [
        ("int8", 4096, 1.0, "1.0 x 16-bit pages: met"),
        ("int4", 4096, 0.99, "1.0 x 16-bit pages: missed"),
        ("int8", 32768, 1.69, "1.7 x 16-bit pages: missed"),
        ("int4", 131072, 2.3, "2.3 x 16-bit pages: met"),
        ("fp8", 32768, 1.0, "1.0 x 16-bit pages: met"),
    ],
)
def test_targets_of_attention_follow_from_form_and_context(
    form: str, context: int, speedup: float, expected: str
) -> None:
    assert attention_target_of(form, context, speedup) == expected


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
