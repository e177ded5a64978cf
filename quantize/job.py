"""What a method is told, and what it gives back.

A method is a stream: it takes a :class:`Job` and yields a :class:`QuantizedBlock` for each block
that :meth:`Job.blocks` hands out (or each name of :meth:`Job.prefixes`, if it looks at no data).
So that a run can stop after any block and go on later with the same bytes, a method keeps
nothing from one block to the next but the weights it leaves in the block's module; the walk
carries their error on. Whoever takes the blocks saves them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from qtool.calibration.decoder_block import DecoderBlock
from qtool.calibration.families import ModelFamily
from qtool.calibration.walk import Walk, walk_blocks
from qtool.formats import compressed_tensors
from qtool.formats.checkpoint import CheckpointReader
from qtool.formats.linears import WritableFormat
from qtool.formats.scheme import WeightScheme
from qtool.formats.tensor import QuantizedTensor
from qtool.quantize.report import ModuleRecord


@dataclass(frozen=True, slots=True)
class Job:
    """All a method is told.

    Attributes:
        reader: the source, headers checked.
        family: row of the model's family.
        schemes: scheme of every quantized module, by full name, in order; empty where all weights
            stay as they are.
        dtype: dtype scales and other floating tensors are stored in.
        device: where blocks are computed.
        ids: calibration tokens int64 [num_samples, seq_len], or ``None`` for methods without.
        walk: hands out the blocks; ``None`` walks them all, with ``ids`` alone.
        first_block: where the method begins: blocks before it are done already.
        format: how weights are written.
        kv_scales: FP8 scales of the cache are calibrated, and written with the weights.
        key_peaks: the largest keys are noted for the plan of the cache, channel by channel.
    """

    reader: CheckpointReader
    family: ModelFamily
    schemes: Mapping[str, WeightScheme]
    dtype: torch.dtype
    device: torch.device
    ids: Tensor | None
    walk: Walk | None = None
    first_block: int = 0
    format: WritableFormat = compressed_tensors
    kv_scales: bool = False
    key_peaks: bool = False

    @property
    def keeps_weights(self) -> bool:
        """Whether every tensor of the source goes into the result as it is."""
        return not self.schemes

    def blocks(self, *, originals: bool = False) -> Iterator[DecoderBlock]:
        """The blocks to do, with what flows into them, for a method that looks at data.

        ``originals``: with what would flow into them in the original as well; a given walk must
        have been opened so.
        """
        if self.walk is not None:
            return self.walk.blocks()
        assert self.ids is not None
        return walk_blocks(self.reader, self.family, self.ids, self.device, originals=originals)

    def prefixes(self) -> list[str]:
        """Full names of the blocks to do, for a method that looks at weights alone."""
        return self.family.block_prefixes(self.reader.config)[self.first_block :]

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
