"""The offline flow: a model folder in, a quantized model folder out.

Plan and checks first, then block by block: quantize, pack, commit to the work folder; then write
the model, read it back, and compare it with the original. Nothing appears at the output until all
of this is done, and a run that is stopped goes on from the last finished block.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from qtool import __version__
from qtool.calibration.logits import FinalLogits
from qtool.calibration.mix import Part, Sampler
from qtool.errors import CalibrationError, QuantizationError
from qtool.formats.checkpoint import (
    CheckpointReader,
    CheckpointWriter,
    check_free_space,
)
from qtool.formats.convert import convert_checkpoint
from qtool.formats.kv_plan import KVPlan
from qtool.quantize.assemble import (
    format_name,
    head_tensors,
    num_parameters,
    outer_sources,
    result_config,
)
from qtool.quantize.blocks import quantize_blocks
from qtool.quantize.card import command_line, public_name
from qtool.quantize.fingerprint import run_fingerprint
from qtool.quantize.job import Job
from qtool.quantize.kv_cache import (
    Planner,
    plan_cache,
    plan_record,
    publish_plan,
    require_planner,
)
from qtool.quantize.methods import METHODS
from qtool.quantize.options import QuantizeOptions
from qtool.quantize.phases import PhaseClock
from qtool.quantize.prepare import (
    Listener,
    Progress,
    Texts,
    check_targets,
    gather_texts,
    may_replace,
    plan_job,
    plan_notes,
    result_bytes,
    work_bytes,
)
from qtool.quantize.publish import publish
from qtool.quantize.report import Evaluation, ModuleRecord, Report
from qtool.quantize.skipped import skip_notes, skipped_pairs
from qtool.quantize.verify import verify_loads, verify_tensors
from qtool.quantize.work import WorkFolder, bytes_done

__all__ = ["Evaluated", "Evaluator", "Origin", "Progress", "quantize_model"]


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a result comes from, in words that hold on every machine.

    Attributes:
        base_model: the model's name or hub id.
        command: the command line that makes the result again.
    """

    base_model: str = ""
    command: str = ""


@dataclass(frozen=True, slots=True)
class Evaluated:
    """What an evaluator found: who ran the checkpoint, how good it is, and a probe for loaders."""

    engine: str
    quality: dict[str, Any]
    probe: dict[str, Any] | None = None


# Runs the checkpoint in a folder and compares it with the original's logits.
Evaluator = Callable[[Path, FinalLogits], Evaluated]


def quantize_model(
    source: Path,
    out: Path,
    options: QuantizeOptions,
    progress: Listener = lambda _: None,
    *,
    parts: Sequence[Part] | None = None,
    sampler: Sampler | None = None,
    evaluator: Evaluator | None = None,
    planner: Planner | None = None,
    origin: Origin | None = None,
) -> Report:
    """Quantize the model folder ``source`` into the new model folder ``out``.

    Args:
        source, out, options: what is asked.
        progress: told of every step.
        parts: the sources of ``options.calibration``, if they are read already.
        sampler: samples text from a model, for the source ``self``.
        evaluator: compares the result with the original; without one nothing is compared.
        planner: answers what is asked of the cache; without one nothing of it is measured, and what
            needs factors for keys is refused.
        origin: what the report and the model card say about where the model comes from.

    Raises:
        QtoolError: anything that cannot be done as asked. Options, folders, group sizes and
            calibration data are checked before work that takes long; ``out`` is then untouched.
    """
    require_planner(options, planner)
    folders = check_targets(source, out, options)
    clock = PhaseClock()
    with CheckpointReader(source) as reader:
        job = plan_job(reader, options)
        skipped = skipped_pairs(job, METHODS[options.method].recipe)
        for note in (*plan_notes(job, options), *skip_notes(skipped)):
            progress(Progress("format", 1, 1, note))
        with clock.phase("calibration"):
            evaluate = evaluator is not None
            texts = gather_texts(job, options, parts, sampler, progress, evaluate=evaluate)
            result = result_bytes(job) * len(options.formats)
            needed = result + work_bytes(job, texts, options)
            check_free_space(out, needed - bytes_done(out))
            job = replace(job, ids=texts.ids)
            fingerprint = run_fingerprint(reader, options, texts.ids, texts.held_out_ids)
        with WorkFolder(out, fingerprint, restart=options.restart) as work:
            check_targets(source, out, options)  # another run may have ended meanwhile
            with clock.phase("quantize"), _hopeless_runs_removed(work):
                quantize_blocks(job, texts, options, work, progress)
            with CheckpointWriter(out, overwrite=may_replace(out, out, options)) as writer:
                origin = origin or _origin(source, options)
                run = _Run(options, job, texts, work, clock, origin)
                report = _finish(run, writer, progress, evaluator, planner)
            for name in options.formats[1:]:
                _convert(out, folders[name], name, options, progress)
            work.discard()
    return report


def _convert(
    out: Path, folder: Path, name: str, options: QuantizeOptions, progress: Listener
) -> None:
    """The published result in another format."""
    overwrite = may_replace(folder, out, options)
    convert_checkpoint(out, folder, name, overwrite=overwrite, progress=_told(progress, name))
    progress(Progress("format", 1, 1, f"{folder}: the same weights as {name}"))


