"""Native code is built once, by whoever comes first, and its absence is said, not felt."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from qtool.errors import UsageError
from qtool.runtime.kernels.cpu import build as build_module
from qtool.runtime.kernels.cpu.build import (
    FLAGS,
    LEVELS,
    BuildError,
    Recipe,
    build,
    choose_level,
    cpu_features,
    find_compiler,
    load_native,
    recipe,
    will_compile,
)
from qtool.runtime.kernels.cpu.cores import available_cores, physical_cores, quotas

SOURCE = 'extern "C" __attribute__((visibility("default"))) int answer() { return 42; }\n'


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recipe:
    """A recipe of one short source, in a cache of its own."""
    monkeypatch.setenv("QTOOL_CACHE", str(tmp_path / "cache"))
    sources = tmp_path / "native"
    sources.mkdir()
    (sources / "answer.cpp").write_text(SOURCE)
    return Recipe("plain", find_compiler(), "1", FLAGS, sources)


def test_a_library_is_built_once_and_leaves_nothing_else(small: Recipe) -> None:
    path = build(small)
    assert ctypes.CDLL(str(path)).answer() == 42
    written = path.stat().st_mtime_ns
    assert build(small) == path and path.stat().st_mtime_ns == written
    assert {file.suffix for file in path.parent.iterdir()} == {".so", ".lock"}


def test_whatever_decides_what_a_library_is_changes_its_name(small: Recipe) -> None:
    names = {small.path()}
    names.add(replace(small, version="2").path())
    names.add(replace(small, level="avx2").path())
    names.add(replace(small, flags=(*FLAGS, "-O1")).path())
    (small.sources / "answer.cpp").write_text(SOURCE + "// changed\n")
    names.add(small.path())
    (small.sources / "more.h").write_text("")
    names.add(small.path())
    assert len(names) == 6


def test_many_at_once_build_one_library(small: Recipe, checkout_env: dict[str, str]) -> None:
    """Processes, and threads of one of them."""
    program = (
        "import sys; from pathlib import Path\n"
        "from qtool.runtime.kernels.cpu.build import FLAGS, Recipe, build, find_compiler\n"
        "r = Recipe('plain', find_compiler(), '1', FLAGS, Path(sys.argv[1]))\n"
        "import ctypes; print(ctypes.CDLL(str(build(r))).answer(), build(r).stat().st_ino)\n"
    )
    command = [sys.executable, "-c", program, str(small.sources)]
    env = {**checkout_env, "QTOOL_CACHE": os.environ["QTOOL_CACHE"]}
    runs = [subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    with ThreadPoolExecutor(4) as threads:
        paths = list(threads.map(build, [small] * 4))
    answers = {run.communicate(timeout=100)[0] for run in runs}
    assert len(set(paths)) == 1
    assert answers == {f"42 {paths[0].stat().st_ino}\n"}


def test_a_compiler_that_fails_is_quoted_and_leaves_no_library(small: Recipe) -> None:
    (small.sources / "broken.cpp").write_text("int main() { return nonsense; }\n")
    with pytest.raises(BuildError, match="failed: .*nonsense"):
        build(small)
    assert not small.path().exists()


def test_a_cache_that_cannot_be_written_is_a_reason(
    small: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("QTOOL_CACHE", str(tmp_path / "file"))
    with pytest.raises(BuildError, match="cannot be written"):
        build(small)


def test_whether_the_compiler_will_run_is_known_beforehand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QTOOL_CACHE", str(tmp_path))
    monkeypatch.delenv("QTOOL_NATIVE", raising=False)
    assert will_compile()
    library = recipe(choose_level(cpu_features(), os.environ.get("QTOOL_CPU_ISA", ""))).path()
    library.parent.mkdir()
    library.write_bytes(b"")
    assert not will_compile(), "it is there"
    library.unlink()
    monkeypatch.setenv("QTOOL_NATIVE", "0")
    assert not will_compile(), "it is switched off"
    monkeypatch.delenv("QTOOL_NATIVE")
    monkeypatch.setenv("CXX", "nonesuch++")
    assert not will_compile(), "there is no compiler"


def test_without_a_compiler_there_is_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QTOOL_CACHE", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    native = load_native()
    assert native.library is None
    assert "no C++ compiler (c++, g++, clang++ not found)" in native.reason
    monkeypatch.setenv("CXX", "ccache nonesuch++")
    assert "(ccache not found)" in load_native().reason


def test_native_code_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QTOOL_NATIVE", "0")
    assert load_native().reason == "native code is switched off by $QTOOL_NATIVE=0"


def test_other_systems_have_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_module.platform, "system", lambda: "Darwin")
    with pytest.raises(BuildError, match="for Linux, this is Darwin"):
        recipe("plain")


def test_the_best_level_is_chosen_and_lower_ones_can_be_forced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    every = frozenset().union(*LEVELS.values())
    assert choose_level(every, "") == "amx"
    assert choose_level(every - {"amx_int8"}, "") == "avx512"
    assert choose_level(every, "plain") == "plain"
    assert choose_level(every - {"avx512_vnni"}, "") == "avx2"
    assert choose_level(every, "avx512") == "avx512"
    assert choose_level(frozenset(), "") == "plain"
    with pytest.raises(UsageError, match="'avx512': this CPU runs avx2, plain"):
        choose_level(frozenset(LEVELS["avx2"]), "avx512")
    monkeypatch.setenv("QTOOL_CPU_ISA", "sse9")
    with pytest.raises(UsageError, match="QTOOL_CPU_ISA='sse9'"):
        load_native()


def test_cpu_features_are_the_kernels(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    assert cpu_features(cpuinfo) == frozenset()
    cpuinfo.write_text("processor : 0\nflags\t\t: fma avx2\n\nprocessor : 1\nflags : fma avx2\n")
    assert cpu_features(cpuinfo) == {"fma", "avx2"}


def test_hardware_threads_of_a_core_count_once(tmp_path: Path) -> None:
    for cpu, siblings in enumerate(("0,2", "1,3", "0,2", "1,3")):
        folder = tmp_path / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{siblings}\n")
    assert physical_cores({0, 1, 2, 3}, tmp_path) == 2
    assert physical_cores({0, 2}, tmp_path) == 1
    assert physical_cores({7, 8}, tmp_path) == 2


def test_a_quota_of_any_parent_limits(tmp_path: Path) -> None:
    own, root = tmp_path / "own", tmp_path / "cgroup"
    folder = root / "a" / "b"
    folder.mkdir(parents=True)
    own.write_text("0::/a/b\n")
    assert quotas(root, own) == []
    (folder / "cpu.max").write_text("max 100000\n")
    (root / "a" / "cpu.max").write_text("250000 100000\n")
    assert quotas(root, own) == [3]


def test_quotas_of_version_1_are_read(tmp_path: Path) -> None:
    own, root = tmp_path / "own", tmp_path / "cgroup"
    folder = root / "cpu" / "job"
    folder.mkdir(parents=True)
    own.write_text("4:memory:/x\n3:cpu,cpuacct:/job\n")
    (folder / "cpu.cfs_quota_us").write_text("150000\n")
    (folder / "cpu.cfs_period_us").write_text("100000\n")
    assert quotas(root, own) == [2]
    (folder / "cpu.cfs_quota_us").write_text("-1\n")
    assert quotas(root, own) == []


@pytest.mark.parametrize("content", ["garbage", "100000 0", "max 100000", "-1 100000", ""])
def test_a_file_that_states_no_quota_limits_nothing(content: str, tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("0::/\n")
    (tmp_path / "cpu.max").write_text(f"{content}\n")
    assert quotas(tmp_path, own) == []


def test_openmps_variable_lowers_the_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert available_cores() == 1
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert available_cores() >= 1
