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
# Of an arena's regions: a stream broken once in so many bytes is as fast as a whole one.
REGION = 256 << 20


def huge_zeros(size: int) -> Tensor:
    """uint8 [size], zero; in huge pages where the system gives them."""
    memory = mmap.mmap(-1, size + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    return whole[-whole.data_ptr() % HUGE_PAGE :][:size]


class Arena:
    """Pieces one after another, each at a cache line.

    What is taken in the order in which a step reads it is one rising stream. Memory comes in large
    regions; what of them is not written yet takes none.
    """

    def __init__(self) -> None:
        self._free = torch.empty(0, dtype=torch.uint8)

    def take(self, size: int) -> Tensor:
        """The next uint8 [size], zero."""
        rounded = -(-size // ALIGNMENT) * ALIGNMENT
        if rounded > len(self._free):
            self._free = huge_zeros(max(REGION, rounded))
        piece, self._free = self._free[:size], self._free[rounded:]
        return piece
