"""Facts about the machine, from files and programs that may say anything."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from qtool.runtime import machine
from qtool.runtime.machine import available_cores, find_compiler, inspect_machine, triton_status


def _cores(monkeypatch: pytest.MonkeyPatch, cgroup: Path, files: dict[str, str]) -> float:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    for name, content in files.items():
        (cgroup / name).parent.mkdir(parents=True, exist_ok=True)
        (cgroup / name).write_text(content)
    return available_cores(cgroup)


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, 8),
        ({"cpu.max": "max 100000\n"}, 8),
        ({"cpu.max": "150000 100000\n"}, 1.5),
        ({"cpu.max": "1600000 100000\n"}, 8),
        ({"cpu.max": "garbage\n"}, 8),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 8),
        ({"cpu/cpu.cfs_quota_us": "200000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 2),
        ({"cpu/cpu.cfs_quota_us": "200000\n"}, 8),
        ({"cpu.max": "100000 0\n"}, 8),
    ],
)
def test_cores_are_the_least_of_affinity_and_quota(
    files: dict[str, str], cores: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert _cores(monkeypatch, tmp_path, files) == cores


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program named ``my c++`` that ``$CXX`` names."""
    path = tmp_path / "my c++"
    path.write_text("#!/bin/sh\necho 'my c++ 1.0'\necho more\n")
    path.chmod(0o755)
    monkeypatch.setenv("CXX", f"'{path}' -O2")
    return path


def test_the_compiler_is_the_one_the_environment_names(program: Path) -> None:
    assert find_compiler() == f"my c++ 1.0, {program}"


def test_a_compiler_that_fails_is_said_to(program: Path) -> None:
    program.write_text("#!/bin/sh\nexit 3\n")
    assert (find_compiler() or "").startswith(f"{program} does not run (")


def test_a_named_compiler_that_is_not_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/nowhere/c++")
    assert find_compiler() is None


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
