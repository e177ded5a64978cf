"""One decoder block through the steps of a recipe: smooth, clip, round, record.

Linears are rounded group by group in the order in which the block computes them. Where a recipe
solves, a group's input is measured after the groups before it were rounded, so that it makes up
for their error too (true-sequential GPTQ); otherwise one pass over the block serves all groups.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from qtool.calibration.decoder_block import DecoderBlock
from qtool.calibration.products import exact_products
from qtool.formats import affine
from qtool.formats.activations import scale_of
from qtool.formats.scheme import WeightScheme
from qtool.formats.tensor import QuantizedTensor
from qtool.quantize import awq
from qtool.quantize.gptq import Outcome, factorize, retarget, solve_group
from qtool.quantize.job import Job, QuantizedBlock
from qtool.quantize.ranges import search_clip, search_octave
from qtool.quantize.recipe import Recipe
from qtool.quantize.report import ModuleRecord, module_record
from qtool.quantize.rtn import quantize_rtn
from qtool.quantize.smooth_block import smooth_block
from qtool.quantize.workspace import Inputs, SolveInputs, Workspace


def quantized_blocks(job: Job, recipe: Recipe) -> Iterator[QuantizedBlock]:
    """All blocks of a job, with the inputs each gets from its quantized predecessors."""
    assert job.ids is not None
    for block in job.blocks(originals=recipe.solve):
        yield quantize_block(block, job, recipe)


def quantize_block(block: DecoderBlock, job: Job, recipe: Recipe) -> QuantizedBlock:
    """One block; its module is left with the rounded weights."""
    work = Workspace.of(block, job)
    if recipe.smoothing is not None:
        work.observe_for_search()
        smooth_block(work, recipe.smoothing)
    elif not recipe.solve:
        work.observe(work.groups)
    changed = work.store_changes()
    block.keep_original()
    weights: dict[str, QuantizedTensor] = {}
    records: list[ModuleRecord] = []
    for groups in work.solve_passes if recipe.solve else [work.groups]:
        if recipe.solve:
            work.observe_beside_original(groups)
        for group in groups:
            for name, tensor, record in _round_group(work, group, recipe):
                weights[f"{block.prefix}.{name}"] = tensor
                records.append(record)
    return QuantizedBlock(weights, tuple(records), changed)


def _round_group(
    work: Workspace, group: tuple[str, ...], recipe: Recipe
) -> Iterator[tuple[str, QuantizedTensor, ModuleRecord]]:
    """Clip and round the linears of a group; the modules keep the rounded weights."""
    inputs, scheme = work.inputs[group[0]], work.schemes[group[0]]
    weights = [work.linear(name).weight.clone() for name in group]
    factor = factorize(inputs.hessian) if recipe.solve else None
    if factor is not None:
        assert isinstance(inputs, SolveInputs)
        with exact_products():
            weights = retarget(
                weights, inputs.hessian, inputs.tokens, inputs.drift, inputs.shortfall
            )
    factors = [
        _range_factors(work, name, weight, recipe)
        for name, weight in zip(group, weights, strict=True)
    ]
    input_scale = _input_scale(inputs, scheme, work.dtype)
    tensors = [
        quantize_rtn(weight, scheme, work.dtype, factor, input_scale)
        for weight, factor in zip(weights, factors, strict=True)
    ]
    outcomes = [Outcome(tensor) for tensor in tensors]
    if recipe.solve:
        with exact_products():
            outcomes = solve_group(weights, tensors, inputs.hessian, factor)
    for name, weight, outcome in zip(group, weights, outcomes, strict=True):
        work.linear(name).weight.copy_(outcome.tensor.dequantize())
        record = _record(work, name, recipe, weight, outcome)
        yield name, outcome.tensor, record


def _range_factors(work: Workspace, name: str, weight: Tensor, recipe: Recipe) -> Tensor | None:
    """Factors of the ranges of a linear's blocks; ``None`` where they are those of the weights."""
    scheme, hessian = work.schemes[name], work.inputs[name].hessian
    if scheme.type == "float":
        return search_octave(weight, scheme, work.dtype, hessian)
    if not recipe.clip or name in work.family.unclipped:
        return None
    if scheme.strategy not in ("channel", "group"):
        return None
    return search_clip(weight, hessian, scheme, work.dtype)


def _input_scale(inputs: Inputs, scheme: WeightScheme, dtype: torch.dtype) -> Tensor | None:
    """Static scale [1] of an input in the stored dtype; ``None`` if it is measured at run time."""
    if scheme.activations is None or scheme.activations.dynamic:
        return None
    scale = scale_of(inputs.peak.max(), scheme.activations)
    return scale.clamp(min=affine.MIN_SCALE).to(dtype).reshape(1)


def _record(
    work: Workspace, name: str, recipe: Recipe, weight: Tensor, outcome: Outcome
) -> ModuleRecord:
    tensor, inputs = outcome.tensor, work.inputs[name]
    error = outcome.output_error
    if error is None:
        error = awq.output_error(tensor.dequantize() - weight, inputs.hessian)
    power = awq.output_error(weight, inputs.hessian)
    record = replace(
        module_record(f"{work.block.prefix}.{name}", recipe.name, weight, tensor),
        output_error=float((error / power).sqrt()) if error > 0 else 0.0,
        tokens=inputs.tokens,
        regularization=outcome.remedy,
        fallback=outcome.fallback,
    )
    if outcome.fallback is not None:
        record = replace(record, used=f"{tensor.scheme.describe()} rtn")
    strength = work.strengths.get(name, 0.0)
    if recipe.smoothing == "awq":
        return replace(record, awq_ratio=strength)
    return record if recipe.smoothing is None else replace(record, smoothquant_strength=strength)
