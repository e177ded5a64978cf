"""The head, where it is asked for: rounded to nearest from the tensor that holds it.

A tied head is the embedding. It is quantized as a weight of its own, the embedding stays in 16
bits, and the result's config says that the two are no longer one (:func:`head_config`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qtool.calibration.weights import read_weight
from qtool.formats.tensor import QuantizedTensor
from qtool.quantize.job import Job
from qtool.quantize.plan import HEAD, head_source
from qtool.quantize.report import ModuleRecord, module_record
from qtool.quantize.rtn import quantize_rtn


def quantize_head(job: Job) -> tuple[QuantizedTensor, ModuleRecord] | None:
    """The quantized head of a job and its record; ``None`` if it stays as it is.

    Raises:
        QuantizationError: a weight is not finite.
    """
    scheme = job.schemes.get(HEAD)
    if scheme is None:
        return None
    weight = read_weight(job.reader, head_source(job.reader.config, job.family), job.device)
    tensor = quantize_rtn(weight, scheme, job.dtype)
    return tensor, module_record(HEAD, "rtn", weight, tensor)


def head_config(job: Job) -> Mapping[str, Any]:
    """What a quantized head changes in ``config.json``."""
    return {"tie_word_embeddings": False} if HEAD in job.schemes else {}
