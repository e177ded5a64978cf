"""Block by block: quantize, leave, commit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch

from qtool.calibration.products import rounded_products
from qtool.calibration.walk import Walk, WalkState
from qtool.errors import QuantizationError, UsageError
from qtool.quantize.assemble import block_tensors, cache_scales, head_tensors, outer_sources
from qtool.quantize.job import Job, QuantizedBlock
from qtool.quantize.methods import METHODS
from qtool.quantize.options import QuantizeOptions
from qtool.quantize.phases import return_free_memory
from qtool.quantize.prepare import Listener, Progress, Texts
from qtool.quantize.report import ModuleRecord
from qtool.quantize.work import WorkFolder


def quantize_blocks(
    job: Job,
    texts: Texts,
    options: QuantizeOptions,
    work: WorkFolder,
    progress: Listener,
    stop: int | None = None,
) -> None:
    """Quantize the blocks that are not committed yet, and commit each.

    Args:
        job, texts, options: what is asked.
        work: where they are committed, with what is done already.
        progress: told of every block.
        stop: leave the blocks from this one on.

    Raises:
        QuantizationError: a value that cannot be stored, or under ``strict`` a fallback.
        UsageError: under ``strict``, a fallback in a block that was done without.
        CalibrationError: the model overflows on the text.
    """
    prefixes = job.family.block_prefixes(job.reader.config)
    first, total = len(work.blocks), len(prefixes)
    for note in work.notes:
        progress(Progress("resume", first, total, note))
    if options.strict:
        _refuse_fallbacks_before(work)
    if first:
        progress(Progress("quantize", first, total, "done before"))
    if first == total:
        return
    # A value that cannot be stored is found now, not after the last block.
    for source in outer_sources(job).values():
        source.read()
    head_tensors(job)
    with torch.no_grad():
        method = METHODS[options.method]
        walk = _open_walk(job, texts, work.state, originals=method.recipe.solve)
        stream = method.run(replace(job, walk=walk, first_block=first))
        for index in range(first, total if stop is None else stop):
            found = _commit_next(stream, job, prefixes[index], walk, work, strict=options.strict)
            return_free_memory()
            progress(Progress("quantize", index + 1, total, found))


def _open_walk(job: Job, texts: Texts, state: WalkState | None, *, originals: bool) -> Walk | None:
    """The walk of calibration samples and held-out windows, if there are any."""
    # Held-out windows go along for the original's logits, which kept weights would only repeat.
    ids, held_out = texts.ids, None if job.keeps_weights else texts.held_out_ids
    if ids is None and held_out is None:
        return None
    return Walk(
        job.reader,
        job.family,
        job.device,
        ids=ids,
        held_out=held_out,
        originals=originals,
        watch_cache=job.kv_scales or job.key_peaks,
        state=state,
    )


def _commit_next(
    stream: Iterator[QuantizedBlock],
    job: Job,
    prefix: str,
    walk: Walk | None,
    work: WorkFolder,
    *,
    strict: bool,
) -> str:
    """Quantize a block, save it, and keep nothing of it but what it was like, in a few words."""
    with rounded_products():
        block = next(stream)
        if strict:
            _refuse_fallbacks(block.records)
        _commit(job, prefix, block, walk, work)
    return _describe(prefix, block)


def _commit(
    job: Job, prefix: str, block: QuantizedBlock, walk: Walk | None, work: WorkFolder
) -> None:
    """Leave the block, and save it with what flows on."""
    state, peaks = None, {}
    if walk is not None:
        walk.advance()
        state, peaks = walk.state, walk.peaks
        if state.index == len(job.family.block_prefixes(job.reader.config)):
            state = WalkState(state.index, None, state.held_out)  # calibration ends here
    facts: dict[str, Any] = {
        "records": [asdict(record) for record in block.records],
        "peaks": peaks,
    }
    tensors = block_tensors(job, prefix, block)
    if job.kv_scales or job.key_peaks:
        assert walk is not None and walk.cache_peaks is not None
        facts["key_peaks"] = walk.cache_peaks.keys
        if job.kv_scales:
            tensors |= cache_scales(job, walk.cache_peaks)
    work.commit(tensors, facts, state)


def _refuse_fallbacks_before(work: WorkFolder) -> None:
    """Under ``strict`` blocks that were done without it are looked at too, and kept.

    Raises:
        UsageError: naming the modules.
    """
    records = [ModuleRecord(**values) for b in work.blocks for values in b.facts["records"]]
    if fallen := [record for record in records if record.fell_back]:
        lines = "\n".join(f"  {r.name}: {r.used} ({r.fallback})" for r in fallen)
        raise UsageError(
            f"--strict: {len(fallen)} modules of blocks that are done did not get what was asked:"
            f"\n{lines}\nLeave --strict out to go on, or choose another method and --restart"
        )


def _refuse_fallbacks(records: Sequence[ModuleRecord]) -> None:
    """Under ``strict`` a module that got something else ends the run.

    Raises:
        QuantizationError: naming the modules.
    """
    if fallen := [record for record in records if record.fell_back]:
        lines = "\n".join(f"  {r.name}: {r.used} ({r.fallback})" for r in fallen)
        raise QuantizationError(
            f"--strict: {len(fallen)} modules did not get {fallen[0].asked}:\n{lines}\nLeave "
            "--strict out to accept this, or --ignore them, or choose another method"
        )


def _describe(prefix: str, block: QuantizedBlock) -> str:
    """What a block was like, in a few words."""
    if not block.records:
        return f"{prefix}: weights as they are"
    losses = [r.weight_error if r.output_error is None else r.output_error for r in block.records]
    mean = sum(losses) / len(losses)
    fallen = sum(record.fell_back for record in block.records)
    extra = f", {fallen} fell back" if fallen else ""
    return f"{prefix}: {len(losses)} modules, error {mean:.4f}{extra}"
