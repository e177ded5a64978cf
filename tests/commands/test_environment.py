"""Machines that lack a locale, Triton or a compiler: only speed and looks may depend on them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

# Several commands in one process, because each process imports torch.
SCRIPT = """
import json, sys
without, commands = json.loads(sys.argv[1])
sys.modules.update(dict.fromkeys(without))
from qtool.cli import main
codes = []
for command in commands:
    try:
        main(command, prog_name="qtool")
    except SystemExit as stop:
        codes.append(stop.code)
sys.stderr.write(repr(codes))
"""


@pytest.mark.parametrize(
    ("env", "without"),
    [
        ({"LC_ALL": "C"}, []),
        ({"LC_ALL": "C", "PYTHONIOENCODING": "ascii", "PATH": "/", "CXX": ""}, ["triton"]),
    ],
    ids=["C locale", "ASCII, no Triton, no compiler"],
)
def test_the_main_job_runs_with_chinese_names_and_text(
    env: dict[str, str],
    without: list[str],
    model_factory: Callable[..., Path],
    tmp_path: Path,
    checkout_env: dict[str, str],
) -> None:
    model, out, missing = (str(tmp_path / name) for name in ("模型", "量化", "不在"))
    model_factory(Path(model))
    commands = [
        ["doctor"],
        ["quantize", model, "--out", out, "--method", "rtn", "--device", "cpu"],
        ["generate", out, "你好，世界", "--max-tokens", "8", "--device", "cpu"],
        ["quantize", missing, "--out", str(tmp_path / "无"), "--method", "rtn"],
    ]
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps([without, commands])],
        env={**checkout_env, "OMP_NUM_THREADS": "1", **env},
        capture_output=True,
        check=False,
        timeout=100,
    )
    errors = result.stderr.decode()
    assert result.returncode == 0 and "Traceback" not in errors, errors
    assert errors.endswith("[0, 0, 0, 1]"), errors
    assert (tmp_path / "量化" / "config.json").exists() and not (tmp_path / "无").exists()
    assert ("none (set CXX" in result.stdout.decode()) == ("triton" in without)
    assert ("量化" in result.stdout.decode()) == ("triton" not in without)
