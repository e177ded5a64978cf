"""All rules on a folder: what would the loaders of vLLM, transformers and qtool say?

A rule is a function of :class:`~qtool.formats.validation.facts.Facts` that yields findings; its
name is what reports call it. The facts it knows were read from the loaders of vLLM 0.32 and
transformers 5.24; docs/formats.md lists them by loader.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from qtool.errors import CheckpointError
from qtool.formats.reader import CheckpointReader
from qtool.formats.validation import configs, files, linears, model, support
from qtool.formats.validation.facts import Facts, gather_facts
from qtool.formats.validation.finding import TARGETS, Finding, Target

Rule = Callable[[Facts], Iterator[Finding]]

RULES: tuple[Rule, ...] = (
    files.index_metadata,
    files.stray_weights,
    files.custom_code,
    files.json_files,
    files.tokenizer,
    files.generation_config,
    files.chat_template,
    files.digests,
    configs.architecture,
    configs.dtype,
    configs.readable_config,
    configs.place_of_config,
    configs.required_keys,
    configs.unknown_keys,
    configs.status,
    configs.patterns,
    support.schemes,
    support.deprecated_method,
    support.awq_keys,
    support.kernel_groups,
    support.gptq_version,
    support.activation_order,
    linears.config_and_tensors,
    linears.codes,
    linears.missing_tensors,
    linears.tensor_dtypes,
    linears.tensor_shapes,
    linears.weight_shapes,
    linears.unknown_tensors,
    linears.whole_groups,
    linears.fused_schemes,
    linears.fused_ignore,
    linears.fused_scales,
    linears.group_index,
    linears.gptq_zeros,
    model.layers,
    model.embedding,
    model.head,
    model.tied_head_ignored,
    model.cache_scheme,
    model.cache_scales,
    model.cache_scale_values,
    model.cache_plan,
    model.finite_scales,
    model.block_multiples,
    model.tensor_parallel,
)

# What :func:`validate` calls the checks that opening a folder makes.
OPENING = "headers and index"


def validate(folder: Path, targets: Collection[Target] = TARGETS) -> tuple[Finding, ...]:
    """Everything that is wrong with a checkpoint for any of the loaders; errors first.

    Reads config, headers and small tensors; weights where ``qtool/digests.json`` says what they
    were written with. Findings that differ only by layer are one.
    """
    try:
        with CheckpointReader(folder) as reader:
            facts = gather_facts(reader)
            found = [finding for rule in RULES for finding in _checked(rule, facts)]
    except CheckpointError as error:
        rule, remedy = "every loader opens all files", "copy or write the checkpoint again"
        found = [Finding("error", str(folder), str(error), rule, remedy, check=OPENING)]
    meant = [f for f in found if not set(targets).isdisjoint(f.targets)]
    return tuple(sorted(_merged(meant), key=lambda finding: finding.level))


def is_valid(findings: Iterable[Finding]) -> bool:
    """Whether no finding is an error."""
    return all(finding.level != "error" for finding in findings)


def layer_pattern(name: str) -> str:
    """A name with ``*`` for the numbers of layers and experts."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


def _checked(rule: Rule, facts: Facts) -> Iterator[Finding]:
    check = rule.__name__.replace("_", "-")
    return (replace(finding, check=check) for finding in rule(facts))


def _merged(findings: Iterable[Finding]) -> list[Finding]:
    """One finding for the same thing in several layers; a single place keeps its name."""
    groups: dict[Finding, list[Finding]] = {}
    for finding in findings:
        groups.setdefault(replace(finding, where=layer_pattern(finding.where)), []).append(finding)
    return [
        replace(pattern, places=len(same)) if len(same) > 1 else same[0]
        for pattern, same in groups.items()
    ]
