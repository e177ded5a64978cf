"""What a method is made of: smoothing before rounding, a clip of the range, and how it rounds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Smoothing = Literal["awq", "smoothquant"]
SchemeFamily = Literal["weights", "w8a8", "fp8"]

# Which options say more about the scheme.
SCHEME_OPTIONS: Mapping[SchemeFamily, tuple[str, ...]] = {
    "weights": ("bits", "group_size", "symmetric"),
    "w8a8": ("activations",),
    "fp8": ("granularity", "weight_only"),
}

# Which say something about weights, whatever the scheme.
WEIGHT_OPTIONS = ("layers", "lm_head", "ignore", "skip_first", "skip_last", "dtype")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Steps of a method, in this order; each can be left out.

    Attributes:
        name: of the method, as users write it.
        smoothing: whose scales are searched and folded into neighbours first.
        clip: shrink a group's range where that lowers its output error.
        solve: round column by column and hand each error to later columns (GPTQ), with inputs
            that come from quantized predecessors inside the block; otherwise to nearest.
        family: the kind of scheme the method is for; a linear may ask for another. ``None`` leaves
            all weights as they are.
    """

    name: str
    smoothing: Smoothing | None = None
    clip: bool = False
    solve: bool = False
    family: SchemeFamily | None = "weights"

    @property
    def scheme_options(self) -> tuple[str, ...]:
        """Names of the options that say more about the scheme."""
        return () if self.family is None else SCHEME_OPTIONS[self.family]

    @property
    def foreign_options(self) -> tuple[str, ...]:
        """Names of the options about weights that have no meaning for the method."""
        others = [name for names in SCHEME_OPTIONS.values() for name in names]
        foreign = tuple(name for name in others if name not in self.scheme_options)
        return (*foreign, *WEIGHT_OPTIONS) if self.family is None else foreign

    @property
    def needs_calibration(self) -> bool:
        """Whether any step looks at data."""
        return self.smoothing is not None or self.clip or self.solve
