"""Tensors and config of the result: what is quantized, what is rewritten, what is copied."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from qtool.calibration.cache_peaks import CachePeaks
from qtool.calibration.weights import check_scales, to_stored
from qtool.errors import QuantizationError
from qtool.formats import affine
from qtool.formats.checkpoint import TensorSource
from qtool.formats.kv_scales import KvScales, static_scheme
from qtool.formats.losses import scale_loss
from qtool.formats.registry import DEFAULT_FORMAT
from qtool.formats.scheme import FLOAT8_MAX
from qtool.formats.tensor import QuantizedTensor
from qtool.quantize.head import head_config, quantize_head
from qtool.quantize.job import Job, QuantizedBlock
from qtool.quantize.plan import HEAD, is_tied, linear_names
from qtool.quantize.report import PLAIN, ModuleRecord


def outer_sources(job: Job) -> dict[str, TensorSource]:
    """Tensors outside the blocks, as they are: without a head that is quantized.

    A tied head is the embedding and is not written again. Where all weights stay as they are, this
    is the whole source, tensor by tensor.
    """
    if job.keeps_weights:
        return {name: _kept_source(job, name) for name in job.reader.names()}
    drop_head = _is_tied(job) or HEAD in job.schemes
    return {
        name: _stored_source(job, name)
        for name in _outer_names(job)
        if not (drop_head and name == f"{job.family.head}.weight")
    }


def head_tensors(job: Job) -> tuple[dict[str, Tensor], list[ModuleRecord]]:
    """Tensors of a quantized head and its record; none if the head stays as it is.

    Raises:
        QuantizationError: a weight is not finite.
    """
    head = quantize_head(job)
    return ({}, []) if head is None else (_packed(job, HEAD, head[0]), [head[1]])


def _is_tied(job: Job) -> bool:
    return is_tied(job.reader.config, job.family)


def _outer_names(job: Job) -> list[str]:
    inside = f"{job.family.blocks}."
    return [name for name in job.reader.names() if not name.startswith(inside)]


def _packed(job: Job, module: str, tensor: QuantizedTensor) -> dict[str, Tensor]:
    check_scales(module, tensor.scales)
    if loss := scale_loss(job.format, tensor.scales):
        raise QuantizationError(
            f"{module}: {loss}, beyond its range; write {DEFAULT_FORMAT} instead of "
            f"{job.format.NAME}"
        )
    parts = job.format.pack(tensor.to("cpu"))
    return {f"{module}.{part}": packed for part, packed in parts.items()}


def _stored_source(job: Job, name: str) -> TensorSource:
    entry = job.reader.entry(name)
    dtype = job.dtype if entry.dtype.is_floating_point else entry.dtype
    return TensorSource(dtype, entry.shape, partial(read_stored, job, name))


def _kept_source(job: Job, name: str) -> TensorSource:
    entry = job.reader.entry(name)
    return TensorSource(entry.dtype, entry.shape, partial(_read_kept, job, name))


def _read_kept(job: Job, name: str) -> Tensor:
    tensor = job.reader.get(name).clone()
    job.reader.close()  # a memory map counts as memory as far as it was read
    if tensor.dtype.is_floating_point and not tensor.isfinite().all():
        raise QuantizationError(
            f"{name} holds NaN or infinity, with which nothing of the cache can be measured: copy "
            "the model again, or repair it"
        )
    return tensor


def read_stored(job: Job, name: str) -> Tensor:
    """A tensor of the source in the dtype it is stored in, in memory of its own.

    Raises:
        QuantizationError: a value is not finite, or does not fit.
    """
    tensor = to_stored(name, job.reader.get(name), job.dtype).clone()
    job.reader.close()  # a memory map counts as memory as far as it was read
    return tensor


def block_tensors(job: Job, prefix: str, block: QuantizedBlock) -> dict[str, Tensor]:
    """All tensors of one block as the result holds them, on the host.

    None where all weights stay as they are: the source has them (:func:`outer_sources`).
    """
    tensors: dict[str, Tensor] = {}
    if job.keeps_weights:
        return tensors
    for name in job.reader.names():
        if not name.startswith(f"{prefix}."):
            continue
        module, _, local = name.rpartition(".")
        if local == "weight" and module in block.weights:
            tensors |= _packed(job, module, block.weights[module])
        elif name in block.changed:
            tensors[name] = to_stored(name, block.changed[name], job.dtype)
        else:
            tensors[name] = read_stored(job, name)
    return tensors


def cache_scales(job: Job, peaks: CachePeaks) -> dict[str, Tensor]:
    """FP8 scales [1] of a block's keys and values, so that its largest one is e4m3's largest."""
    attention = f"{peaks.prefix}.{job.family.attention_output.rpartition('.')[0]}"
    key, value = (
        torch.tensor([max(peak / FLOAT8_MAX, affine.MIN_SCALE)]).to(job.dtype)
        for peak in (peaks.key, peaks.value)
    )
    scales = KvScales(key, value)
    return {f"{attention}.{name}": scale for name, scale in scales.tensors().items()}


def num_parameters(job: Job) -> int:
    """Parameters of the original; a tied head is the embedding and counts once."""
    twice = f"{job.family.head}.weight" if _is_tied(job) else None
    return sum(math.prod(job.reader.shape(name)) for name in job.reader.names() if name != twice)


def format_name(job: Job) -> str:
    """How the result's tensors lie on disk."""
    return PLAIN if job.keeps_weights and not job.kv_scales else job.format.NAME


def result_config(job: Job) -> dict[str, Any]:
    """``config.json`` of the result: the source's, and what is new: its dtype, how to read it."""
    config = dict(job.reader.config)
    for key in [key for key in config if key.endswith("name_or_path")]:
        del config[key]
    if not job.keeps_weights:
        config["dtype"] = str(job.dtype).removeprefix("torch.")
        if "torch_dtype" in config:
            config["torch_dtype"] = config["dtype"]
        config |= head_config(job)
    if format_name(job) != PLAIN:
        config["quantization_config"] = _quantization_block(job, config)
    return config


def _quantization_block(job: Job, config: Mapping[str, Any]) -> dict[str, Any]:
    """How to read weights and cache; no module is named where all weights are as they were."""
    # A head has its name on disk for some loaders, and the one in memory for others.
    heads = dict.fromkeys((HEAD, job.family.head))
    linears = (*heads, *linear_names(config, job.family), *job.family.router_names(config))
    kept = [] if job.keeps_weights else [name for name in linears if name not in job.schemes]
    block = job.format.quantization_config(job.schemes, kept)
    if job.kv_scales:
        block["kv_cache_scheme"] = static_scheme(per_head=False)
    return block
