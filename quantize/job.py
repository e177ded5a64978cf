"""What a method is told, and what it gives back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from qtool.calibration.families import ModelFamily
from qtool.formats.checkpoint import CheckpointReader
from qtool.formats.scheme import WeightScheme
from qtool.formats.tensor import QuantizedTensor
from qtool.quantize.report import ModuleRecord


@dataclass(frozen=True, slots=True)
class Job:
    """All a method is told.

    Attributes:
        reader: the source, headers checked.
        family: row of the model's family.
        schemes: scheme of every quantized module, by full name, in order.
        dtype: dtype scales and other floating tensors are stored in.
        device: where blocks are computed.
        ids: calibration tokens int64 [num_samples, seq_len], or ``None`` for methods without.
    """

    reader: CheckpointReader
    family: ModelFamily
    schemes: Mapping[str, WeightScheme]
    dtype: torch.dtype
    device: torch.device
    ids: Tensor | None

    def schemes_of(self, prefix: str) -> dict[str, WeightScheme]:
        """Schemes of one block's quantized linears, by their path in the block, in order."""
        return {
            linear: self.schemes[f"{prefix}.{linear}"]
            for linear in self.family.linears
            if f"{prefix}.{linear}" in self.schemes
        }


@dataclass(frozen=True, slots=True)
class QuantizedBlock:
    """One decoder block, done.

    Attributes:
        weights: quantized linears by full module name.
        records: one record for each of them.
        changed: other tensors of the block that the method rewrote, by full tensor name, in
            the job's dtype.
    """

    weights: Mapping[str, QuantizedTensor]
    records: tuple[ModuleRecord, ...]
    changed: Mapping[str, Tensor] = field(default_factory=dict)
