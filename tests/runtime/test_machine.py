"""Facts about the machine, from files and programs that may say anything."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from qtool.runtime import machine
from qtool.runtime.machine import describe_compiler, inspect_machine, triton_status


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program named ``my c++`` that ``$CXX`` names."""
    path = tmp_path / "my c++"
    path.write_text("#!/bin/sh\necho 'my c++ 1.0'\necho more\n")
    path.chmod(0o755)
    monkeypatch.setenv("CXX", f"'{path}' -O2")
    return path


def test_the_compiler_is_the_one_the_environment_names(program: Path) -> None:
    assert describe_compiler() == f"my c++ 1.0, {program}"


def test_a_compiler_that_fails_is_said_to(program: Path) -> None:
    program.write_text("#!/bin/sh\nexit 3\n")
    assert (describe_compiler() or "").startswith(f"{program} does not run (")


def test_a_named_compiler_that_is_not_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/nowhere/c++")
    assert describe_compiler() is None


def test_a_broken_triton_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "triton.py").write_text("raise RuntimeError('built for another libc')")
    monkeypatch.delitem(sys.modules, "triton", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    assert "RuntimeError: built for another libc" in triton_status(has_gpu=False)


def test_a_folder_that_does_not_exist_yet_has_its_parents_disk(tmp_path: Path) -> None:
    here, later = inspect_machine([tmp_path, tmp_path / "not" / "yet"]).disks
    assert later.path == str(tmp_path / "not" / "yet")
    assert abs(later.free_bytes - here.free_bytes) < 1e9


def test_an_unknown_processor_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_cpuinfo", dict)
    processor = inspect_machine([]).processor
    assert processor.model and processor.instruction_sets == ()
