"""The doctor tells what is there, what is missing, and never fails over either."""

from __future__ import annotations

import json
import shutil
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from qtool.cli import main
from qtool.runtime import machine
from qtool.runtime.kernels.cpu.build import LEVELS
from qtool.runtime.machine import Gpu


def _doctor(*options: str) -> str:
    result = CliRunner().invoke(main, ["doctor", *options])
    assert result.exit_code == 0, (result.output, result.exception)
    return result.stdout


def _facts() -> dict[str, Any]:
    facts: dict[str, Any] = json.loads(_doctor("--json"))
    return facts


def test_every_operation_has_a_kernel_and_a_reason() -> None:
    kernels = _facts()["kernels"]["cpu"]
    found = {(kernel["operation"], kernel["dtype"]) for kernel in kernels}
    parts = [f"{name}, {kind}" for name in ("attention", "norm") for kind in ("quantized", "dense")]
    operations = ("linear W4", "linear W8", "linear dense", *parts)
    assert found == {(name, dtype) for name in operations for dtype in ("bf16", "fp16", "fp32")}
    for kernel in kernels:
        assert kernel["backend"] and kernel["kernel"] and kernel["reason"]
        assert (kernel["bytes_per_weight"] is None) == (
            not kernel["operation"].startswith("linear")
        )


def test_the_facts_are_the_machines_own() -> None:
    facts = _facts()
    assert facts["event"] == "result"
    assert facts["packages"]["torch"] == version("torch")
    assert facts["processor"]["cores"] >= 1 and facts["free_memory"] > 0
    assert all(disk["free_bytes"] > 0 for disk in facts["disks"])


def test_the_text_names_every_part() -> None:
    text = _doctor()
    for part in (
        "CPU",
        "threads",
        "free memory",
        "GPU",
        "free disk",
        "Triton",
        "native code",
        "C++ compiler",
    ):
        assert part in text
    assert "kernels on cpu" in text and "linear W4" in text


def test_missing_packages_and_compilers_are_facts_and_no_errors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(machine, "PACKAGES", ("torch", "no-such-package"))
    facts = _facts()
    assert facts["triton"].startswith("does not import")
    assert facts["compiler"] is None
    assert facts["packages"]["no-such-package"] is None
    assert "not installed" in _doctor()


def test_gpus_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu("NVIDIA [x]", "9.0", 10**9, 2 * 10**9)
    monkeypatch.setattr(machine, "_gpus", lambda: (gpu,))
    monkeypatch.setattr("qtool.commands.doctor.planned_kernels", lambda _: ())
    assert "NVIDIA [x], capability 9.0, 1 GB of 2 GB free" in _doctor()


@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
def test_build_compiles_and_says_where_the_code_is() -> None:
    facts = json.loads(_doctor("--build", "--json"))
    level, path = facts["native"].split(", ")
    assert level in LEVELS and Path(path).is_file()


def test_build_fails_where_there_can_be_no_native_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QTOOL_NATIVE", "0")
    result = CliRunner().invoke(main, ["doctor", "--build"])
    assert result.exit_code == 1
    assert "--build: native code is switched off" in result.stderr
    assert "switched off by $QTOOL_NATIVE=0" in json.loads(_doctor("--json"))["native"]
