"""What long commands show: text for people, JSON lines for scripts, little when quiet."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from qtool.cli import main
from qtool.commands import console

TEXT = "The quick brown fox jumps over the lazy dog. " * 200


def _quantize(model: Path, out: Path, *options: str) -> Result:
    words = out.parent / "words.txt"
    words.write_text(TEXT)
    arguments = ["--out", str(out), "--calibration", str(words), "--samples", "2"]
    shape = ["--seq-len", "16", "--device", "cpu", "--eval-windows", "0"]
    result = CliRunner().invoke(main, ["quantize", str(model), *arguments, *shape, *options])
    assert result.exit_code == 0, (result.output, result.exception)
    return result


def _evaluate(model: Path, folder: Path, *options: str) -> Result:
    words = folder / "words.txt"
    words.write_text(TEXT)
    arguments = ["--text", str(words), "--seq-len", "32", "--windows", "3", "--device", "cpu"]
    result = CliRunner().invoke(main, ["eval", str(model), *arguments, *options])
    assert result.exit_code == 0, (result.output, result.exception)
    return result


def _events(result: Result) -> list[dict[str, Any]]:
    """Standard output under ``--json``: every line is one object with its kind."""
    events = [json.loads(line) for line in result.stdout.splitlines()]
    assert all(event["event"] in ("progress", "note", "result") for event in events)
    assert [event["event"] for event in events].count("result") == 1
    assert events[-1]["event"] == "result"
    return events


def _steps(events: list[dict[str, Any]], phase: str) -> list[tuple[int, int]]:
    return [(e["done"], e["total"]) for e in events if e.get("phase") == phase]


def test_quantize_as_json_counts_blocks_and_ends_with_the_report(
    tiny_model_folder: Path, tmp_path: Path
) -> None:
    result = _quantize(tiny_model_folder, tmp_path / "模型", "--json")
    events = _events(result)
    assert _steps(events, "quantize") == [(1, 2), (2, 2)]
    assert events[0]["phase"] == "calibration"
    written = json.loads((tmp_path / "模型" / "qtool" / "report.json").read_text())
    assert events[-1].items() >= written.items()
    assert events[-1]["out"] == str(tmp_path / "模型")
    assert events[-1]["bytes"] == (tmp_path / "模型" / "model.safetensors").stat().st_size
    assert result.stderr == ""


def test_eval_as_json_counts_windows_and_ends_with_the_quality(
    tiny_model_folder: Path, tmp_path: Path
) -> None:
    result = _evaluate(tiny_model_folder, tmp_path, "--json")
    events = _events(result)
    assert _steps(events, "evaluate")[-1] == (3, 3)
    assert events[-1]["perplexity"] > 1 and events[-1]["windows"] == 3
    assert result.stderr == ""


def test_quiet_leaves_the_result_and_nothing_else(tiny_model_folder: Path, tmp_path: Path) -> None:
    loud = _quantize(tiny_model_folder, tmp_path / "q")
    quiet = _quantize(tiny_model_folder, tmp_path / "q", "--overwrite", "--quiet")
    assert "quantize: 2 to do" in loud.stderr and quiet.stderr == ""
    assert quiet.stdout == loud.stdout and "smaller" in quiet.stdout
    quiet = _evaluate(tiny_model_folder, tmp_path, "--quiet")
    assert quiet.stderr == "" and "perplexity" in quiet.stdout


def test_quiet_json_is_one_line(tiny_model_folder: Path, tmp_path: Path) -> None:
    (event,) = _events(_quantize(tiny_model_folder, tmp_path / "q", "--json", "--quiet"))
    assert event["event"] == "result"


def test_a_log_has_the_loss_of_blocks_and_the_time_that_is_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = iter((100.0, 160.0))
    monkeypatch.setattr(console.time, "monotonic", lambda: next(clock))
    with console.Show().steps() as steps:
        steps.update("quantize", 10, 40, "done before")
        steps.update("quantize", 20, 40, "layers.19: 7 modules, error 0.0512 [/x]")
        steps.update("quantize", 40, 40, "layers.39: 7 modules, error 0.0600")
    assert capsys.readouterr().err.splitlines() == [
        "quantize: 40 to do",
        "quantize: 10 of 40 done, done before",
        "quantize: 20 of 40 done, 0:02:00 left, layers.19: 7 modules, error 0.0512 [/x]",
        "quantize: 40 of 40 done, layers.39: 7 modules, error 0.0600",
    ]


@pytest.mark.parametrize("show", [console.Show(), console.Show(quiet=True)])
def test_a_note_is_always_said(show: console.Show, capsys: pytest.CaptureFixture[str]) -> None:
    show.note("held dense [/not markup]")
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "note: held dense [/not markup]\n")


def test_a_note_is_an_event_for_scripts(capsys: pytest.CaptureFixture[str]) -> None:
    console.Show(as_json=True).note("held dense")
    captured = capsys.readouterr()
    assert json.loads(captured.out) == {"event": "note", "text": "held dense"}
    assert captured.err == ""


def test_a_status_may_hold_anything(capsys: pytest.CaptureFixture[str]) -> None:
    with console.status("loading [/tmp/x]"):
        pass
    assert capsys.readouterr().err == "loading [/tmp/x]\n"


@pytest.mark.parametrize(
    ("num_bytes", "text"), [(0, "0 B"), (999, "999 B"), (86.7e6, "86.7 MB"), (2e15, "2e+03 TB")]
)
def test_sizes_are_for_people(num_bytes: float, text: str) -> None:
    assert console.size(num_bytes) == text
