"""A checkpoint's weights by module name: each is used once, or it is an error."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from qtool.errors import CheckpointError
from qtool.formats.checkpoint import CheckpointReader
from qtool.formats.kv_scales import KvScales, kv_scale_names, read_kv_scales
from qtool.formats.registry import stored_linears
from qtool.formats.scheme import WeightScheme
from qtool.formats.tensor import QuantizedTensor
from qtool.runtime.key_smoothing import SmoothedKeys

# Old exports keep the rotary table as a buffer; it follows from the config.
IGNORED = re.compile(r".*\.rotary_emb\.inv_freq$")


@dataclass(frozen=True, slots=True)
class StoredModel:
    """How a checkpoint is stored, where that is more than plain tensors.

    Attributes:
        schemes: scheme of every quantized linear by name.
        kv_scales: FP8 scales of the cache by name of the attention; empty where it has none.
        notes: what was noticed in its tensors, one sentence each.
        smoothed: layers whose keys were smoothed when they were loaded.
    """

    schemes: dict[str, WeightScheme]
    kv_scales: Mapping[str, KvScales]
    notes: tuple[str, ...]
    smoothed: SmoothedKeys = SmoothedKeys()


class WeightSource:
    """Hands out a checkpoint's weights by module name and remembers what was used."""

    def __init__(self, reader: CheckpointReader) -> None:
        self._reader = reader
        self._quantized = stored_linears(reader)
        self._unused = {name for name in reader.names() if not IGNORED.match(name)}
        self._unused.difference_update(kv_scale_names(reader.names()))
        self._kv_scales = read_kv_scales(reader)
        self._schemes: dict[str, WeightScheme] = {}

    def tensor(self, name: str) -> Tensor:
        """A plain tensor."""
        tensor = self._reader.get(name)
        self._unused.discard(name)
        return tensor

    def weight(self, module: str) -> Tensor | QuantizedTensor:
        """Weight of a linear, quantized if the config says so."""
        if self._quantized is None or not self._quantized.is_quantized(module):
            return self.tensor(f"{module}.weight")
        weight = self._quantized.read(module, self.tensor)
        self._schemes[module] = weight.scheme
        return weight

    @property
    def stored(self) -> StoredModel:
        """How what was read so far is stored."""
        notes = () if self._quantized is None else self._quantized.notes()
        return StoredModel(self._schemes, self._kv_scales, notes)

    def _is_empty_bias(self, name: str) -> bool:
        """Whether a tensor is the bias of zeros that AutoGPTQ gave to linears without one."""
        module, _, local = name.rpartition(".")
        return local == "bias" and module in self._schemes and not self._reader.get(name).any()

    def refuse_leftovers(self, tied_head: bool) -> None:
        """Every tensor of the file must have found its place."""
        if tied_head:
            self._unused.discard("lm_head.weight")
        self._unused = {name for name in self._unused if not self._is_empty_bias(name)}
        if self._unused:
            names = sorted(self._unused)
            raise CheckpointError(
                f"{len(names)} tensors of the checkpoint belong to no part of the model: "
                f"{', '.join(names[:5])}; the config and the weights do not match"
            )
