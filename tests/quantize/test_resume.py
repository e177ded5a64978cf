"""A run that is killed goes on, and its result is that of a run that was not, to the byte."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from qtool.errors import UsageError
from qtool.formats.kv_plan import KVPlan
from qtool.quantize.kv_cache import CacheTask, Planner
from qtool.quantize.options import QuantizeOptions
from qtool.quantize.pipeline import Evaluated, Progress, quantize_model

# One interpreter imports torch, and a fork of it is killed in every round.
SCRIPT = """
import json, os, random, signal, sys, time
from pathlib import Path
import torch
from qtool.quantize.options import QuantizeOptions
from qtool.quantize.pipeline import Evaluated, quantize_model

source, folder, text, method, seed, rounds = sys.argv[1:]
torch.set_num_threads(1)
out = Path(folder) / "q"
options = QuantizeOptions(
    method=method, calibration=(text,), eval_text=text, samples=4, seq_len=32, device="cpu",
    eval_windows=2, kv_cache="fp8" if method == "none" else None,
)


def evaluate(written, original):
    return Evaluated("sum", {"sum": float(original.logits(1, 0, 31).double().sum())})


def run(out):
    quantize_model(Path(source), out, options, evaluator=evaluate)


def run_and_exit():
    run(out)
    os._exit(0)


def start(target, *arguments):
    child = os.fork()
    if child == 0:
        target(*arguments)
    return child


def kill_at(number):
    # Die in the middle of the n-th of the calls that change what is on the disk.
    left = [number]

    def counted(function):
        def call(*arguments, **keywords):
            left[0] -= 1
            if left[0] <= 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **keywords)
        return call

    for name in ("replace", "rename", "fsync", "unlink", "mkdir"):
        setattr(os, name, counted(getattr(os, name)))
    run_and_exit()


run(Path(folder) / "warm")  # imports, here and not in every child
began = time.perf_counter()
run(Path(folder) / "whole")
whole = time.perf_counter() - began
choose = random.Random(int(seed))
found = []
for number in range(int(rounds)):
    if number % 2:
        child = start(kill_at, choose.randint(1, 40))
    else:
        child = start(run_and_exit)
        time.sleep(choose.uniform(0.1, 0.9) * whole)
        os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    done = len(list(Path(f"{out}.work").glob("block-*.json")))
    found.append([done, out.exists()])
    if out.exists():
        break
if not out.exists():
    run(out)
