"""Native linear layers and the thread pool under AddressSanitizer, UBSan and ThreadSanitizer."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from qtool.runtime.kernels.cpu.build import SOURCES, recipe
from support.native import LEVELS

DRIVER = Path(__file__).parents[2] / "support" / "native_driver.cpp"
# The step and its attention have a driver's worth of set-up in Python; they are left out here.
LINEAR = ("pool", "acts", "gemm", "gemm_int8", "gemm_exact", "gemm_amx", "linear")
SANITIZERS = {
    # Without optimization, because gcc takes minutes to optimize what it instruments here.
    "address": ("-O0", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
    "thread": ("-O1", "-fsanitize=thread"),
}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", SANITIZERS)
def test_sanitizers_find_nothing(name: str, level: str, tmp_path: Path) -> None:
    made = recipe(level, ("-g", f"-I{SOURCES}", *SANITIZERS[name]))
    sources = [str(SOURCES / f"{part}.cpp") for part in LINEAR]
    program = str(tmp_path / "driver")
    command = [*made.compiler, *made.flags, str(DRIVER), *sources, "-o", program]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    if "cannot find" in built.stderr and "san" in built.stderr:
        pytest.skip(f"the compiler has no {name} sanitizer")
    assert built.returncode == 0, built.stderr
    env = {**os.environ, "TSAN_OPTIONS": "halt_on_error=1"}
    result = subprocess.run([program], env=env, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (0, "good\n"), result.stdout + result.stderr
