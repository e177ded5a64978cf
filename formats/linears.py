"""What every format of quantized checkpoints offers: its linears, one by one, as QuantizedTensors.

A linear is stored as a few tensors under local names (``model.layers.0.mlp.up_proj.`` and
``qweight``, ``scales``, ...). A format says which linears are quantized and puts their tensors
together; whoever reads (runtime, dequantizer, converter) knows nothing else about it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from qtool.errors import CheckpointError, QtoolError
from qtool.formats import affine
from qtool.formats.reader import TensorEntry
from qtool.formats.scheme import WeightScheme
from qtool.formats.tensor import QuantizedTensor

Shape = tuple[int, int]


class StoredLinears(ABC):
    """The quantized linears of one checkpoint.

    Attributes:
        names: local names of all tensors that a quantized linear may have.
        marks: those of them that a plain linear never has.
    """

    names: ClassVar[tuple[str, ...]]
    marks: ClassVar[tuple[str, ...]]

    def __init__(self, entries: Mapping[str, TensorEntry]) -> None:
        self._entries = entries
        self._remarks: dict[str, list[str]] = {}

    def is_quantized(self, module: str) -> bool:
        """Whether the linear ``module`` (full name) is quantized."""
        return any(f"{module}.{mark}" in self._entries for mark in self.marks)

    @abstractmethod
    def unpack(self, module: str, tensors: Mapping[str, Tensor]) -> QuantizedTensor:
        """The weight of ``module`` from its tensors by local name.

        Raises:
            CheckpointError, ValueError, UsageError: one is missing, or they do not fit together.
        """

    def parts(self, module: str) -> dict[str, str]:
        """Tensors of a linear that the checkpoint has: local name -> full name."""
        full = {name: f"{module}.{name}" for name in self.names}
        return {local: name for local, name in full.items() if name in self._entries}

    def read(self, module: str, get: Callable[[str], Tensor]) -> QuantizedTensor:
        """The weight of ``module``; ``get`` gives a tensor by its full name.

        Raises:
            CheckpointError: tensors are missing, or have shapes or values the format does not
                allow; the module is named.
        """
        tensors = {local: get(full) for local, full in self.parts(module).items()}
        try:
            return self.unpack(module, tensors)
        except (QtoolError, ValueError) as error:
            raise CheckpointError(f"{module}: {error}") from None

    def modules(self) -> list[str]:
        """Full names of all quantized linears, sorted."""
        parts = (name.rpartition(".") for name in self._entries)
        marked = {module for module, _, local in parts if local in self.marks}
        return sorted(module for module in marked if self.is_quantized(module))

    def notes(self) -> tuple[str, ...]:
        """What was noticed in the linears read so far, one sentence each."""
        return tuple(
            f"{text} ({len(modules)} linears, the first is {modules[0]})"
            for text, modules in self._remarks.items()
        )

    def _remark(self, module: str, text: str) -> None:
        found = self._remarks.setdefault(text, [])
        if module not in found:
            found.append(module)


class ReadableFormat(Protocol):
    """A module of this package that reads one format.

    Attributes:
        QUANT_METHOD: its name in ``config.json``.
    """

    QUANT_METHOD: str

    def open_linears(
        self, block: Mapping[str, Any], entries: Mapping[str, TensorEntry]
    ) -> StoredLinears:
        """The quantized linears of a checkpoint.

        Args:
            block: ``quantization_config``.
            entries: all tensors of the checkpoint.

        Raises:
            CheckpointError: a variant that cannot be read, by name.
        """
        ...


class WritableFormat(ReadableFormat, Protocol):
    """A module that writes it as well.

    Attributes:
        NAME: what ``--format`` takes.
        ONE_SCHEME: its config describes all quantized linears at once.
        SCALE_DTYPE: what scales are stored in; ``None`` is their own dtype.
        HOLDS_KV_SCALES: it has a place for scales of the cache.
        SIDE_FILE: where its config lies a second time, for old readers.
    """

    NAME: str
    ONE_SCHEME: bool
    SCALE_DTYPE: torch.dtype | None
    HOLDS_KV_SCALES: bool
    SIDE_FILE: str | None

    def obstacle(self, scheme: WeightScheme, shape: Shape) -> str | None:
        """Why no weight of a scheme and shape can be stored without loss; ``None`` if it can."""
        ...

    def warnings(self, weights: Iterable[tuple[WeightScheme, Shape]]) -> tuple[str, ...]:
        """What a user should know of weights of these schemes and shapes, one sentence each."""
        ...

    def pack(self, tensor: QuantizedTensor) -> dict[str, Tensor]:
        """Tensors of one linear under their local names, for a weight without obstacles."""
        ...

    def quantization_config(
        self, schemes: Mapping[str, WeightScheme], ignore: list[str]
    ) -> dict[str, Any]:
        """``quantization_config`` for quantized modules and linears left as they were."""
        ...


def plain_codes(
    tensors: Mapping[str, Tensor],
    scheme: WeightScheme,
    *,
    scale: str = "weight_scale",
    input_scale: str = "input_scale",
) -> QuantizedTensor:
    """A weight whose codes are stored as they are: float8, or int8 less half their range.

    Args:
        tensors: ``weight`` [N, K], the scales, perhaps ``weight_zero_point`` int8 as the scales.
        scheme: what they must be.
        scale, input_scale: local names of the scales of the weight and of a static input.

    Raises:
        CheckpointError: a tensor is missing, or has a dtype or shape the scheme does not allow.
    """
    inputs = [input_scale] if scheme.has_input_scale else []
    zeros = [] if scheme.symmetric else ["weight_zero_point"]
    require(tensors, ["weight", scale, *zeros, *inputs], scheme)
    codes = tensors["weight"]
    stored = torch.int8 if scheme.type == "int" else affine.CODE_DTYPES["float"]
    check_dtype(tensors, ["weight"], stored)
    grid = scheme.grid_shape((codes.shape[0], codes.shape[1]))
    scales = tensors[scale]
    if scales.numel() == grid[0] * grid[1] and scales.ndim < 2:
        scales = scales.reshape(grid)
    check_scales(scales, scale)
    if scheme.type == "int":
        codes = _unsigned(codes, scheme)
    found = torch.full(grid, scheme.symmetric_zero, dtype=torch.uint8)
    if not scheme.symmetric:
        found = _unsigned(tensors["weight_zero_point"], scheme)
    static = tensors[input_scale].reshape(-1) if scheme.has_input_scale else None
    return QuantizedTensor(codes, scales, found, scheme, static)


def require(tensors: Mapping[str, Tensor], names: list[str], scheme: WeightScheme | str) -> None:
    """Raise CheckpointError if a tensor of a linear is missing."""
    if missing := [name for name in names if name not in tensors]:
        kind = scheme if isinstance(scheme, str) else scheme.describe()
        raise CheckpointError(f"{', '.join(missing)} missing for a {kind} weight")


def check_scales(scales: Tensor, name: str) -> None:
    """Raise CheckpointError unless scales are floating and finite: codes alone mean nothing."""
    if not scales.dtype.is_floating_point or scales.ndim > 2:
        raise CheckpointError(
            f"{name} is {scales.dtype} of shape {list(scales.shape)}; scales are floating, in two "
            "dimensions at most"
        )
    if not bool(scales.float().isfinite().all()):
        raise CheckpointError(f"{name} has values that are not finite; copy the checkpoint again")


def check_dtype(tensors: Mapping[str, Tensor], names: list[str], dtype: torch.dtype) -> None:
    """Raise CheckpointError unless the named tensors are matrices of a dtype."""
    for name in names:
        tensor = tensors[name]
        if tensor.dtype != dtype or tensor.ndim != 2 or not tensor.numel():
            raise CheckpointError(
                f"{name} is {tensor.dtype} of shape {list(tensor.shape)}; it must be {dtype} in "
                "two dimensions"
            )


def group_width(value: object) -> int | None:
    """A config's ``group_size``; ``None`` for a whole row, which configs call -1.

    Raises:
        CheckpointError: it is no number of weights.
    """
    if value in (-1, None):
        return None
    if not isinstance(value, int) or value < 1:
        raise CheckpointError(f"group_size is {value!r}; it is a number of weights, or -1")
    return value


def _unsigned(codes: Tensor, scheme: WeightScheme) -> Tensor:
    """int8 codes as the unsigned ones of the scheme.

    Raises:
        CheckpointError: another dtype, or a code beyond the scheme's bits.
    """
    half = scheme.levels // 2
    if codes.dtype != torch.int8:
        raise CheckpointError(f"codes are {codes.dtype}; {scheme.describe()} has torch.int8")
    if codes.numel() and not -half <= int(codes.min()) <= int(codes.max()) < half:
        raise CheckpointError(f"codes beyond {-half} .. {half - 1} for {scheme.describe()}")
    return (codes.short() + half).to(torch.uint8)
