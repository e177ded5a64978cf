"""How a linear is quantized: frozen values that cannot be wrong."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from qtool.errors import UsageError

Strategy = Literal["tensor", "channel", "group", "block"]
CodeType = Literal["int", "float"]

PORTABLE_BITS = (4, 8)

# Largest finite value of float8_e4m3fn, which has no infinity: a cast from beyond gives NaN.
FLOAT8_MAX = 448.0

# Rows and columns of a weight's block and width of an activation's, as DeepSeek's FP8 models have
# them; no kernel of the field takes another.
BLOCK_SIZE = 128


@dataclass(frozen=True, slots=True)
class ActivationScheme:
    """What a linear's input is rounded to before the product: 8 bits, symmetric.

    ``type`` is that of the codes, ``int`` or ``float`` (e4m3). ``strategy`` says what shares a
    scale: every ``token``'s features, or runs of :data:`BLOCK_SIZE` of them (``group``), both
    measured as they come; or everything (``tensor``), fixed by calibration. ``bound`` is the
    largest magnitude that measured scales reach, as FBGEMM has it; larger values saturate.

    Raises:
        UsageError: a combination no checkpoint format holds.
    """

    type: CodeType = "int"
    strategy: Literal["token", "tensor", "group"] = "token"
    bound: float | None = None

    def __post_init__(self) -> None:
        if self.bound is not None and not (self.bound > 0 and self.dynamic):
            raise UsageError(f"bound={self.bound}: a positive number, for scales measured anew")
        if self.type not in ("int", "float"):
            raise UsageError(f"activation type={self.type!r}: use int or float")
        if self.strategy not in ("token", "tensor", "group"):
            raise UsageError(f"activation strategy={self.strategy!r}: use token, tensor or group")
        if self.strategy == "group" and self.type != "float":
            raise UsageError("activations in groups are FP8 only; integers take token or tensor")

    @property
    def dynamic(self) -> bool:
        """Whether scales are measured at run time; otherwise the checkpoint holds one."""
        return self.strategy != "tensor"

    @property
    def steps(self) -> float:
        """Steps from zero to the largest value a scale is chosen for."""
        return 127.5 if self.type == "int" else FLOAT8_MAX


@dataclass(frozen=True, slots=True)
class WeightScheme:
    """Quantization of a linear with a weight of shape [out_features, in_features].

    ``strategy`` says what shares one scale: the whole ``tensor``, a row (``channel``),
    ``group_size`` neighbours of a row (``group``), or a square of :data:`BLOCK_SIZE` rows and
    columns (``block``; the last ones may be smaller).

    ``type`` ``int``: codes are unsigned, in ``0 .. 2**bits - 1``; a symmetric scheme has the
    constant zero ``2**(bits - 1)``. ``float``: codes are float8 e4m3, zero is 0.

    ``activations`` is what the input is rounded to, or ``None`` for weight-only quantization.

    Raises:
        UsageError: a combination no checkpoint format and no kernel of ours can hold.
    """

    bits: int = 4
    symmetric: bool = False
    strategy: Strategy = "group"
    group_size: int | None = 128
    type: CodeType = "int"
    activations: ActivationScheme | None = None

    def __post_init__(self) -> None:
        if self.bits not in PORTABLE_BITS:
            raise UsageError(f"bits={self.bits}: portable widths are 4 and 8; choose one of them")
        if self.strategy not in ("tensor", "channel", "group", "block"):
            raise UsageError(f"strategy={self.strategy!r}: use tensor, channel, group or block")
        if self.strategy == "group" and (self.group_size is None or self.group_size < 1):
            raise UsageError(f"group_size={self.group_size}: a group has at least one weight")
        if self.strategy != "group" and self.group_size is not None:
            raise UsageError(
                f"group_size={self.group_size} with strategy={self.strategy!r}: only the group "
                "strategy has a group size"
            )
        self._check_type()
        self._check_activations()

    def _check_type(self) -> None:
        if self.type not in ("int", "float"):
            raise UsageError(f"type={self.type!r}: use int or float")
        if self.type == "float" and (self.bits != 8 or self.strategy == "group"):
            raise UsageError(
                f"float weights of {self.bits} bits by {self.strategy}: FP8 has 8 bits, and a "
                "scale a tensor, channel or block"
            )
        if self.type == "int" and self.strategy == "block":
            raise UsageError("strategy='block' with integer weights: only FP8 has blocks")

    def _check_activations(self) -> None:
        inputs = self.activations
        if inputs is None:
            return
        if inputs.type != self.type or self.bits != 8 or self.strategy == "group":
            raise UsageError(
                f"{inputs.type} activations with {self.bits}-bit {self.type} weights by "
                f"{self.strategy}: both have 8 bits and one type, and weights have a scale a "
                "tensor, channel or block"
            )
        if (inputs.strategy == "group") != (self.strategy == "block"):
            raise UsageError(
                f"activations by {inputs.strategy} with weights by {self.strategy}: groups of "
                "activations and blocks of weights go together"
            )

    @property
    def levels(self) -> int:
        """Number of codes."""
        return int(2**self.bits)

    @property
    def max_code(self) -> int:
        """Largest integer code; the smallest is 0."""
        return self.levels - 1

    @property
    def symmetric_zero(self) -> int:
        """The zero of every block of a symmetric scheme."""
        return self.levels // 2 if self.type == "int" else 0

    @property
    def symmetric_steps(self) -> float:
        """Steps from zero to the largest weight of a symmetric block.

        The negative end of integers has one code more, so the range is divided by half the levels
        minus one half: the largest weight is at most half a step outside.
        """
        return (self.levels - 1) / 2 if self.type == "int" else FLOAT8_MAX

    @property
    def has_input_scale(self) -> bool:
        """Whether the checkpoint holds a scale of the input."""
        return self.activations is not None and not self.activations.dynamic

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
        if self.strategy == "block":
            return BLOCK_SIZE, BLOCK_SIZE
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
        return -(-shape[0] // rows), -(-shape[1] // columns)

    def bits_per_weight(self, shape: tuple[int, int], scale_bits: int = 16) -> float:
        """Stored bits per weight, scales and zeros included."""
        blocks = self.grid_shape(shape)[0] * self.grid_shape(shape)[1]
        zero_bits = 0 if self.symmetric else self.bits
        return self.bits + blocks * (scale_bits + zero_bits) / (shape[0] * shape[1])

    def describe(self) -> str:
        """Short name for tables: ``W4 asym g64``, ``W8A8 channel, static``, ``FP8 block``."""
        name = "FP8" if self.type == "float" else f"W{self.bits}"
        span = f"g{self.group_size}" if self.strategy == "group" else self.strategy
        if self.activations is None:
            grid = "weight-only" if self.type == "float" else "sym" if self.symmetric else "asym"
            return f"{name} {grid} {span}"
        way = "dynamic" if self.activations.dynamic else "static"
        return f"{'FP8' if name == 'FP8' else 'W8A8'} {span}, {way}"

    def to_dict(self) -> dict[str, Any]:
        """JSON form, inverse of :meth:`from_dict`."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> WeightScheme:
        """Inverse of :meth:`to_dict`; unknown keys are refused."""
        unknown = sorted(set(values) - set(cls.__slots__))
        if unknown:
            raise UsageError(f"unknown scheme keys {unknown}; known are {sorted(cls.__slots__)}")
        inputs = values.get("activations")
        return cls(**{**values, "activations": inputs and ActivationScheme(**inputs)})


