"""What a run needs before it begins: the plan, the texts, the room on the disk."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from qtool.calibration.data import (
    canonical_order,
    evaluation_windows,
    held_out_documents,
    load_tokenizer,
)
from qtool.calibration.families import ModelFamily
from qtool.calibration.mix import Part, Sampler, mixed_blocks, read_mix
from qtool.calibration.standard import family_of
from qtool.errors import QuantizationError, UsageError
from qtool.formats.checkpoint import CheckpointReader, check_target
from qtool.formats.kv_plan import FP8
from qtool.quantize.job import Job
from qtool.quantize.methods import METHODS
from qtool.quantize.options import QuantizeOptions
from qtool.quantize.output_formats import format_warnings, other_folders, with_format
from qtool.quantize.plan import HEAD, check_not_quantized, linear_names, plan_schemes
from qtool.quantize.work import was_published

# Tokens of an evaluation window, where the model can take so many.
EVAL_SEQ_LEN = 512


@dataclass(frozen=True, slots=True)
class Progress:
    """One step of a run: ``done`` of ``total`` in ``phase``; ``detail`` names what was done."""

    phase: str
    done: int
    total: int
    detail: str


Listener = Callable[[Progress], None]


@dataclass(frozen=True, slots=True, eq=False)
class HeldOut:
    """Text that nothing is calibrated on, int64 [windows, seq_len], and where it comes from."""

    ids: Tensor
    text: str
    sha256: str


@dataclass(frozen=True, slots=True, eq=False)
class Texts:
    """All tokens of a run; ``None`` where the method or the options need none."""

    ids: Tensor | None
    manifest: dict[str, Any] | None
    held_out: HeldOut | None

    @property
    def held_out_ids(self) -> Tensor | None:
        """Windows of the held-out text, int64 [windows, seq_len]."""
        return None if self.held_out is None else self.held_out.ids


def check_targets(source: Path, out: Path, options: QuantizeOptions) -> dict[str, Path]:
    """Folders of the result that may be written, by format, and replaced where they are there.

    What the same run has put into place before it was stopped may be, without ``overwrite``: that
    it is the same run is seen when its work folder is opened, and nothing is replaced before.

    Raises:
        CheckpointError: see :func:`~qtool.formats.writer.check_target`.
    """
    folders = {options.formats[0]: out, **other_folders(out, options.formats)}
    for folder in folders.values():
        check_target(folder, source, may_replace(folder, out, options))
    return folders


def may_replace(folder: Path, out: Path, options: QuantizeOptions) -> bool:
    """Whether a folder of the result may be replaced if it is there."""
    return options.overwrite or (not options.restart and was_published(folder, out))


def plan_job(reader: CheckpointReader, options: QuantizeOptions) -> Job:
    """What the headers decide: family, schemes, dtype.

    Raises:
        QtoolError: what cannot be done as asked.
    """
    check_not_quantized(reader.config)
    longest = reader.config.get("max_position_embeddings", options.seq_len)
    if options.needs_calibration and options.seq_len > longest:
        raise UsageError(
            f"seq_len={options.seq_len}: the model was made for at most {longest} tokens; ask for "
            "shorter samples"
        )
    family = family_of(reader)
    _require_pairs(family, options.method)
    _require_placed(family, options)
    schemes = plan_schemes(reader, reader.config, family, options.schemes)
    if schemes:
        _refuse_strays(reader, family)
    first = next(iter(schemes or linear_names(reader.config, family)))
    source = reader.dtype(f"{first}.weight")
    dtype = options.stored_dtype(source) if schemes else source
    job = Job(
        reader,
        family,
        schemes,
        dtype,
        options.torch_device,
        ids=None,
        kv_scales=options.kv_cache == FP8,
        key_peaks=options.smooths_keys,
    )
    return with_format(job, options.formats)


def _refuse_strays(reader: CheckpointReader, family: ModelFamily) -> None:
    """Refuse tensors of blocks that the config does not count, which no result would have.

    Raises:
        QuantizationError: naming the first of them.
    """
    counted = tuple(f"{prefix}." for prefix in family.block_prefixes(reader.config))
    blocks = f"{family.blocks}."
    strays = [n for n in reader.names() if n.startswith(blocks) and not n.startswith(counted)]
    if strays:
        raise QuantizationError(
            f"{strays[0]} and {len(strays) - 1} more tensors belong to none of the {len(counted)} "
            "blocks that config.json counts, and would be lost; correct num_hidden_layers, or "
            "delete what predicts further tokens"
        )


def _require_placed(family: ModelFamily, options: QuantizeOptions) -> None:
    """Refuse what would be written under names that nobody reads.

    Raises:
        UsageError: naming the option.
    """
    kind = f"of model_type={family.model_type!r}"
    if options.kv_cache == FP8 and family.attention_output not in family.linears:
        raise UsageError(
            f"kv_cache={FP8!r}: {kind} it is not known where engines look for the scales of keys "
            "and values; leave it out"
        )
    if options.lm_head is not None and family.head != HEAD:
        raise UsageError(
            f"lm_head={options.lm_head}: the head {kind} is {family.head} on disk, which no engine "
            "is known to load quantized; leave it out"
        )


def _require_pairs(family: ModelFamily, method: str) -> None:
    """Refuse a method that smooths where nothing can be smoothed.

    Raises:
        UsageError: naming methods that need no smoothing.
    """
    if METHODS[method].recipe.smoothing is not None and not family.pairs:
        kind = METHODS[method].recipe.family
        others = [
            name
            for name, other in METHODS.items()
            if other.recipe.family == kind and other.recipe.smoothing is None
        ]
        raise UsageError(
            f"method={method!r}: smooths, and of model_type={family.model_type!r} it is not known "
            f"through which norms that leaves the function as it is; use "
            f"{', '.join(others or ['fp8', 'gptq'])}"
        )


def plan_notes(job: Job, options: QuantizeOptions) -> tuple[str, ...]:
    """What a user should know of a plan before it is carried out, one sentence each."""
    family = job.family
    notes = format_warnings(job, options.formats)
    if family.pairs or job.keeps_weights:
        return notes
    found = "; ".join(", ".join(group) for group in family.linear_groups)
    return (
        f"model_type={family.model_type!r} is no family that qtool knows: its linears were found "
        f"by running it without weights, in the order {found}; methods that smooth are not open to "
        "it",
        *notes,
    )


def gather_texts(
    job: Job,
    options: QuantizeOptions,
    parts: Sequence[Part] | None,
    sampler: Sampler | None,
    progress: Listener,
    *,
    evaluate: bool,
) -> Texts:
    """Calibration samples and held-out windows of a job.

    Raises:
        CalibrationError: a text is too short, or cannot be read.
    """
    held_out = _held_out(job, options) if evaluate and options.eval_windows else None
    if not options.needs_calibration:
        return Texts(None, None, held_out)
    read = read_mix(options.calibration) if parts is None else parts
    names = ", ".join(part.name for part in read)
    progress(Progress("calibration", 0, 1, names))
    blocks = mixed_blocks(
        read,
        job.reader.folder,
        num_samples=options.samples,
        seq_len=options.seq_len,
        seed=options.seed,
        sampler=sampler,
    )
    progress(Progress("calibration", 1, 1, f"{blocks.ids.numel()} tokens of {names}"))
    return Texts(canonical_order(blocks.ids), blocks.manifest, held_out)


def _held_out(job: Job, options: QuantizeOptions) -> HeldOut:
    tokenizer = load_tokenizer(job.reader.folder)
    text = held_out_documents(options.eval_text).render(tokenizer)
    seq_len = min(EVAL_SEQ_LEN, job.reader.config.get("max_position_embeddings", EVAL_SEQ_LEN))
    ids = evaluation_windows(text, tokenizer, seq_len, options.eval_windows)
    return HeldOut(ids, text.name, text.fingerprint)


def result_bytes(job: Job) -> int:
    """Bytes of the result's tensors, but for the few of their recorded shapes."""
    scale_bits = 8 * job.dtype.itemsize
    bits = 0.0
    for name, entry in job.reader.entries.items():
        rewritten = entry.dtype.is_floating_point and not job.keeps_weights
        width: float = scale_bits if rewritten else 8 * entry.dtype.itemsize
        if scheme := job.schemes.get(name.removesuffix(".weight")):
            width = scheme.bits_per_weight((entry.shape[0], entry.shape[1]), scale_bits)
        bits += math.prod(entry.shape) * width
    return int(bits / 8)


def work_bytes(job: Job, texts: Texts, options: QuantizeOptions) -> int:
    """Bytes that the work folder takes at most: all blocks, and two states of the walk.

    Weights that stay as they are, are copied from the source, and held-out text is not walked.
    """
    hidden_size = int(job.reader.config["hidden_size"])
    streams = 2 if METHODS[options.method].recipe.solve else 1
    tokens = 0 if texts.ids is None else streams * texts.ids.numel()
    if job.keeps_weights:
        return 2 * tokens * hidden_size * 4
    tokens += 0 if texts.held_out is None else texts.held_out.ids.numel()
    return result_bytes(job) + 2 * tokens * hidden_size * 4
