"""What a method is made of: smoothing before rounding, a clip of the range, and how it rounds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Smoothing = Literal["awq", "smoothquant"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Steps of a method, in this order; each can be left out.

    Attributes:
        name: of the method, as users write it.
        smoothing: whose scales are searched and folded into neighbours first.
        clip: shrink a group's range where that lowers its output error.
        solve: round column by column and hand each error to later columns (GPTQ), with inputs
            that come from quantized predecessors inside the block; otherwise to nearest.
    """

    name: str
    smoothing: Smoothing | None = None
    clip: bool = False
    solve: bool = False

    @property
    def needs_calibration(self) -> bool:
        """Whether any step looks at data."""
        return self.smoothing is not None or self.clip or self.solve
