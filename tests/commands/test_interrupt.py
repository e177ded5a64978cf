"""A run that is stopped leaves nothing that looks like a model, and says so by its exit code."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from qtool.errors import CheckpointError
from qtool.formats.checkpoint import CheckpointReader

# A tiny model is done before a signal can reach it, so the script stops in the middle.
SCRIPT = """
import sys, time
from qtool.cli import main
from qtool.formats.writer import CheckpointWriter

finish_tensors = CheckpointWriter.finish_tensors

def wait(self, config):
    self._flush()
    print("written", flush=True)
    time.sleep(60)
    return finish_tensors(self, config)

CheckpointWriter.finish_tensors = wait
main(sys.argv[1:], prog_name="qtool")
"""


def _start(model: Path, out: Path, env: dict[str, str], *options: str) -> subprocess.Popen[str]:
    """A quantization that has written its tensors and is about to finish."""
    command = ["quantize", str(model), "--out", str(out), "--method", "rtn", "--device", "cpu"]
    command += ["--eval-windows", "0"]
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, *command, *options],
        env={**env, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "written\n"
    return process


@pytest.mark.parametrize(
    ("number", "exit_code", "message"),
    [(signal.SIGINT, 130, "interrupted\n"), (signal.SIGTERM, 143, "terminated\n")],
)
def test_a_polite_signal_keeps_the_finished_blocks_and_says_how_to_go_on(
    number: signal.Signals,
    exit_code: int,
    message: str,
    tiny_model_folder: Path,
    tmp_path: Path,
    checkout_env: dict[str, str],
) -> None:
    with _start(tiny_model_folder, tmp_path / "q", checkout_env) as process:
        names = sorted(path.name[:10] for path in tmp_path.iterdir())
        assert names == ["q.partial-", "q.work"]
        process.send_signal(number)
        _, errors = process.communicate(timeout=30)
    assert process.returncode == exit_code
    assert errors.endswith(message) and "Traceback" not in errors
    assert "2 finished blocks" in errors and "the same command goes on" in errors
    assert [path.name for path in tmp_path.iterdir()] == ["q.work"]


def test_a_killed_run_leaves_the_old_model_and_nothing_that_looks_finished(
    tiny_model_folder: Path,
    model_factory: Callable[..., Path],
    tmp_path: Path,
    checkout_env: dict[str, str],
) -> None:
    old = model_factory(tmp_path / "q")
    before = {path.name: path.read_bytes() for path in old.iterdir()}
    with _start(tiny_model_folder, old, checkout_env, "--overwrite") as process:
        process.kill()
        process.wait(timeout=30)
    assert process.returncode == -signal.SIGKILL
    assert {path.name: path.read_bytes() for path in old.iterdir()} == before
    others = sorted(path for path in tmp_path.iterdir() if path != old)
    assert [path.name[:10] for path in others] == ["q.partial-", "q.work"]
    for path in others:
        with pytest.raises(CheckpointError, match="config.json is missing"):
            CheckpointReader(path)
