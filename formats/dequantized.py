"""A quantized checkpoint as if it were a plain one: for whatever cannot read codes."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from qtool.formats import compressed_tensors
from qtool.formats.reader import CheckpointReader


class DequantizedReader(CheckpointReader):
    """Gives the weights of quantized linears in float32, under their plain names."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._schemes = compressed_tensors.parse_config(self.config["quantization_config"])

    def __contains__(self, name: str) -> bool:
        return name in self.entries or bool(self._parts(name))

    def get(self, name: str) -> Tensor:
        """The tensor, dequantized if it is the weight of a quantized linear."""
        module, _, local = name.rpartition(".")
        scheme = self._schemes.scheme_for(module) if local == "weight" else None
        if scheme is None:
            return super().get(name)
        tensors = {
            part: super(DequantizedReader, self).get(full) for part, full in self._parts(name)
        }
        return compressed_tensors.unpack(tensors, scheme).dequantize()

    def _parts(self, name: str) -> list[tuple[str, str]]:
        """Local and full names of the tensors that a weight is stored as."""
        module, _, local = name.rpartition(".")
        names = [(part, f"{module}.{part}") for part in compressed_tensors.TENSOR_NAMES]
        return [(part, full) for part, full in names if local == "weight" and full in self.entries]
