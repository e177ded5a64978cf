"""How many cache blocks there is memory for."""

from __future__ import annotations

import os
from typing import NamedTuple

import torch

from qtool.errors import EngineError
from qtool.runtime.options import EngineOptions

# Of a machine's free memory, what the cache may take unasked: a CPU shares it with everything.
CPU_SHARE = 0.4


def available_cpu_memory() -> int:
    """Bytes the process can still get: free memory, or what the control group leaves of it."""
    pages = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    free = _meminfo_available() or pages
    limit = _read_int("/sys/fs/cgroup/memory.max")
    used = _read_int("/sys/fs/cgroup/memory.current")
    return free if limit is None or used is None else min(free, max(limit - used, 0))


def _meminfo_available() -> int | None:
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            rows = dict(line.split(":", 1) for line in file)
        return int(rows["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None


def _read_int(path: str) -> int | None:
    """A number from a file of the kernel's; ``None`` if there is none ("max" included)."""
    try:
        with open(path, encoding="ascii") as file:
            return int(file.read())
    except (OSError, ValueError):
        return None


def cache_budget(options: EngineOptions, device: torch.device) -> int:
    """Bytes for keys and values; weights are loaded already."""
    if options.kv_cache_memory is not None:
        return options.kv_cache_memory
    if device.type == "cpu":
        return int(available_cpu_memory() * CPU_SHARE)
    free, total = torch.cuda.mem_get_info(device)
    return int(free - total * (1 - options.gpu_memory_utilization))


class CacheSize(NamedTuple):
    """Blocks, and tail pages beside them."""

    blocks: int
    tails: int


def cache_size(
    options: EngineOptions,
    longest: int,
    block_size: int,
    slot_bytes: int,
    tail_bytes: int,
    device: torch.device,
) -> CacheSize:
    """What fits the budget, but no more than ``max_num_seqs`` full sequences can use.

    Args:
        longest: slots of blocks that the longest sequence takes.
        block_size: slots of a block.
        slot_bytes: what a block has for each token.
        tail_bytes: of a tail page; 0 where the form of the cache has none. There is one for each
            of ``max_num_seqs``, but no more than there are blocks: whoever runs needs one.

    Raises:
        EngineError: not even one block fits.
    """
    budget = cache_budget(options, device)
    block_bytes = slot_bytes * block_size
    most = options.max_num_seqs * -(-longest // block_size)
    tails = min(options.max_num_seqs, budget // (block_bytes + tail_bytes)) if tail_bytes else 0
    blocks = min((budget - tails * tail_bytes) // block_bytes, most)
    if blocks < 1 or (tail_bytes and tails < 1):
        raise EngineError(
            f"{budget} bytes for the KV cache do not hold one block of {block_bytes + tail_bytes}; "
            "give more with --kv-cache-memory, or free memory"
        )
    return CacheSize(int(blocks), int(tails))
