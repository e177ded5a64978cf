"""Memory in huge pages, for what a step reads from end to end.

With pages of 4 KiB a step's reads miss the translation cache page by page, and under
virtualization a miss is two walks: weights come at half the speed.
"""

from __future__ import annotations

import mmap

import torch
from torch import Tensor

HUGE_PAGE = 2 << 20
ALIGNMENT = 64


def huge_zeros(size: int) -> Tensor:
    """uint8 [size], zero; in huge pages where the system gives them."""
    memory = mmap.mmap(-1, size + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    return whole[-whole.data_ptr() % HUGE_PAGE :][:size]


class Arena:
    """Pieces side by side in one run of memory, each at a cache line."""

    def __init__(self, sizes: list[int]) -> None:
        self._memory = huge_zeros(sum(map(_round_up, sizes)))
        self._used = 0

    def take(self, size: int) -> Tensor:
        """The next uint8 [size]."""
        piece = self._memory[self._used :][:size]
        self._used += _round_up(size)
        return piece


def _round_up(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
