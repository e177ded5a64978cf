"""What a forecast reckons from parts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from qtool.formats.checkpoint import CheckpointReader
from qtool.formats.tensor import QuantizedTensor
from qtool.quantize import measure
from qtool.quantize.kv_cache import SCORED_EVERY, cache_runs
from qtool.quantize.measure import TIMED_ROWS, Runtime, rounding_seconds
from qtool.quantize.options import QuantizeOptions
from qtool.quantize.prepare import plan_job


def _rounding(
    folder: Path, method: str, rows: int, monkeypatch: pytest.MonkeyPatch, **settings: str
) -> tuple[float, list[tuple[int, int]]]:
    """Seconds of all linears where a rounded one takes 3 s longer; the shapes that were timed."""
    made: list[tuple[int, int]] = []

    def rounded(x: Tensor) -> Tensor:
        return x

    def linear(weight: QuantizedTensor) -> Callable[[Tensor], Tensor]:
        made.append(weight.shape)
        return rounded

    def timed(operation: object, x: Tensor) -> tuple[float, float]:
        assert x.shape[0] == TIMED_ROWS
        return (5.0, 5.0) if operation is rounded else (2.0, 2.0)

    monkeypatch.setattr(measure, "_timed", timed)
    runtime = Runtime(lambda _: None, linear)
    options = QuantizeOptions(method=method, device="cpu", seq_len=64, **settings)  # type: ignore[arg-type]
    with CheckpointReader(folder) as reader, torch.no_grad():
        wall, cpu = rounding_seconds(plan_job(reader, options), runtime, rows)
    assert wall == cpu
    return wall, made


@pytest.mark.parametrize(
    ("method", "settings"),
    [("fp8", {}), ("fp8", {"granularity": "tensor"}), ("smoothquant", {"activations": "static"})],
)
def test_a_linear_that_rounds_its_input_is_timed_once_and_counts_as_often_as_it_is_there(
    method: str,
    settings: dict[str, str],
    tiny_model_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seconds, made = _rounding(tiny_model_folder, method, 2 * TIMED_ROWS, monkeypatch, **settings)
    # Queries and outputs, keys and values, gate and up, down; 14 linears in all.
    assert sorted(made) == [(32, 64), (64, 64), (64, 128), (128, 64)]
    assert seconds == pytest.approx(14 * 3 * 2)


def test_weights_alone_are_taken_to_run_as_fast_as_dense_ones(
    tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _rounding(tiny_model_folder, "rtn", TIMED_ROWS, monkeypatch) == (0, [])


def test_an_expert_gets_its_share_of_the_rows(
    model_factory: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = model_factory(
        model_type="mixtral", layers=1, num_local_experts=4, num_experts_per_tok=1
    )
    seconds, _ = _rounding(folder, "fp8", TIMED_ROWS, monkeypatch)
    assert seconds == pytest.approx((4 + 4 * 3 / 4) * 3), "4 of attention, and a quarter of 4 x 3"


def test_runs_with_other_caches_are_counted_in_held_out_windows() -> None:
    fixed = QuantizeOptions(method="rtn", kv_cache="int8")
    assert cache_runs(fixed, 30, 4, 512) == (8, 8)
    auto = QuantizeOptions(method="rtn", kv_cache="auto", samples=4, seq_len=256)
    # 4 samples of half a window: 30 layers, 3 forms and half the depth; 5 tries, twice each.
    sweep, search = 2 * 30 * 3 / 2, 2 * 2 * 5
    assert cache_runs(auto, 30, 4, 512) == (
        8 + sweep + search,
        8 + sweep / SCORED_EVERY + search,
    )
