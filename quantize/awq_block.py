"""AWQ on one decoder block: observe, search scales pair by pair, fold, clip, round.

The block's module is the workspace: folding rewrites it in place without changing what it
computes, and at the end its linears hold the rounded weights, so that the walk hands their
error on to the next block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from qtool.calibration.families import K, ModelFamily, Q, SmoothingPair, head_dim
from qtool.calibration.observers import EveryNth, Hessian, MeanAbs
from qtool.calibration.walk import DecoderBlock
from qtool.calibration.weights import to_stored
from qtool.formats.scheme import WeightScheme
from qtool.formats.tensor import QuantizedTensor
from qtool.quantize import awq, smoothing
from qtool.quantize.job import Job, QuantizedBlock
from qtool.quantize.report import ModuleRecord, module_record
from qtool.quantize.rtn import quantize_rtn

# Tokens on which attention and MLP judge scales, spread evenly over the samples; linear parents
# use all tokens through the second moment. Four times as many gave SmolLM2 the same KL (.115).
SEARCH_TOKENS = 512

# Rotary embeddings and the softmax make the output of q and k sensitive to their largest
# weights; the paper's code leaves them unclipped too.
UNCLIPPED = (Q, K)


@dataclass(slots=True)
class _Inputs:
    """Statistics of the input that the linears of one group share; folding keeps them true."""

    mean_abs: Tensor
    hessian: Tensor
    sample: Tensor
    tokens: int
    ratio: float = 0.0


@dataclass(frozen=True, slots=True)
class _Workspace:
    """A block being smoothed, with what all steps need."""

    block: DecoderBlock
    family: ModelFamily
    inputs: Mapping[str, _Inputs]
    schemes: Mapping[str, WeightScheme]
    dtype: torch.dtype
    head_dim: int

    def may_smooth(self, pair: SmoothingPair) -> bool:
        """Smoothing serves quantized targets, and changes no linear that stays as it was."""
        source_is_ignored = pair.source in self.family.linears and pair.source not in self.schemes
        return not source_is_ignored and set(pair.targets) <= self.schemes.keys()

    def linear(self, name: str) -> nn.Linear:
        module = self.block.module.get_submodule(name)
        assert isinstance(module, nn.Linear)
        return module

    def scaled_and_rounded(self, name: str, scales: Tensor) -> Tensor:
        """What a linear's weight would become under input scales [in_features]."""
        weight, scheme = self.linear(name).weight, self.schemes[name]
        return awq.round_scaled(weight, scales, scheme, self.dtype)


def awq_blocks(job: Job) -> Iterator[QuantizedBlock]:
    """All blocks of a job, smoothed, clipped and rounded."""
    for block in job.blocks():
        yield quantize_block(block, job)


def quantize_block(block: DecoderBlock, job: Job) -> QuantizedBlock:
    """One block; its module is left with the rounded weights."""
    schemes = job.schemes_of(block.prefix)
    inputs = _observe(block, job.family, schemes)
    work = _Workspace(block, job.family, inputs, schemes, job.dtype, head_dim(job.reader.config))
    for pair in job.family.pairs:
        if work.may_smooth(pair):
            _smooth(work, pair)
    changed = _store_changes(work)
    weights, records = {}, []
    for name in schemes:
        weights[f"{block.prefix}.{name}"], record = _round(work, name)
        records.append(record)
    return QuantizedBlock(weights, tuple(records), changed)


