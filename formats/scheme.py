"""How a weight is quantized: one frozen value that cannot be wrong."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from qtool.errors import UsageError

Strategy = Literal["tensor", "channel", "group"]

# 8 bit is symmetric only: the fast kernels of the field take zero points at 4 bits alone.
PORTABLE_BITS = (4, 8)


@dataclass(frozen=True, slots=True)
class WeightScheme:
    """Integer quantization of a weight of shape [out_features, in_features].

    ``strategy`` says what shares one scale: the whole ``tensor``, a row (``channel``), or
    ``group_size`` neighbours of a row (``group``). Codes are unsigned, in
    ``0 .. 2**bits - 1``; a symmetric scheme has the constant zero ``2**(bits - 1)``.

    Raises:
        UsageError: a combination no checkpoint format and no kernel of ours can hold.
    """

    bits: int = 4
    symmetric: bool = False
    strategy: Strategy = "group"
    group_size: int | None = 128

    def __post_init__(self) -> None:
        if self.bits not in PORTABLE_BITS:
            raise UsageError(f"bits={self.bits}: portable widths are 4 and 8; choose one of them")
        if self.bits == 8 and not self.symmetric:
            raise UsageError(
                "bits=8 with an asymmetric grid: 8-bit weights are symmetric in the formats other "
                "engines load; ask for the symmetric grid"
            )
        if self.strategy not in ("tensor", "channel", "group"):
            raise UsageError(f"strategy={self.strategy!r}: use tensor, channel or group")
        if self.strategy == "group" and (self.group_size is None or self.group_size < 1):
            raise UsageError(f"group_size={self.group_size}: a group has at least one weight")
        if self.strategy != "group" and self.group_size is not None:
            raise UsageError(
                f"group_size={self.group_size} with strategy={self.strategy!r}: only the group "
                "strategy has a group size"
            )

    @property
    def levels(self) -> int:
        """Number of codes."""
        return int(2**self.bits)

    @property
    def max_code(self) -> int:
        """Largest code; the smallest is 0."""
        return self.levels - 1

    @property
    def symmetric_zero(self) -> int:
        """The zero of every group of a symmetric scheme."""
        return self.levels // 2

    def block_shape(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Rows and columns of the block that shares one scale in a weight of ``shape``.

        Raises:
            UsageError: the group size does not divide the row.
        """
        out_features, in_features = shape
        if self.strategy == "tensor":
            return out_features, in_features
        if self.strategy == "channel":
            return 1, in_features
        assert self.group_size is not None
        if in_features % self.group_size:
            raise UsageError(
                f"group_size={self.group_size} does not divide a row of {in_features} weights; "
                "choose a divisor, or 'row' for one scale per row"
            )
        return 1, self.group_size

    def grid_shape(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Shape of ``scales`` and ``zeros`` for a weight of ``shape``: one entry a block."""
        rows, columns = self.block_shape(shape)
        return shape[0] // rows, shape[1] // columns

    def bits_per_weight(self, shape: tuple[int, int], scale_bits: int = 16) -> float:
        """Stored bits per weight, scales and zeros included."""
        blocks = self.grid_shape(shape)[0] * self.grid_shape(shape)[1]
        zero_bits = 0 if self.symmetric else self.bits
        return self.bits + blocks * (scale_bits + zero_bits) / (shape[0] * shape[1])

    def describe(self) -> str:
        """Short name for tables: ``W4 asym g64``."""
        grid = "sym" if self.symmetric else "asym"
        span = f"g{self.group_size}" if self.strategy == "group" else self.strategy
        return f"W{self.bits} {grid} {span}"

    def to_dict(self) -> dict[str, Any]:
        """JSON form, inverse of :meth:`from_dict`."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> WeightScheme:
        """Inverse of :meth:`to_dict`; unknown keys are refused."""
        unknown = sorted(set(values) - set(cls.__slots__))
        if unknown:
            raise UsageError(f"unknown scheme keys {unknown}; known are {sorted(cls.__slots__)}")
        return cls(**values)


def weight_scheme(bits: int, symmetric: bool, group_size: int | None) -> WeightScheme:
    """Scheme for one scale a group, or a row when ``group_size`` is ``None``."""
    strategy: Strategy = "channel" if group_size is None else "group"
    return WeightScheme(bits=bits, symmetric=symmetric, strategy=strategy, group_size=group_size)