def weight_scheme(bits: int, symmetric: bool, group_size: int | None) -> WeightScheme:
    """Weight-only scheme for one scale a group, or a row when ``group_size`` is ``None``."""
    strategy: Strategy = "channel" if group_size is None else "group"
    return WeightScheme(bits=bits, symmetric=symmetric, strategy=strategy, group_size=group_size)


def w8a8_scheme(*, static: bool = False) -> WeightScheme:
    """INT8 weights with a scale a row; inputs with one a token, or a static one."""
    inputs = ActivationScheme("int", "tensor" if static else "token")
    return WeightScheme(8, True, "channel", None, "int", inputs)


def fp8_scheme(granularity: Strategy = "channel", *, weight_only: bool = False) -> WeightScheme:
    """FP8 weights; their inputs are static by tensor, dynamic by token (channel) or group (block).

    The combinations that serving engines have kernels for.
    """
    ways: dict[str, Literal["tensor", "token", "group"]]
    ways = {"tensor": "tensor", "channel": "token", "block": "group"}
    if granularity not in ways:
        raise UsageError(f"granularity={granularity!r}: use {', '.join(ways)}")
    inputs = None if weight_only else ActivationScheme("float", ways[granularity])
    return WeightScheme(8, True, granularity, None, "float", inputs)
