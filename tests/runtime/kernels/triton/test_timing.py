"""What qtool tune times: every product of a model, in tiles it is given and gives back."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from qtool.commands import tune as command
from qtool.formats.scheme import WeightScheme, fp8_scheme, w8a8_scheme, weight_scheme
from support.gemm import make_weight

pytest.importorskip("triton")
from triton.runtime.errors import OutOfResources

from qtool.runtime.kernels.triton import timing
from qtool.runtime.kernels.triton.backend import TritonBackend
from qtool.runtime.kernels.triton.config import BUCKETS, LONG_PROMPT, ExpertsShape
from qtool.runtime.kernels.triton.linear import PackedLinear
from qtool.runtime.kernels.triton.target import sample_target
from qtool.runtime.kernels.triton.tuning import candidates, read_table, tune
from support.specializations import recorded_forms

CPU = torch.device("cpu")
SCHEMES = (
    weight_scheme(4, False, 64),
    weight_scheme(8, True, None),
    w8a8_scheme(),
    fp8_scheme("tensor"),
    fp8_scheme("channel"),
    fp8_scheme("block"),
    fp8_scheme(weight_only=True),
    fp8_scheme("block", weight_only=True),
)


def _backend(arch: str) -> TritonBackend:
    return TritonBackend(CPU, torch.float16, sample_target(arch))


def _linear(backend: TritonBackend, scheme: WeightScheme, rows: int = 128) -> PackedLinear:
    scale = 0.02 if scheme.has_input_scale else None
    layer = backend.linear(make_weight(scheme, rows, 1024, input_scale=scale), None)
    assert isinstance(layer, PackedLinear)
    return layer


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Forms launched by what was timed; each call runs once, and takes longer than the last."""
    launched: list[object] = []

    def bench(call: Callable[[], object]) -> float:
        with recorded_forms() as forms:
            call()
        launched.append(frozenset(forms))
        return float(len(launched))

    monkeypatch.setattr(timing, "gpu_bench", bench)
    return launched


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize("scheme", SCHEMES, ids=WeightScheme.describe)
def test_every_kind_of_weight_is_timed_in_all_its_candidates(
    scheme: WeightScheme, arch: str, timed: list[object]
) -> None:
    backend = _backend(arch)
    layer = _linear(backend, scheme)
    before = dict(layer.configs)
    table = tune(backend.target, (layer.shape,), timing.timer_of([layer]))
    every = [
        len(candidates(backend.target, layer.shape, bucket)) for bucket in (*BUCKETS, LONG_PROMPT)
    ]
    assert len(timed) == sum(every)
    assert layer.configs == before == {bucket: table[layer.shape, bucket] for bucket in before}


@pytest.mark.parametrize("scheme", [SCHEMES[0], SCHEMES[2], SCHEMES[5]], ids=WeightScheme.describe)
def test_both_products_of_a_mixture_are_timed_and_used(
    scheme: WeightScheme, timed: list[object]
) -> None:
    backend = _backend("sm_90")
    ups, downs = ([_linear(backend, scheme, rows) for _ in range(3)] for rows in (2048, 1024))
    experts = backend.experts(ups, downs, "silu", 2)
    assert experts is not None and backend.packed_experts == (experts,)
    up, down = shapes = backend.packed_experts[0].shapes
    assert isinstance(up, ExpertsShape) and (up.one.rows, down.one.rows) == (2048, 1024)
    before = dict(backend.packed_experts[0].configs)
    table = tune(backend.target, shapes, timing.timer_of(backend.packed_experts))
    assert backend.packed_experts[0].configs == before
    slower = {key: candidates(backend.target, *key)[-1] for key in table}
    assert slower != table
    other = TritonBackend(CPU, torch.float16, backend.target, slower)
    ups, downs = ([_linear(other, scheme, rows) for _ in range(3)] for rows in (2048, 1024))
    other.experts(ups, downs, "silu", 2)
    for bucket, pair in other.packed_experts[0].configs.items():
        assert pair == (slower[up, bucket], slower[down, bucket])


def test_tiles_that_do_not_fit_a_gpu_are_never_the_fastest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(call: Callable[[], object]) -> float:
        raise OutOfResources(300_000, 232_448, "shared memory")

    monkeypatch.setattr(timing, "gpu_bench", full)
    layer = _linear(_backend("sm_90"), SCHEMES[0])
    kept = layer.configs[8]
    assert timing.timer_of([layer])(layer.shape, 8, kept) == math.inf
    assert layer.configs[8] == kept


def test_a_second_models_tiles_join_the_first_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, timed: list[object]
) -> None:
    from qtool.commands.console import Show

    monkeypatch.setattr(command, "cache_folder", lambda: tmp_path)
    sizes = []
    for rows in (128, 256):
        backend = _backend("sm_90")
        _linear(backend, SCHEMES[0], rows)
        path, count = command._measure(backend, Show())
        table, stale = read_table(tmp_path, backend.tuned_for)
        assert count == 1 and path.parent == tmp_path and table is not None and stale is None
        sizes.append(len(table))
    assert sizes == [len(BUCKETS) + 1, 2 * (len(BUCKETS) + 1)]
