"""What a config says of one linear, whatever it says: more than the schemes that qtool runs."""

from __future__ import annotations

from dataclasses import dataclass

from qtool.formats.scheme import BLOCK_SIZE, WeightScheme

STRATEGIES = ("tensor", "channel", "group", "block")


@dataclass(frozen=True, slots=True)
class Claim:
    """How a config says that one linear is stored.

    Attributes:
        layout: row of :data:`~qtool.formats.validation.layouts.LAYOUTS`.
        bits, type, symmetric, strategy, group_size: as in
            :class:`~qtool.formats.scheme.WeightScheme`, but whatever the file says.
        block: rows and columns of a block, for the strategy ``block``.
        static_input: the checkpoint holds a scale of the input.
        scheme: the same as a scheme of ours, or ``None`` where we have none.
    """

    layout: str
    bits: int
    type: str
    symmetric: bool
    strategy: str
    group_size: int | None = None
    block: tuple[int, int] = (BLOCK_SIZE, BLOCK_SIZE)
    static_input: bool = False
    scheme: WeightScheme | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.layout, str):
            raise TypeError(f"format {self.layout!r}")
        if not 1 <= self.bits <= 32:
            raise ValueError(f"{self.bits} bits")
        if self.type not in ("int", "float"):
            raise ValueError(f"type {self.type!r}; rules are there for int and float")
        if self.strategy not in STRATEGIES:
            raise ValueError(f"strategy {self.strategy!r}; rules are there for {STRATEGIES}")
        if self.strategy == "group" and not (
            isinstance(self.group_size, int) and self.group_size > 0
        ):
            raise ValueError(f"groups of {self.group_size!r}")
        if min(self.block) < 1:
            raise ValueError(f"blocks of {self.block}")

    def block_shape(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Rows and columns that share a scale in a weight of ``shape``."""
        rows, columns = shape
        if self.strategy == "group":
            return 1, self.group_size or columns
        return {"tensor": shape, "block": self.block}.get(self.strategy, (1, columns))

    def grid_shape(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Scales of a weight of ``shape``."""
        rows, columns = self.block_shape(shape)
        return -(-shape[0] // rows), -(-shape[1] // columns)

    def describe(self) -> str:
        """Short name for tables."""
        if self.scheme is not None and self.scheme.bits == self.bits:
            return self.scheme.describe()
        grid = "sym" if self.symmetric else "asym"
        span = f"g{self.group_size}" if self.strategy == "group" else self.strategy
        return f"{'FP' if self.type == 'float' else 'W'}{self.bits} {grid} {span}"
