"""Time and peak memory of the phases of a run.

The kernel keeps one peak of the resident set, and a phase that begins resets it. What ``time`` or
``getrusage`` say of the whole process is then the peak since the last phase began: the largest peak
of all phases, which a run reports, is the right one.
"""

from __future__ import annotations

import ctypes
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

# What a run took lies apart from its report: it differs from run to run.
RUN_PATH = "qtool/run.json"

# Linux counts the resident set in pages of this field's unit, and resets its peak on request.
_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"


@dataclass(frozen=True, slots=True)
class Phase:
    """What one phase took.

    Attributes:
        seconds: wall time.
        cpu_seconds: of all threads.
        peak_bytes: largest resident set of the process during the phase.
        device_bytes: largest memory of tensors on the GPU, 0 without one.
    """

    name: str
    seconds: float
    cpu_seconds: float
    peak_bytes: int
    device_bytes: int = 0

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        return asdict(self)


class PhaseClock:
    """Measures phases one after another."""

    def __init__(self) -> None:
        self.phases: list[Phase] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure what happens inside; a phase that fails is not recorded."""
        reset_peak_memory()
        wall, cpu = time.perf_counter(), time.process_time()
        yield
        self.phases.append(
            Phase(
                name,
                time.perf_counter() - wall,
                time.process_time() - cpu,
                peak_memory(),
                _device_peak(),
            )
        )


def reset_peak_memory() -> None:
    """Forget the peaks so far; where the system refuses, they are those of the whole process."""
    with suppress(OSError):
        _CLEAR_REFS.write_text(_RESET_PEAK, encoding="ascii")
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def peak_memory() -> int:
    """Largest resident set in bytes since the last reset."""
    return _status_bytes("VmHWM") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def resident_memory() -> int:
    """Resident set in bytes now; 0 where the system does not say."""
    return _status_bytes("VmRSS")


def return_free_memory() -> None:
    """Give the system back what the C library keeps of freed memory; does nothing without glibc.

    Tensors of less than 32 MB lie in glibc's heap, whose holes count as memory. Over 16 blocks of
    hidden size 1024 they grew by 200 MB, and a call takes milliseconds.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _status_bytes(field: str) -> int:
    try:
        lines = _STATUS.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return 0
    values = [line.split()[1] for line in lines if line.startswith(f"{field}:")]
    return int(values[0]) * 1024 if values else 0


def _device_peak() -> int:
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
