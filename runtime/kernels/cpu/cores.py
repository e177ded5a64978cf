"""How many cores this process may use, which is seldom how many the machine has."""

from __future__ import annotations

import math
import os
from pathlib import Path

TOPOLOGY = Path("/sys/devices/system/cpu")
CGROUPS = Path("/sys/fs/cgroup")


def available_cores() -> int:
    """Physical cores of the affinity mask, within the cgroup's quota and $OMP_NUM_THREADS.

    Two hardware threads of a core share its multipliers, so the second adds nothing to a GEMM.
    """
    limits = [physical_cores(os.sched_getaffinity(0)), *quotas(), *_asked_for()]
    return max(1, min(limits))


def physical_cores(cpus: set[int], topology: Path = TOPOLOGY) -> int:
    """Different cores among logical CPUs; all of them where the system does not say."""
    cores = set()
    for cpu in cpus:
        siblings = topology / f"cpu{cpu}" / "topology" / "thread_siblings_list"
        cores.add(_read(siblings) or str(cpu))
    return len(cores)


def quotas(root: Path = CGROUPS, own: Path = Path("/proc/self/cgroup")) -> list[int]:
    """CPU limits of this process's cgroups and their parents, rounded up to whole cores."""
    found = []
    for line in (_read(own) or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        top = root / "cpu" if controllers else root
        folder = top / path.lstrip("/")
        for level in (folder, *folder.parents):
            if level.is_relative_to(top) and (limit := _quota(level)) is not None:
                found.append(limit)
    return found


def _quota(folder: Path) -> int | None:
    """The limit of one cgroup: version 2 in one file, version 1 in two."""
    version_1 = [_read(folder / f"cpu.cfs_{name}_us") or "" for name in ("quota", "period")]
    try:
        quota, period = map(int, (_read(folder / "cpu.max") or " ".join(version_1)).split())
    except ValueError:  # "max", or no such files: no limit
        return None
    return math.ceil(quota / period) if quota > 0 and period > 0 else None


def _asked_for() -> list[int]:
    value = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]
    return [int(value)] if value.isdigit() and int(value) > 0 else []


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return None
