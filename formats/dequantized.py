"""A quantized checkpoint as if it were a plain one: for whatever cannot read codes."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from qtool.errors import CheckpointError
from qtool.formats.activations import round_input
from qtool.formats.reader import CheckpointReader
from qtool.formats.registry import stored_linears
from qtool.formats.scheme import ActivationScheme


class DequantizedReader(CheckpointReader):
    """Gives the weights of quantized linears in float32, under their plain names.

    Raises:
        CheckpointError: the checkpoint is not quantized, or in a way that cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        linears = stored_linears(self)
        if linears is None:
            raise CheckpointError(f"{folder} is not quantized; read it as it is")
        self.linears = linears
        self._quantized = {f"{module}.weight": module for module in linears.modules()}
        self._inputs: dict[str, tuple[ActivationScheme, Tensor | None]] = {}

    def __contains__(self, name: str) -> bool:
        return name in self.entries or name in self._quantized

    def get(self, name: str) -> Tensor:
        """The tensor, dequantized if it is the weight of a quantized linear."""
        if name not in self._quantized:
            return super().get(name)
        module = self._quantized[name]
        weight = self.linears.read(module, super().get)
        if weight.scheme.activations is not None:
            self._inputs[module] = weight.scheme.activations, weight.input_scale
        return weight.dequantize()

    @property
    def rounds_inputs(self) -> bool:
        """Whether some linear whose weight was read rounds its input too."""
        return bool(self._inputs)

    def round_input(self, module: str, x: Tensor) -> Tensor:
        """An input [..., K] as a linear whose weight was read takes it, in float32."""
        if module not in self._inputs:
            return x
        scheme, static = self._inputs[module]
        return round_input(x, scheme, None if static is None else static.to(x.device))
