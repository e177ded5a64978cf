"""A quantized checkpoint as if it were a plain one: for whatever cannot read codes."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from qtool.errors import CheckpointError
from qtool.formats.reader import CheckpointReader
from qtool.formats.registry import stored_linears


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

    def __contains__(self, name: str) -> bool:
        return name in self.entries or name in self._quantized

    def get(self, name: str) -> Tensor:
        """The tensor, dequantized if it is the weight of a quantized linear."""
        if name not in self._quantized:
            return super().get(name)
        return self.linears.read(self._quantized[name], super().get).dequantize()
