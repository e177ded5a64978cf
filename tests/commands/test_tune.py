"""qtool tune: a table is measured, kept, and used by the next load."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from qtool.cli import main
from qtool.commands.console import Show
from qtool.quantize.options import QuantizeOptions
from qtool.quantize.pipeline import quantize_model
from qtool.runtime.loaded_model import load_model
from qtool.runtime.options import ModelOptions

pytest.importorskip("triton")
from qtool.commands import tune
from qtool.runtime.kernels.triton import timing

LOADING = ModelOptions(device="cpu", backend="triton", dtype="fp16", self_check=False)


@pytest.fixture
def quantized(model_factory: Callable[..., Path], tmp_path: Path) -> Path:
    options = QuantizeOptions(method="rtn", group_size=32, device="cpu")
    quantize_model(model_factory(dtype=torch.float16), tmp_path / "q", options)
    return tmp_path / "q"


def test_measured_tiles_are_kept_and_used_by_the_next_load(
    quantized: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QTOOL_CACHE", str(tmp_path / "cache"))
    calls: list[object] = []

    def bench(call: Callable[[], object]) -> float:
        calls.append(call)
        return float(len(calls))  # the first measured, the rules' choice, is the fastest

    monkeypatch.setattr(timing, "gpu_bench", bench)
    before = load_model(quantized, LOADING).decoder.backend
    tune.run(str(quantized), LOADING, Show(quiet=True))
    files = list((tmp_path / "cache").glob("tiles-*.json"))
    assert [file.name for file in files] == ["tiles-cpu.json"] and calls
    after = load_model(quantized, LOADING).decoder.backend
    tuned, ruled = ([op.configs for op in backend.packed] for backend in (after, before))
    assert tuned == ruled


def test_without_a_gpu_there_is_nothing_to_measure(quantized: Path) -> None:
    result = CliRunner().invoke(
        main, ["tune", str(quantized), "--device", "cpu", "--dtype", "fp32"]
    )
    assert result.exit_code == 2 and "measures Triton's kernels on a GPU" in result.output
