"""A run that is killed when its result is in place, or nearly: the same command still ends well."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from qtool.errors import CheckpointError, UsageError
from qtool.formats.checkpoint import CheckpointReader
from qtool.quantize import pipeline
from qtool.quantize.options import QuantizeOptions
from qtool.quantize.pipeline import Progress, quantize_model
from qtool.quantize.work import WorkFolder


def _options(**settings: Any) -> QuantizeOptions:
    return QuantizeOptions(**{"method": "rtn", "device": "cpu", "dtype": "fp16", **settings})


def _bytes(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != "run.json")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def _die(*_: object, **__: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _when_removing(part: str) -> None:
    """Die when a folder with this in its name is to be deleted."""
    rmtree = shutil.rmtree

    def call(path: Path, *arguments: Any, **keywords: Any) -> None:
        if part in str(path):
            _die()
        rmtree(path, *arguments, **keywords)

    shutil.rmtree = call  # type: ignore[assignment]


def _when_the_new_takes_the_place_of_the_old() -> None:
    rename = os.rename

    def call(source: Path, target: Path) -> None:
        if ".partial-" in Path(source).name and Path(target).name == "q":
            _die()
        rename(source, target)

    os.rename = call  # type: ignore[assignment]


def _killed(source: Path, out: Path, options: QuantizeOptions, prepare: Callable[[], None]) -> None:
    """Run in a process that dies where ``prepare`` lays a trap."""
    child = os.fork()
    if child == 0:
        prepare()
        quantize_model(source, out, options)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL


def _before_the_work_folder_goes() -> None:
    WorkFolder.discard = _die  # type: ignore[method-assign]


def _before_the_second_format() -> None:
    pipeline.convert_checkpoint = _die  # type: ignore[assignment]


@pytest.mark.parametrize("trap", [_before_the_work_folder_goes, _before_the_second_format])
def test_the_same_command_finishes_what_is_in_place_already(
    trap: Callable[[], None], tiny_model_folder: Path, tmp_path: Path
) -> None:
    options = _options(formats=("compressed-tensors", "awq"))
    quantize_model(tiny_model_folder, tmp_path / "whole", options)
    _killed(tiny_model_folder, tmp_path / "q", options, trap)
    assert (tmp_path / "q").is_dir() and (tmp_path / "q.work").is_dir()
    steps: list[Progress] = []
    quantize_model(tiny_model_folder, tmp_path / "q", options, steps.append)
    assert [step.detail for step in steps if step.phase == "quantize"] == ["done before"]
    for name in ("", "-awq"):
        assert _bytes(tmp_path / f"q{name}") == _bytes(tmp_path / f"whole{name}")
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"whole", "whole-awq", "q", "q-awq"}


def test_a_result_in_place_is_not_replaced_by_another_run(
    tiny_model_folder: Path, tmp_path: Path
) -> None:
    _killed(tiny_model_folder, tmp_path / "q", _options(), _before_the_work_folder_goes)
    before = _bytes(tmp_path / "q")
    with pytest.raises(UsageError, match="--bits: not given there, 8 now"):
        quantize_model(tiny_model_folder, tmp_path / "q", _options(bits=8))
    with pytest.raises(CheckpointError, match="exists; choose another folder, or pass --overwrite"):
        quantize_model(tiny_model_folder, tmp_path / "q", _options(bits=8, restart=True))
    assert _bytes(tmp_path / "q") == before


def test_a_work_folder_that_is_half_removed_is_no_unfinished_run(
    tiny_model_folder: Path, tmp_path: Path
) -> None:
    options = _options()
    _killed(tiny_model_folder, tmp_path / "q", options, lambda: _when_removing("q.partial-work"))
    CheckpointReader(tmp_path / "q")
    assert {path.name for path in tmp_path.iterdir()} == {"q", "q.partial-work"}
    with pytest.raises(CheckpointError, match="exists"):
        quantize_model(tiny_model_folder, tmp_path / "q", options)
    quantize_model(tiny_model_folder, tmp_path / "q", _options(overwrite=True))
    assert [path.name for path in tmp_path.iterdir()] == ["q"]


@pytest.mark.parametrize(
    "trap", [_when_the_new_takes_the_place_of_the_old, lambda: _when_removing(".old-")]
)
def test_a_model_that_was_to_be_replaced_does_not_stay_aside(
    trap: Callable[[], None], tiny_model_folder: Path, tmp_path: Path
) -> None:
    quantize_model(tiny_model_folder, tmp_path / "q", _options(bits=8))
    old = _bytes(tmp_path / "q")
    _killed(tiny_model_folder, tmp_path / "q", _options(overwrite=True), trap)
    (aside,) = tmp_path.glob("q.old-*")
    assert _bytes(aside / "model") == old
    (tmp_path / "q.old-times").mkdir()
    (tmp_path / "q.old-times" / "thesis.tex").write_text("x")
    quantize_model(tiny_model_folder, tmp_path / "q", _options(overwrite=True))
    assert {path.name for path in tmp_path.iterdir()} == {"q", "q.old-times"}


def test_a_result_that_another_run_wrote_meanwhile_is_seen_before_any_block(
    model_factory: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, fingerprint = model_factory(layers=2), pipeline.run_fingerprint

    def slow(*arguments: Any) -> dict[str, Any]:
        found = fingerprint(*arguments)
        monkeypatch.setattr(pipeline, "run_fingerprint", fingerprint)
        quantize_model(source, tmp_path / "q", _options(bits=8))
        return found

    monkeypatch.setattr(pipeline, "run_fingerprint", slow)
    steps: list[Progress] = []
    with pytest.raises(CheckpointError, match="exists"):
        quantize_model(source, tmp_path / "q", _options(), steps.append)
    assert [step for step in steps if step.phase == "quantize"] == []
    assert [path.name for path in tmp_path.iterdir()] == ["q"]
