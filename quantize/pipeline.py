"""The offline flow: a model folder in, a quantized model folder out.

Plan and checks first, then block by block: quantize, pack, write. Nothing appears at the
output until everything is written.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from qtool import __version__
from qtool.calibration.data import canonical_order
from qtool.calibration.families import find_family
from qtool.calibration.mix import Part, Sampler, mixed_blocks, read_mix
from qtool.calibration.weights import to_stored
from qtool.errors import UsageError
from qtool.formats.checkpoint import (
    CheckpointReader,
    CheckpointWriter,
    check_free_space,
    check_target,
)
from qtool.formats.compressed_tensors import pack, quantization_config
from qtool.formats.tensor import QuantizedTensor
from qtool.quantize.head import head_config, quantize_head
from qtool.quantize.job import Job, QuantizedBlock
from qtool.quantize.methods import METHODS
from qtool.quantize.options import QuantizeOptions
from qtool.quantize.plan import HEAD, check_not_quantized, linear_names, plan_schemes
from qtool.quantize.report import REPORT_PATH, ModuleRecord, Report


@dataclass(frozen=True, slots=True)
class Progress:
    """One step of a run: ``done`` of ``total`` in ``phase``; ``detail`` names what was done."""

    phase: str
    done: int
    total: int
    detail: str


def quantize_model(
    source: Path,
    out: Path,
    options: QuantizeOptions,
    progress: Callable[[Progress], None] = lambda _: None,
    *,
    parts: Sequence[Part] | None = None,
    sampler: Sampler | None = None,
) -> Report:
    """Quantize the model folder ``source`` into the new model folder ``out``.

    Args:
        source, out, options: what is asked.
        progress: told of every step.
        parts: the sources of ``options.calibration``, if they are read already.
        sampler: samples text from a model, for the source ``self``.

    Raises:
        QtoolError: anything that cannot be done as asked. Options, folders, group sizes and
            calibration data are checked before work that takes long; ``out`` is then untouched.
    """
    check_target(out, source, options.overwrite)
    with CheckpointReader(source) as reader:
        job = _plan(reader, options)
        check_free_space(out, _result_bytes(job))
        manifest = None
        if options.needs_calibration:
            read = read_mix(options.calibration) if parts is None else parts
            job, manifest = _calibrate(job, read, options, sampler, progress)
        with CheckpointWriter(out, overwrite=options.overwrite) as writer:
            records = _write_tensors(job, options.method, writer, progress)
            report = _report(options, job, manifest, records)
            writer.add_json(REPORT_PATH, report.to_dict())
            writer.copy_side_files(source)
            writer.finish(_result_config(job))
    return report


def _plan(reader: CheckpointReader, options: QuantizeOptions) -> Job:
    """What the headers decide: family, schemes, dtype."""
    check_not_quantized(reader.config)
    longest = reader.config.get("max_position_embeddings", options.seq_len)
    if options.needs_calibration and options.seq_len > longest:
        raise UsageError(
            f"seq_len={options.seq_len}: the model was made for at most {longest} tokens; ask for "
            "shorter samples"
        )
    family = find_family(reader.config)
    schemes = plan_schemes(reader, reader.config, family, options.schemes)
    dtype = options.stored_dtype(reader.dtype(f"{next(iter(schemes))}.weight"))
    return Job(reader, family, schemes, dtype, options.torch_device, ids=None)


def _calibrate(
    job: Job,
    parts: Sequence[Part],
    options: QuantizeOptions,
    sampler: Sampler | None,
    progress: Callable[[Progress], None],
) -> tuple[Job, dict[str, Any]]:
    """The job with calibration tokens, and their manifest."""
    names = ", ".join(part.name for part in parts)
    progress(Progress("calibration", 0, 1, names))
    blocks = mixed_blocks(
        parts,
        job.reader.folder,
        num_samples=options.samples,
        seq_len=options.seq_len,
        seed=options.seed,
        sampler=sampler,
    )
    progress(Progress("calibration", 1, 1, f"{blocks.ids.numel()} tokens of {names}"))
    return replace(job, ids=canonical_order(blocks.ids)), blocks.manifest


def _write_tensors(
    job: Job, method: str, writer: CheckpointWriter, progress: Callable[[Progress], None]
) -> list[ModuleRecord]:
    """Stream every tensor of the result into ``writer``; returns the modules' records."""
    for name in _outer_names(job):
        writer.add(name, to_stored(name, job.reader.get(name), job.dtype))
    prefixes = job.family.block_prefixes(job.reader.config)
    records: list[ModuleRecord] = []
    with torch.no_grad():
        for index, block in enumerate(METHODS[method].run(job)):
            _write_block(job, prefixes[index], block, writer)
            records += block.records
            progress(Progress("quantize", index + 1, len(prefixes), prefixes[index]))
    if (head := quantize_head(job)) is not None:
        _write_module(HEAD, head[0], writer)
        records.append(head[1])
    return records


def _write_module(module: str, tensor: QuantizedTensor, writer: CheckpointWriter) -> None:
    for part, packed in pack(tensor.to("cpu")).items():
        writer.add(f"{module}.{part}", packed)


def _outer_names(job: Job) -> list[str]:
    """Tensors outside the blocks. A tied head is the embedding and is not written again."""
    inside = f"{job.family.blocks}."
    drop_head = job.reader.config.get("tie_word_embeddings", False) or HEAD in job.schemes
    return [
        name
        for name in job.reader.names()
        if not name.startswith(inside) and not (drop_head and name == "lm_head.weight")
    ]


def _result_bytes(job: Job) -> int:
    """Bytes of the result's tensors, but for the few of their recorded shapes."""
    scale_bits = 8 * job.dtype.itemsize
    bits = 0.0
    for name, entry in job.reader.entries.items():
        width: float = scale_bits if entry.dtype.is_floating_point else 8 * entry.dtype.itemsize
        if scheme := job.schemes.get(name.removesuffix(".weight")):
            width = scheme.bits_per_weight((entry.shape[0], entry.shape[1]), scale_bits)
        bits += math.prod(entry.shape) * width
    return int(bits / 8)


def _write_block(job: Job, prefix: str, block: QuantizedBlock, writer: CheckpointWriter) -> None:
    for name in job.reader.names():
        if not name.startswith(f"{prefix}."):
            continue
        module, _, local = name.rpartition(".")
        if local == "weight" and module in block.weights:
            _write_module(module, block.weights[module], writer)
        else:
            tensor = block.changed[name] if name in block.changed else job.reader.get(name)
            writer.add(name, to_stored(name, tensor, job.dtype))


def _result_config(job: Job) -> dict[str, Any]:
    """``config.json`` of the result: the source's, with the new dtype and how to read weights."""
    config = dict(job.reader.config)
    for key in [key for key in config if key.endswith("name_or_path")]:
        del config[key]
    config["dtype"] = str(job.dtype).removeprefix("torch.")
    if "torch_dtype" in config:
        config["torch_dtype"] = config["dtype"]
    config |= head_config(job)
    routers = job.family.router_names(config)
    kept = [n for n in (HEAD, *linear_names(config, job.family)) if n not in job.schemes]
    config["quantization_config"] = quantization_config(job.schemes, [*kept, *routers])
    return config


def _report(
    options: QuantizeOptions,
    job: Job,
    manifest: dict[str, Any] | None,
    records: list[ModuleRecord],
) -> Report:
    return Report(
        method=options.method,
        scheme=next(iter(job.schemes.values())).to_dict(),
        dtype=str(job.dtype).removeprefix("torch."),
        calibration=manifest,
        modules=tuple(records),
        qtool_version=__version__,
    )