def _observe(
    block: DecoderBlock, family: ModelFamily, schemes: Mapping[str, WeightScheme]
) -> dict[str, _Inputs]:
    """Statistics by quantized linear; linears of a group, quantized alike, share one object."""
    first = {group[0]: group for group in family.linear_groups if group[0] in schemes}
    if not first:
        return {}
    stride = max(1, block.num_tokens // SEARCH_TOKENS)
    observers = {name: (MeanAbs(name), Hessian(name), EveryNth(name, stride)) for name in first}
    block.observe(observers)
    shared = {}
    for name, (mean_abs, hessian, sample) in observers.items():
        inputs = _Inputs(mean_abs.result(), hessian.result(), sample.result(), hessian.tokens)
        shared.update(dict.fromkeys(first[name], inputs))
    return shared


def _smooth(work: _Workspace, pair: SmoothingPair) -> None:
    """Search the scales of one pair and fold them into the block."""
    inputs = work.inputs[pair.targets[0]]
    source = work.block.module.get_submodule(pair.source)
    mean_abs = inputs.mean_abs
    num_channels = mean_abs.numel()
    if pair.shares_heads:
        num_values = work.linear(pair.source).out_features
        mean_abs = smoothing.tie_over_query_group(mean_abs, work.head_dim, num_values)

    def spread(scales: Tensor) -> Tensor:
        if not pair.shares_heads:
            return scales
        return smoothing.spread_over_query_group(scales, work.head_dim, num_channels)

    loss = _pair_loss(work, pair)
    choice = awq.search_scales(mean_abs, lambda scales: loss(spread(scales)))
    if choice.ratio == 0:
        return
    scales = _divide_source(source, choice.scales, work)
    inputs.ratio = choice.ratio
    inputs.hessian = smoothing.rescale_hessian(inputs.hessian, spread(scales))
    inputs.mean_abs = inputs.mean_abs / spread(scales)
    for target in pair.targets:
        linear = work.linear(target)
        linear.weight.copy_(smoothing.multiply_columns(linear.weight, spread(scales)))


def _divide_source(source: nn.Module, scales: Tensor, work: _Workspace) -> Tensor:
    """Fold into a linear or a norm; returns the scales the stored source really divides by."""
    if isinstance(source, nn.Linear):
        weight, bias = smoothing.divide_rows(source.weight, source.bias, scales)
        source.weight.copy_(weight)
        if bias is not None:
            source.bias.copy_(bias)
        return scales
    weight, exact = smoothing.divide_norm(
        source.get_parameter("weight"), scales, work.family.norm_offset, work.dtype
    )
    source.get_parameter("weight").copy_(weight)
    return exact


def _pair_loss(work: _Workspace, pair: SmoothingPair) -> Callable[[Tensor], float]:
    """Output error of the pair's parent as a function of the targets' input scales."""
    if (pair.parent,) == pair.targets:
        return _linear_loss(work, pair.parent)
    return _module_loss(work, pair)


def _linear_loss(work: _Workspace, name: str) -> Callable[[Tensor], float]:
    weight, hessian = work.linear(name).weight, work.inputs[name].hessian

    def loss(scales: Tensor) -> float:
        return float(awq.output_error(work.scaled_and_rounded(name, scales) - weight, hessian))

    return loss


def _parent_inputs(work: _Workspace, pair: SmoothingPair) -> tuple[Tensor, dict[str, Any]]:
    """About ``SEARCH_TOKENS`` tokens of the parent's input, and its other arguments."""
    if not pair.mixes_tokens:
        return work.inputs[pair.targets[0]].sample, {}
    num_samples = work.block.inputs.shape[0]
    stride = min(num_samples, max(1, work.block.num_tokens // SEARCH_TOKENS))
    return work.block.capture(pair.parent, range(stride // 2, num_samples, stride))


def _module_loss(work: _Workspace, pair: SmoothingPair) -> Callable[[Tensor], float]:
    parent = work.block.module.get_submodule(pair.parent)
    hidden, arguments = _parent_inputs(work, pair)
    local = {f"{name.removeprefix(f'{pair.parent}.')}.weight": name for name in pair.targets}

    def run(weights: dict[str, Tensor]) -> Tensor:
        output = functional_call(parent, weights, (hidden,), arguments)
        result: Tensor = output[0] if isinstance(output, tuple) else output
        return result

    exact = run({})

    def loss(scales: Tensor) -> float:
        rounded = {key: work.scaled_and_rounded(name, scales) for key, name in local.items()}
        return float((run(rounded) - exact).square().mean())

    return loss


def _store_changes(work: _Workspace) -> dict[str, Tensor]:
    """What is not a quantized weight, rounded to the stored dtype, in the block and returned."""
    quantized = {f"{name}.weight" for name in work.schemes}
    changed = {}
    for name, tensor in work.block.module.state_dict().items():
        if name not in quantized:
            full_name = f"{work.block.prefix}.{name}"
            changed[full_name] = to_stored(full_name, tensor, work.dtype).cpu()
            tensor.copy_(changed[full_name])
    return changed


def _round(work: _Workspace, name: str) -> tuple[QuantizedTensor, ModuleRecord]:
    """Clip and round one linear; the module keeps the rounded weight."""
    linear, inputs = work.linear(name), work.inputs[name]
    weight, scheme = linear.weight.clone(), work.schemes[name]
    clip = None
    if name not in UNCLIPPED:
        clip = awq.search_clip(weight, inputs.hessian, scheme, work.dtype)
    quantized = quantize_rtn(weight, scheme, work.dtype, clip)
    linear.weight.copy_(quantized.dequantize())
    error = awq.output_error(linear.weight - weight, inputs.hessian)
    power = awq.output_error(weight, inputs.hessian)
    record = replace(
        module_record(f"{work.block.prefix}.{name}", "awq", weight, quantized),
        output_error=float((error / power).sqrt()) if error > 0 else 0.0,
        tokens=inputs.tokens,
        awq_ratio=inputs.ratio,
    )
    return quantized, record
