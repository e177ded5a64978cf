"""Options that commands share reach what the commands run."""

from __future__ import annotations

from typing import Any

import pytest
from click.testing import CliRunner

from qtool.cli import main
from qtool.commands import bench, evaluate, generate, serve
from qtool.commands.cli_options import BACKEND_NAMES
from qtool.runtime.kernels import BACKENDS
from qtool.runtime.options import EngineOptions, ModelOptions


def test_every_command_that_loads_a_model_passes_every_loading_option_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[ModelOptions] = []

    def note(*arguments: Any, **_: Any) -> None:
        found = [a.loading if isinstance(a, EngineOptions) else a for a in arguments]
        seen.extend(a for a in found if isinstance(a, ModelOptions))

    for module, name in (
        (evaluate, "run_chosen"),
        (generate, "run"),
        (serve, "run"),
        (bench, "run_throughput"),
        (bench, "run_latency"),
    ):
        monkeypatch.setattr(module, name, note)
    chosen = ["--device", "cpu", "--dtype", "bf16", "--backend", "cpu", "--cpu-compute", "bf16"]
    chosen += ["--kv-cache-dtype", "int8", "--batch-invariant", "--strict"]
    chosen += ["--kv-eviction", "heavy-hitter", "--kv-budget", "512"]
    commands = [["eval", "m"], ["generate", "m", "text"], ["serve", "m"]]
    commands += [["bench", "throughput", "m"], ["bench", "latency", "m"]]
    for command in commands:
        result = CliRunner().invoke(main, [*command, *chosen])
        assert result.exit_code == 0, (command, result.output, result.exception)
    expected = ModelOptions(
        device="cpu",
        dtype="bf16",
        backend="cpu",
        cpu_compute="bf16",
        kv_cache_dtype="int8",
        kv_eviction="heavy-hitter",
        kv_budget=512,
        batch_invariant=True,
        strict=True,
    )
    assert seen == [expected] * 5


def test_every_back_end_can_be_named() -> None:
    assert BACKEND_NAMES == BACKENDS


def test_engine_options_reach_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[EngineOptions] = []
    for module, name in ((serve, "run"), (bench, "run_throughput"), (bench, "run_latency")):
        monkeypatch.setattr(module, name, lambda options, *_: seen.append(options))
    chosen = ["--max-num-seqs", "7", "--max-model-len", "99", "--max-num-batched-tokens", "50"]
    chosen += ["--block-size", "32", "--no-enable-prefix-caching", "--scheduling-policy", "fcfs"]
    chosen += ["--gpu-memory-utilization", "0.5", "--kv-cache-memory", "1M"]
    for command in (["serve", "m"], ["bench", "throughput", "m"], ["bench", "latency", "m"]):
        result = CliRunner().invoke(main, [*command, *chosen])
        assert result.exit_code == 0, (command, result.output, result.exception)
    expected = EngineOptions(
        model="m",
        max_num_seqs=7,
        max_model_len=99,
        max_num_batched_tokens=50,
        block_size=32,
        enable_prefix_caching=False,
        scheduling_policy="fcfs",
        gpu_memory_utilization=0.5,
        kv_cache_memory=2**20,
    )
    assert seen == [expected] * 3
