"""In which formats a result is written, and what they cannot hold, before anything is done."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from qtool.errors import QuantizationError
from qtool.formats.linears import Shape
from qtool.formats.losses import LinearPlan, describe, losses, scale_loss
from qtool.formats.registry import DEFAULT_FORMAT, writer_of
from qtool.quantize.job import Job
from qtool.quantize.plan import weight_name


def with_format(job: Job, formats: Sequence[str]) -> Job:
    """The job, to be written in the first of some formats.

    Raises:
        QuantizationError: one of them does not hold what is asked. Whether scales are within a
            format's range is seen when they are there.
    """
    for name in formats:
        _refuse_losses(replace(job, format=writer_of(name)))
    return replace(job, format=writer_of(formats[0]))


def format_warnings(job: Job, formats: Sequence[str]) -> tuple[str, ...]:
    """What a user should know of the job's weights in some formats, one sentence each."""
    weights = [(scheme, _shape(job, name)) for name, scheme in job.schemes.items()]
    return tuple(text for name in formats for text in writer_of(name).warnings(weights))


def other_folders(out: Path, formats: Sequence[str]) -> dict[str, Path]:
    """Where a result lies in the formats after the first: beside ``out``, with their names."""
    real = out.resolve()
    return {name: real.with_name(f"{real.name}-{name}") for name in formats[1:]}


def _refuse_losses(job: Job) -> None:
    # A number of which every dtype holds as many bits as it has.
    loss = scale_loss(job.format, torch.tensor([1 / 3], dtype=job.dtype))
    plans = {
        name: LinearPlan(scheme, _shape(job, name), loss) for name, scheme in job.schemes.items()
    }
    found = losses(job.format, plans)
    if job.kv_scales and not job.format.HOLDS_KV_SCALES:
        raise QuantizationError(
            f"format={job.format.NAME!r} has no place for the FP8 scales of --kv-cache fp8; write "
            f"{DEFAULT_FORMAT}, or ask for another cache"
        )
    if found:
        raise QuantizationError(
            f"format={job.format.NAME!r} cannot hold what is asked: {describe(found)}; ask for "
            "another scheme or --dtype, or for another format"
        )


def _shape(job: Job, module: str) -> Shape:
    rows, columns = job.reader.shape(weight_name(module, job.reader.config, job.family))
    return rows, columns
