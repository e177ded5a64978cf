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
        return name in self.entries or self._is_quantized(name)

    def get(self, name: str) -> Tensor:
        """The tensor, dequantized if it is the weight of a quantized linear."""
        if not self._is_quantized(name):
            return super().get(name)
        module = name.removesuffix(".weight")
        scheme = self._schemes.scheme_for(module)
        assert scheme is not None
        tensors = {
            part: super(DequantizedReader, self).get(f"{module}.{part}")
            for part in compressed_tensors.TENSOR_NAMES
            if f"{module}.{part}" in self.entries
        }
        return compressed_tensors.unpack(tensors, scheme).dequantize()

    def _is_quantized(self, name: str) -> bool:
        # A scheme of the class Linear means norms as well, by name; only linears have scales.
        return name.endswith(".weight") and f"{name}_scale" in self.entries
