"""What launches share: how a kernel runs here, and the memory that splits of K meet in."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qtool.runtime.kernels.triton.config import Tiles


def is_interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, which has no assembly and no bfloat16."""
    import triton

    return bool(triton.knobs.runtime.interpret)


@dataclass(slots=True, eq=False)
class Workspace:
    """Partial sums and locks of GEMMs whose columns are shared by several programs.

    One for all GEMMs of a back end: they run one after another. It grows at load only, so that
    captured graphs keep their pointers.

    Attributes:
        partials: float32, any values.
        locks: int32, all 0 between launches.
    """

    partials: Tensor
    locks: Tensor

    @classmethod
    def on(cls, device: torch.device) -> Workspace:
        """An empty one."""
        return cls(
            torch.empty(0, dtype=torch.float32, device=device),
            torch.zeros(0, dtype=torch.int32, device=device),
        )

    def reserve(self, rows: int, tokens: int, tiles: Tiles) -> None:
        """Make room for a GEMM of ``rows`` out features and ``tokens`` tokens."""
        if tiles.splits == 1:
            return
        num_tiles = rows // tiles.block_n * -(-tokens // tiles.block_m)
        self.grow(num_tiles * tiles.splits * tiles.block_n * tiles.block_m, num_tiles)

    def grow(self, partials: int, locks: int) -> None:
        """Make room for so many numbers, and so many locks."""
        if partials > self.partials.numel():
            self.partials = self.partials.new_empty(partials)
        if locks > self.locks.numel():
            self.locks = self.locks.new_zeros(locks)
