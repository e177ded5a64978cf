"""Options that commands share reach what the commands run."""

from __future__ import annotations

from typing import Any

import pytest
from click.testing import CliRunner

from qtool.cli import main
from qtool.commands import evaluate, generate, serve
from qtool.runtime.options import EngineOptions, ModelOptions


def test_every_command_that_loads_a_model_passes_every_loading_option_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[ModelOptions] = []

    def note(*arguments: Any, **_: Any) -> None:
        found = [a.loading if isinstance(a, EngineOptions) else a for a in arguments]
        seen.extend(a for a in found if isinstance(a, ModelOptions))

    for module, name in ((evaluate, "run_chosen"), (generate, "run"), (serve, "run")):
        monkeypatch.setattr(module, name, note)
    chosen = ["--device", "cpu", "--dtype", "bf16", "--backend", "cpu", "--cpu-compute", "bf16"]
    chosen += ["--kv-cache-dtype", "int8", "--batch-invariant", "--strict"]
    for command in (["eval", "m"], ["generate", "m", "text"], ["serve", "m"]):
        result = CliRunner().invoke(main, [*command, *chosen])
        assert result.exit_code == 0, (command, result.output, result.exception)
    expected = ModelOptions(
        device="cpu",
        dtype="bf16",
        backend="cpu",
        cpu_compute="bf16",
        kv_cache_dtype="int8",
        batch_invariant=True,
        strict=True,
    )
    assert seen == [expected] * 3
