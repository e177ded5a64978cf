"""A forecast writes nothing, names everything, and is near what the run then takes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from qtool.cli import main
from qtool.commands import dry_run, native_code
from qtool.formats.packaged import PACKAGED


def _dry_run(model: Path, out: Path, *options: str) -> Result:
    words = out.parent / "words.txt"
    words.write_text("The model reads the text, then the model writes the next word.\n" * 200)
    texts = ["--eval-text", str(words), "--calibration", str(words), "--seq-len", "32"]
    arguments = ["--out", str(out), "--samples", "4", "--eval-windows", "2", "--device", "cpu"]
    words_ = ["quantize", str(model), "--dry-run", *texts, *arguments, *options]
    return CliRunner().invoke(main, words_)


def _json(result: Result) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return value


def test_every_module_phase_and_pair_is_in_the_json(
    tiny_model_folder: Path, tmp_path: Path
) -> None:
    options = ["--json", "--quiet", "--ignore", "layers.0.mlp"]
    result = _dry_run(tiny_model_folder, tmp_path / "q", *options)
    assert result.exit_code == 0, (result.output, result.exception)
    found = _json(result)
    assert found["event"] == "result" and found["fits"] and found["fits_disk"]
    modules = {module["name"]: module for module in found["modules"]}
    assert len(modules) == 14
    assert modules["model.layers.0.mlp.up_proj"]["scheme"] == "as it is"
    assert modules["model.layers.1.mlp.up_proj"] == {
        "name": "model.layers.1.mlp.up_proj",
        "shape": [128, 64],
        "scheme": "W4 asym g64",
        "method": "awq",
    }
    skipped = {pair["source"]: pair["reason"] for pair in found["skipped_pairs"]}
    assert skipped.keys() == {
        "model.layers.0.post_attention_layernorm",
        "model.layers.0.mlp.up_proj",
    }
    assert "mlp.down_proj, mlp.up_proj stays as it is" in skipped["model.layers.0.mlp.up_proj"]
    assert [phase["name"] for phase in found["phases"]] == [
        "calibration",
        "quantize",
        "write",
        "verify",
        "evaluate",
    ]
    assert found["tensor_parallel"]["1"] == []
    assert any("groups of 64" in line for line in found["tensor_parallel"]["2"])
    assert [path.name for path in tmp_path.iterdir()] == ["words.txt"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["fp8"], "fp8 in all layers, a scale of keys and one of values from calibration"),
        (["int8"], "int8 in all layers; where keys have a scale a token (int8, k8v4), factors"),
        (["auto", "--seq-len", "256"], "at most 0.005 nats per token"),
    ],
)
def test_what_is_asked_of_the_cache_is_named_and_has_a_phase(
    options: list[str], words: str, tiny_model_folder: Path, tmp_path: Path
) -> None:
    result = _dry_run(
        tiny_model_folder, tmp_path / "q", "--json", "--quiet", "--kv-cache", *options
    )
    assert result.exit_code == 0, (result.output, result.exception)
    found = _json(result)
    assert words in found["kv_cache"] and found["phases"][-1]["name"] == "kv cache"
    assert found["phases"][-1]["seconds"] >= found["phases"][-2]["seconds"] > 0
    assert [path.name for path in tmp_path.iterdir()] == ["words.txt"]


def test_the_text_has_a_table_of_modules_and_phases(
    tiny_model_folder: Path, tmp_path: Path
) -> None:
    result = _dry_run(tiny_model_folder, tmp_path / "q")
    assert result.exit_code == 0, (result.output, result.exception)
    for words in ("W4 asym g64", "evaluate", "memory:", "disk:", "tensor parallel over 8"):
        assert words in result.stdout


def test_what_does_not_fit_is_shown_and_then_an_error(
    tiny_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dry_run, "available_cpu_memory", lambda: 1000)
    result = _dry_run(tiny_model_folder, tmp_path / "q", "--json", "--quiet")
    assert result.exit_code == 1 and _json(result)["fits"] is False
    assert "it will not fit: it needs" in result.stderr and "--samples" in result.stderr
    phases = {phase["name"]: phase["peak_bytes"] for phase in _json(result)["phases"]}
    assert f"(phase {max(phases, key=phases.__getitem__)})" in result.stderr
    assert "--eval-windows 0" in result.stderr
    monkeypatch.undo()
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    result = _dry_run(tiny_model_folder, tmp_path / "q", "--json", "--quiet")
    assert result.exit_code == 1 and "of disk and 1 kB are free" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["words.txt"]


def test_what_stops_the_run_stops_the_forecast(tiny_model_folder: Path, tmp_path: Path) -> None:
    result = _dry_run(tiny_model_folder, tmp_path / "q", "--group-size", "48")
    assert result.exit_code == 1 and "48 does not divide" in result.stderr


@pytest.mark.parametrize(
    ("options", "compiles"),
    [
        (["--method", "awq"], True),
        (["--method", "awq", "--eval-windows", "0"], False),
        (["--method", "none", "--kv-cache", "int8"], False),
    ],
    ids=["evaluated", "not evaluated", "weights as they are"],
)
def test_what_the_run_would_compile_is_compiled_before_it_is_forecast(
    options: list[str],
    compiles: bool,
    tiny_model_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    built: list[bool] = []
    monkeypatch.setattr(native_code, "will_compile", lambda: True)
    monkeypatch.setattr(native_code, "load_native", lambda: built.append(True))
    result = _dry_run(tiny_model_folder, tmp_path / "q", *options)
    assert result.exit_code == 0, (result.output, result.exception)
    assert built == [True] * compiles
    assert ("compiling the native CPU code, once" in result.stderr) == compiles


def _alone(arguments: list[str], env: dict[str, str]) -> dict[str, Any]:
    """The result of a command in a process of its own, whose memory nothing else has used."""
    command = [sys.executable, "-m", "qtool", "quantize", *arguments, "--json", "--quiet"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "options",
    [
        ["--method", "rtn", "--group-size", "64"],
        ["--method", "awq", "--group-size", "64", "--samples", "4", "--seq-len", "256"],
        ["--method", "gptq", "--group-size", "64", "--samples", "4", "--seq-len", "256"],
        ["--method", "smoothquant", "--samples", "4", "--seq-len", "256"],
        ["--method", "fp8"],
        ["--method", "none", "--kv-cache", "int8", "--samples", "4", "--seq-len", "256"],
    ],
    ids=["rtn", "awq", "gptq", "smoothquant", "fp8", "none"],
)
def test_the_forecast_is_within_a_quarter_of_the_run_on_smollm2(
    options: list[str], tmp_path: Path, checkout_env: dict[str, str]
) -> None:
    model = next(iter(name for name in PACKAGED if name.startswith("smollm2")))
    env = {**os.environ, **checkout_env, "OMP_NUM_THREADS": "1"}
    arguments = [model, "--out", str(tmp_path / "q"), "--device", "cpu", *options]
    # Before the run and after it: beside other work, the same takes up to half as long again.
    forecast = _alone([*arguments, "--dry-run"], env)
    phases = _alone(arguments, env)["phases"]
    later = _alone([*arguments, "--dry-run", "--overwrite"], env)
    assert forecast["peak_bytes"] == pytest.approx(max(p["peak_bytes"] for p in phases), rel=0.25)
    # CPU time: on a machine that does other things as well, wall time says little.
    expected = sum(phase["cpu_seconds"] for phase in phases)
    found = sum(p["cpu_seconds"] for run in (forecast, later) for p in run["phases"]) / 2
    assert found == pytest.approx(expected, rel=0.25)
