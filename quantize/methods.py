"""Method names, what each needs, and the stream of quantized blocks it makes of a job."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from qtool.calibration.weights import read_weight
from qtool.quantize.awq_block import awq_blocks
from qtool.quantize.job import Job, QuantizedBlock
from qtool.quantize.report import module_record
from qtool.quantize.rtn import quantize_rtn


@dataclass(frozen=True, slots=True)
class Method:
    """A quantization method: its stream of blocks, and whether it needs calibration data."""

    needs_calibration: bool
    run: Callable[[Job], Iterator[QuantizedBlock]]


def rtn_blocks(job: Job) -> Iterator[QuantizedBlock]:
    """All blocks of a job, rounded as they are, with no forward pass."""
    for prefix in job.prefixes():
        weights, records = {}, []
        for name in (f"{prefix}.{linear}" for linear in job.schemes_of(prefix)):
            weight = read_weight(job.reader, f"{name}.weight", job.device)
            weights[name] = quantize_rtn(weight, job.schemes[name], job.dtype)
            records.append(module_record(name, "rtn", weight, weights[name]))
        yield QuantizedBlock(weights, tuple(records))


METHODS: Mapping[str, Method] = {
    "awq": Method(needs_calibration=True, run=awq_blocks),
    "rtn": Method(needs_calibration=False, run=rtn_blocks),
}
