"""The version is one, and the wheel holds the package: all of it and nothing else."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import qtool

ROOT = Path(__file__).resolve().parents[1]


def _run(*command: object, **options: object) -> str:
    result = subprocess.run(
        [str(part) for part in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        **options,
    )
    assert result.returncode == 0, result.stdout
    return result.stdout


def _package_files() -> set[str]:
    """What the wheel should hold of the package: every file in a folder with an __init__.py."""
    root = [*ROOT.glob("*.py"), ROOT / "py.typed"]
    folders = [p.parent for p in ROOT.glob("*/__init__.py")]
    nested = [f for folder in folders for f in folder.rglob("*") if f.is_file()]
    files = (f.relative_to(ROOT) for f in [*root, *nested] if "__pycache__" not in f.parts)
    return {f"qtool/{file.as_posix()}" for file in files}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy: setuptools leaves its build folder in the source's."""
    source, out = tmp_path_factory.mktemp("source") / "qtool", tmp_path_factory.mktemp("wheel")
    skip = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "*.egg-info")
    shutil.copytree(ROOT, source, ignore=skip)
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", out]
    _run(sys.executable, "-m", "pip", "wheel", *options, source)
    (path,) = out.glob("*.whl")
    return path


def test_the_changelog_has_the_version() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    versions = re.findall(r"^## \[(\d[^]]*)\] - (?:Unreleased|\d{4}-\d\d-\d\d)$", changelog, re.M)
    assert qtool.__version__ in versions[:1]


def test_public_names_are_loaded_when_first_used() -> None:
    from qtool.runtime.sampling_params import SamplingParams

    assert qtool.SamplingParams is SamplingParams


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'LMM'"):
        _ = qtool.LMM


@pytest.mark.slow
def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    info = f"qtool-{qtool.__version__}.dist-info/"
    assert {name for name in names if not name.startswith(info)} == _package_files()
    assert info + "licenses/LICENSE" in names


@pytest.mark.slow
def test_an_installed_wheel_runs_from_any_folder(wheel: Path, tmp_path: Path) -> None:
    target, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    elsewhere.mkdir()
    options = ["--no-deps", "--no-index", "--target", target]
    _run(sys.executable, "-m", "pip", "install", *options, wheel)
    here = {"cwd": elsewhere, "env": {**os.environ, "PYTHONPATH": str(target)}}
    origin = _run(sys.executable, "-c", "import qtool; print(qtool.__file__)", **here)
    assert Path(origin.strip()).is_relative_to(target)
    for command in ([target / "bin" / "qtool"], [sys.executable, "-m", "qtool"]):
        assert "quantize" in _run(*command, "--help", **here)
        assert qtool.__version__ in _run(*command, "--version", **here)