def _told(progress: Listener, name: str) -> Callable[[str, int, int, str], None]:
    return lambda phase, done, total, detail: progress(
        Progress(f"{name}: {phase}", done, total, detail)
    )


@dataclass(frozen=True, slots=True)
class _Run:
    """A run whose blocks are all done."""

    options: QuantizeOptions
    job: Job
    texts: Texts
    work: WorkFolder
    clock: PhaseClock
    origin: Origin


def _finish(
    run: _Run,
    writer: CheckpointWriter,
    progress: Listener,
    evaluator: Evaluator | None,
    planner: Planner | None,
) -> Report:
    """Write the result, read it back, compare it with the original, and publish it."""
    with run.clock.phase("write"):
        digests, head = _write_tensors(run.job, run.work, writer, progress)
    writer.copy_side_files(run.job.reader.folder)
    with run.clock.phase("verify"):
        verify_tensors(writer.folder, digests)
        verify_loads(writer.folder)
    with run.clock.phase("evaluate"):
        found = _evaluate(run, writer.folder, evaluator)
    plan = None
    if run.options.kv_cache is not None:
        with run.clock.phase("kv cache"):
            plan = plan_cache(run.job, run.texts, run.options, run.work, writer.folder, planner)
    publish_plan(writer, plan)
    report = _report(run, head, writer, found, plan)
    probe = None if found is None else found.probe
    missing = publish(writer, report, probe, run.clock.phases, run.work.run)
    if missing is not None:
        progress(Progress("publish", 1, 1, missing))
    writer.finish()
    return report


def _origin(source: Path, options: QuantizeOptions) -> Origin:
    return Origin(public_name(str(source)), command_line(str(source), options))


@contextmanager
def _hopeless_runs_removed(work: WorkFolder) -> Iterator[None]:
    """What is wrong with the model or the text stays wrong: the same command cannot go on."""
    try:
        yield
    except (QuantizationError, CalibrationError):
        work.discard()
        raise


def _write_tensors(
    job: Job, work: WorkFolder, writer: CheckpointWriter, progress: Listener
) -> tuple[dict[str, str], list[ModuleRecord]]:
    """Write the model from the work folder.

    Returns:
        Digests of what memory held, and the record of a quantized head.
    """
    outer = outer_sources(job)
    for name, source in outer.items():
        writer.add_source(name, source)
    tensors, records = head_tensors(job)
    for name, tensor in tensors.items():
        writer.add(name, tensor)
    digests: dict[str, str] = {}
    for block in work.blocks:
        for name, source in block.sources().items():
            writer.add_source(name, source)
        digests |= block.digests
    config = result_config(job)
    writer.finish_tensors(config)
    if job.format.SIDE_FILE is not None:
        writer.add_json(job.format.SIDE_FILE, config["quantization_config"])
    progress(Progress("write", 1, 1, f"{writer.total_bytes / 1e6:.1f} MB"))
    return digests | {name: writer.digests[name] for name in (*outer, *tensors)}, records


def _evaluate(run: _Run, folder: Path, evaluator: Evaluator | None) -> Evaluated | None:
    """The written model against the original's logits, which the walk has left behind.

    Weights that stayed as they were are not compared: the cache is what is measured of them.
    """
    held_out = run.texts.held_out
    state, job = run.work.state, run.job
    if evaluator is None or held_out is None or job.keeps_weights:
        return None
    assert state is not None and state.held_out is not None
    original = FinalLogits(job.reader, job.family, job.device, held_out.ids, state.held_out)
    return evaluator(folder, original)


def _report(
    run: _Run,
    head: list[ModuleRecord],
    writer: CheckpointWriter,
    found: Evaluated | None,
    plan: KVPlan | None,
) -> Report:
    job, blocks, held_out = run.job, run.work.blocks, run.texts.held_out
    records = [ModuleRecord(**values) for b in blocks for values in b.facts["records"]] + head
    peaks = {name: peak for b in blocks for name, peak in b.facts["peaks"].items()}
    evaluation = None
    if found is not None and held_out is not None:
        windows, seq_len = held_out.ids.shape
        evaluation = Evaluation(
            engine=found.engine,
            text=held_out.text,
            text_sha256=held_out.sha256,
            windows=windows,
            seq_len=seq_len,
            quality=found.quality,
        )
    return Report(
        method=run.options.method,
        scheme=_usual_scheme(job),
        dtype=str(job.dtype).removeprefix("torch."),
        calibration=run.texts.manifest,
        modules=tuple(records),
        qtool_version=__version__,
        base_model=run.origin.base_model,
        command=run.origin.command,
        num_parameters=num_parameters(job),
        total_bytes=writer.total_bytes,
        verified_tensors=len(writer.digests),
        activation_peaks=peaks,
        format=format_name(job),
        evaluation=evaluation,
        kv_cache=plan_record(plan),
        skipped_pairs=skipped_pairs(job, METHODS[run.options.method].recipe),
    )


def _usual_scheme(job: Job) -> dict[str, Any] | None:
    """The scheme of most modules."""
    counts = Counter(job.schemes.values()).most_common(1)
    return counts[0][0].to_dict() if counts else None
