"""The thread pool survives forks, callers on several threads, stopping and idling."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import torch

from qtool.formats.scheme import weight_scheme
from qtool.runtime.kernels.cpu.native_ops import NativeLinear, eight_bits
from support.native import LEVELS, library_at, native_at

LIBRARY = library_at(LEVELS[0])


def _linear() -> NativeLinear:
    weight = eight_bits(torch.randn(320, 256, generator=torch.Generator().manual_seed(0)))
    assert weight.scheme == weight_scheme(8, True, 64)
    return NativeLinear(native_at(LEVELS[0]), weight, None, "int8")


def _inputs(rows: int) -> torch.Tensor:
    return torch.randn(rows, 256, generator=torch.Generator().manual_seed(rows))


def _threads() -> set[str]:
    """By number: some of other tests may end meanwhile."""
    return set(os.listdir("/proc/self/task"))


def test_callers_on_several_threads_take_turns() -> None:
    linear = _linear()
    inputs = [_inputs(rows) for rows in (1, 2, 9, 30)]
    expected = [linear(x) for x in inputs]

    def many(index: int) -> bool:
        return all(torch.equal(linear(inputs[index]), expected[index]) for _ in range(100))

    with ThreadPoolExecutor(4) as callers:
        assert all(callers.map(many, range(4)))


def test_workers_end_when_stopped_and_come_back() -> None:
    linear, x = _linear(), _inputs(3)
    LIBRARY.qt_pool_stop()
    before = _threads()
    expected = linear(x)
    LIBRARY.qt_pool_start(4)
    assert _threads() <= before, "workers start with the first region"
    assert torch.equal(linear(x), expected)
    workers = _threads() - before
    assert len(workers) == 3 and LIBRARY.qt_pool_size() == 4
    LIBRARY.qt_pool_stop()
    assert not workers & _threads() and LIBRARY.qt_pool_size() == 1
    assert LIBRARY.qt_pool_start(0) == 1 and LIBRARY.qt_pool_start(1000) == 256
    LIBRARY.qt_pool_start(2)


def test_idle_workers_sleep() -> None:
    linear, x = _linear(), _inputs(1)
    linear(x)
    time.sleep(0.02)
    start = time.process_time()
    time.sleep(0.2)
    assert time.process_time() - start < 0.05
    assert torch.equal(linear(x), linear(x))


def test_a_forked_child_computes_with_workers_of_its_own(checkout_env: dict[str, str]) -> None:
    """In a process of its own: pytest may have threads that do not bear a fork.

    The child forks again, and a fork happens while other threads are inside regions.
    """
    program = """
import os, sys, threading, time, warnings
warnings.simplefilter("ignore")
import torch
torch.set_num_threads(1)
from qtool.runtime.kernels.cpu.build import Native, build, recipe
from qtool.runtime.kernels.cpu.native_ops import NativeLinear, eight_bits
import ctypes
library = ctypes.CDLL(str(build(recipe(sys.argv[1]))))
library.qt_pool_start(3)
weight = eight_bits(torch.randn(320, 256))
linear = NativeLinear(Native(library, sys.argv[1]), weight, None)
x = torch.randn(5, 256)
expected = linear(x)
stop = False
def work():
    while not stop:
        linear(x)
        time.sleep(.0002)
threads = [threading.Thread(target=work) for _ in range(2)]
[thread.start() for thread in threads]
def check(depth):
    for _ in range(3):
        pid = os.fork()
        if pid == 0:
            good = torch.equal(linear(x), expected) and (depth == 0 or check(depth - 1))
            good = good and len(os.listdir("/proc/self/task")) == 3
            os._exit(0 if good else 1)
        if os.waitpid(pid, 0)[1]:
            return False
    return True
good = check(1)
stop = True
[thread.join() for thread in threads]
print("good" if good and torch.equal(linear(x), expected) else "bad")
"""
    command = [sys.executable, "-c", program, LEVELS[0]]
    result = subprocess.run(
        command, env=checkout_env, capture_output=True, text=True, timeout=100, check=False
    )
    assert result.stdout == "good\n", result.stderr