print(json.dumps(found))
"""


def _bytes(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != "run.json")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def _kill_often(
    source: Path, tmp_path: Path, method: str, seed: int, rounds: int, env: dict[str, str]
) -> list[list[int]]:
    arguments = [source, tmp_path, __file__, method, seed, rounds]
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, *map(str, arguments)],
        env={**env, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    found: list[list[int]] = json.loads(result.stdout)
    return found


@pytest.mark.parametrize("method", ["awq", pytest.param("rtn", marks=pytest.mark.slow)])
def test_a_run_killed_again_and_again_gives_the_bytes_of_one_that_was_not(
    method: str, model_factory: Callable[..., Path], tmp_path: Path, checkout_env: dict[str, str]
) -> None:
    source = model_factory(layers=5, max_shard_size="200KB")
    found = _kill_often(source, tmp_path, method, 3, 6, checkout_env)
    assert any(done > 0 for done, _ in found), "a kill came after some block"
    assert _bytes(tmp_path / "q") == _bytes(tmp_path / "whole")
    report = json.loads((tmp_path / "q/qtool/report.json").read_text())
    assert len(report["modules"]) == 35 and report["evaluation"]["engine"] == "sum"


@pytest.mark.slow
def test_weights_that_stay_as_they_are_survive_a_run_killed_again_and_again(
    model_factory: Callable[..., Path], tmp_path: Path, checkout_env: dict[str, str]
) -> None:
    source = model_factory(layers=5, max_shard_size="200KB")
    found = _kill_often(source, tmp_path, "none", 3, 6, checkout_env)
    assert any(done > 0 for done, _ in found), "a kill came after some block"
    assert _bytes(tmp_path / "q") == _bytes(tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_the_moment_of_the_kill_does_not_matter(
    seed: int, model_factory: Callable[..., Path], tmp_path: Path, checkout_env: dict[str, str]
) -> None:
    source = model_factory(layers=5)
    _kill_often(source, tmp_path, "awq", seed, 12, checkout_env)
    assert _bytes(tmp_path / "q") == _bytes(tmp_path / "whole")


def _options(**settings: object) -> QuantizeOptions:
    values = {"calibration": (__file__,), "samples": 4, "seq_len": 32, "device": "cpu"}
    return QuantizeOptions(**{**values, **settings})  # type: ignore[arg-type]


def _stop_after(blocks: int) -> Callable[[Progress], None]:
    def stop(step: Progress) -> None:
        if step.phase == "quantize" and step.done == blocks:
            raise KeyboardInterrupt

    return stop


def _stopped(
    source: Path, out: Path, blocks: int, planner: Planner | None = None, **settings: object
) -> None:
    with pytest.raises(KeyboardInterrupt):
        quantize_model(source, out, _options(**settings), _stop_after(blocks), planner=planner)


@pytest.mark.parametrize("damage", [lambda data: data[:-7], lambda data: b"", lambda data: None])
@pytest.mark.parametrize("name", ["block-00001.safetensors", "block-00001.json", "state-00003"])
def test_a_damaged_work_folder_gives_the_same_bytes_in_the_end(
    name: str,
    damage: Callable[[bytes], bytes | None],
    model_factory: Callable[..., Path],
    tmp_path: Path,
) -> None:
    source = model_factory(layers=4)
    quantize_model(source, tmp_path / "whole", _options())
    _stopped(source, tmp_path / "q", 3)
    (path,) = (tmp_path / "q.work").glob(f"{name}*")
    damaged = damage(path.read_bytes())
    if damaged is None:
        path.unlink()
    else:
        path.write_bytes(damaged)
    steps: list[Progress] = []
    quantize_model(source, tmp_path / "q", _options(), steps.append)
    assert any(step.phase == "resume" and "again" in step.detail for step in steps)
    assert _bytes(tmp_path / "q") == _bytes(tmp_path / "whole")
    assert not (tmp_path / "q.work").exists()


def test_only_the_blocks_that_are_missing_are_done(
    model_factory: Callable[..., Path], tmp_path: Path
) -> None:
    source = model_factory(layers=4)
    _stopped(source, tmp_path / "q", 3)
    steps: list[Progress] = []
    quantize_model(source, tmp_path / "q", _options(), steps.append)
    assert [step.done for step in steps if step.phase == "quantize"] == [3, 4]


@pytest.mark.parametrize("method", ["gptq", "rtn"])
def test_what_a_planner_is_told_of_keys_is_what_a_run_that_was_not_stopped_tells(
    method: str, model_factory: Callable[..., Path], tmp_path: Path
) -> None:
    source, settings = model_factory(layers=4), {"kv_cache": "int8", "method": method}
    told: list[CacheTask] = []

    def plan(task: CacheTask) -> KVPlan:
        told.append(task)
        return KVPlan.uniform(task.asked, 4)

    quantize_model(source, tmp_path / "whole", _options(**settings), planner=plan)
    _stopped(source, tmp_path / "q", 2, plan, **settings)
    quantize_model(source, tmp_path / "q", _options(**settings), planner=plan)
    assert _bytes(tmp_path / "q") == _bytes(tmp_path / "whole")
    assert json.dumps(told[0].key_peaks) == json.dumps(told[1].key_peaks)
    assert [(len(heads), len(heads[0])) for heads in told[1].key_peaks] == [(2, 16)] * 4


@pytest.mark.parametrize("method", ["gptq", "rtn"])
def test_scales_of_the_cache_are_those_of_a_run_that_was_not_stopped(
    method: str, model_factory: Callable[..., Path], tmp_path: Path
) -> None:
    source, settings = model_factory(layers=4), {"kv_cache": "fp8", "method": method}
    quantize_model(source, tmp_path / "whole", _options(**settings))
    _stopped(source, tmp_path / "q", 2, **settings)
    with pytest.raises(UsageError, match="--kv-cache: fp8 there, not given now"):
        quantize_model(source, tmp_path / "q", _options(method=method))
    quantize_model(source, tmp_path / "q", _options(**settings))
    assert _bytes(tmp_path / "q") == _bytes(tmp_path / "whole")
    names = load_file(tmp_path / "q" / "model.safetensors")
    assert sum(name.endswith(("k_scale", "v_scale")) for name in names) == 8


def test_what_was_changed_is_named_and_refused(
    model_factory: Callable[..., Path], tmp_path: Path
) -> None:
    source, other = model_factory(layers=3), model_factory(layers=3, seed=1)
    _stopped(source, tmp_path / "q", 2)
    kept = _bytes(tmp_path / "q.work")
    for folder, settings, message in (
        (source, {"group_size": 32}, "--group-size: not given there, 32 now"),
        (source, {"seed": 1}, "--seed: 0 there, 1 now"),
        (source, {"samples": 3}, "calibration tokens: "),
        (other, {}, "source: "),
    ):
        with pytest.raises(UsageError, match=f"{message}.*--restart"):
            quantize_model(folder, tmp_path / "q", _options(**settings))
        assert _bytes(tmp_path / "q.work") == kept
    quantize_model(other, tmp_path / "q", _options(restart=True))
    assert [path.name for path in tmp_path.iterdir()] == ["q"]


def test_another_number_of_threads_would_give_other_bytes_and_is_refused(
    model_factory: Callable[..., Path], tmp_path: Path
) -> None:
    source = model_factory(layers=3)
    _stopped(source, tmp_path / "q", 2)
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        changed = rf"OMP_NUM_THREADS\): {before} there, {before + 1} now"
        with pytest.raises(UsageError, match=changed):
            quantize_model(source, tmp_path / "q", _options())
    finally:
        torch.set_num_threads(before)
    quantize_model(source, tmp_path / "q", _options())


def test_leftovers_of_a_killed_run_are_removed_by_the_next(
    tiny_model_folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "q.partial-abc").mkdir()
    (tmp_path / "q.partial-abc" / "shard-00000").write_bytes(b"x")
    quantize_model(tiny_model_folder, tmp_path / "q", _options(method="rtn"))
    assert [path.name for path in tmp_path.iterdir()] == ["q"]


def test_an_evaluation_that_fails_costs_no_block(tiny_model_folder: Path, tmp_path: Path) -> None:
    def fail(*_: object) -> Evaluated:
        raise RuntimeError("no memory")

    options = _options(method="rtn", eval_text=__file__, eval_windows=1)
    with pytest.raises(RuntimeError):
        quantize_model(tiny_model_folder, tmp_path / "q", options, evaluator=fail)
    assert [path.name for path in tmp_path.iterdir()] == ["q.work"]
    steps: list[Progress] = []
    quantize_model(
        tiny_model_folder,
        tmp_path / "q",
        options,
        steps.append,
        evaluator=lambda _, original: Evaluated("e", {"x": float(original.logits(0, 0, 3).sum())}),
    )
    assert [(step.done, step.detail) for step in steps if step.phase == "quantize"] == [
        (2, "done before")
    ]
