"""Smoothing pairs that a method leaves out, and why: the dry run and the report say the same."""

from __future__ import annotations

from collections.abc import Sequence

from qtool.quantize.job import Job
from qtool.quantize.recipe import Recipe
from qtool.quantize.report import SkippedPair


def skipped_pairs(job: Job, recipe: Recipe) -> tuple[SkippedPair, ...]:
    """Pairs a smoothing method cannot use: one side is not quantized, or the family cannot."""
    if recipe.smoothing is None:
        return ()
    skipped = [SkippedPair(place, (), reason) for place, reason in job.family.not_smoothed]
    for prefix in job.family.block_prefixes(job.reader.config):
        schemes = job.schemes_of(prefix)
        for pair in job.family.pairs:
            if unquantized := job.family.unquantized_sides(pair, schemes):
                reason = f"{', '.join(unquantized)} stays as it is"
                skipped.append(SkippedPair(f"{prefix}.{pair.source}", pair.targets, reason))
    return tuple(skipped)


def skip_notes(pairs: Sequence[SkippedPair]) -> list[str]:
    """Pairs as sentences; those that differ only by block are one."""
    reasons: dict[str, int] = {}
    for pair in pairs:
        to = f" -> {', '.join(pair.targets)}" if pair.targets else ""
        source = pair.source.rpartition(".")[2] if pair.targets else pair.source
        kind = f"{source}{to}: {pair.reason}"
        reasons[kind] = reasons.get(kind, 0) + 1
    blocks = {kind: f" ({count} blocks)" if count > 1 else "" for kind, count in reasons.items()}
    return [f"not smoothed: {kind}{count}" for kind, count in blocks.items()]
