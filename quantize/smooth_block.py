"""Search the smoothing scales of a block's pairs by output error, and fold them in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

from qtool.calibration.families import SmoothingPair
from qtool.formats.activations import round_input, scale_of
from qtool.quantize import awq, smoothquant
from qtool.quantize.recipe import Smoothing
from qtool.quantize.smoothing import ScaleChoice
from qtool.quantize.workspace import SEARCH_TOKENS, Workspace

Loss = Callable[[Tensor], float]


def smooth_block(work: Workspace, smoothing: Smoothing) -> None:
    """Smooth every pair of the block, in the family's order."""
    for pair in work.family.pairs:
        if not work.family.unquantized_sides(pair, work.schemes):
            choice = _search(work, pair, smoothing)
            if choice.ratio > 0:
                work.fold(pair, choice.scales)
            work.strengths |= dict.fromkeys(pair.targets, choice.ratio)


def _search(work: Workspace, pair: SmoothingPair, smoothing: Smoothing) -> ScaleChoice:
    inputs = work.searched(pair.targets[0])
    of_inputs = _pair_loss(work, pair)

    def loss(scales: Tensor) -> float:
        return of_inputs(work.spread(pair, scales))

    if smoothing == "awq":
        return awq.search_scales(work.tie(pair, inputs.mean_abs, "mean"), loss)
    peaks = [work.linear(target).weight.abs().amax(0) for target in pair.targets]
    weight_peak = torch.stack(peaks).amax(0)
    return smoothquant.search_scales(
        work.tie(pair, inputs.peak, "max"), work.tie(pair, weight_peak, "max"), loss
    )


def _pair_loss(work: Workspace, pair: SmoothingPair) -> Loss:
    """Output error of the pair's parent as a function of the targets' input scales."""
    if (pair.parent,) != pair.targets:
        return _module_loss(work, pair)
    if work.schemes[pair.parent].activations is None:
        return _weight_loss(work, pair.parent)
    return _linear_loss(work, pair.parent)


def _weight_loss(work: Workspace, name: str) -> Loss:
    """Of a linear whose input is exact: all tokens at once, through the second moment."""
    weight, hessian = work.linear(name).weight, work.inputs[name].hessian

    def loss(scales: Tensor) -> float:
        return float(awq.output_error(_rounded_weight(work, name, scales) - weight, hessian))

    return loss


def _linear_loss(work: Workspace, name: str) -> Loss:
    """Of a linear whose input is rounded too: on the sampled tokens."""
    sample = work.searched(name).sample
    exact = sample @ work.linear(name).weight.T

    def loss(scales: Tensor) -> float:
        output = _rounded_input(work, name, sample, scales) @ _rounded_weight(work, name, scales).T
        return float((output - exact).square().mean())

    return loss


def _module_loss(work: Workspace, pair: SmoothingPair) -> Loss:
    """Of attention or MLP as a whole, on sampled tokens."""
    parent = work.block.module.get_submodule(pair.parent)
    hidden, arguments = _parent_inputs(work, pair)
    local = {f"{name.removeprefix(f'{pair.parent}.')}.weight": name for name in pair.targets}

    def run(x: Tensor, weights: dict[str, Tensor]) -> Tensor:
        output = functional_call(parent, weights, (x,), arguments)
        result: Tensor = output[0] if isinstance(output, tuple) else output
        return result

    exact = run(hidden, {})

    def loss(scales: Tensor) -> float:
        weights = {key: _rounded_weight(work, name, scales) for key, name in local.items()}
        x = _rounded_input(work, pair.targets[0], hidden, scales)
        return float((run(x, weights) - exact).square().mean())

    return loss


def _parent_inputs(work: Workspace, pair: SmoothingPair) -> tuple[Tensor, dict[str, Any]]:
    """About ``SEARCH_TOKENS`` tokens of the parent's input, and its other arguments."""
    if not pair.mixes_tokens:
        return work.searched(pair.targets[0]).sample, {}
    num_samples = work.block.inputs.shape[0]
    stride = min(num_samples, max(1, work.block.num_tokens // SEARCH_TOKENS))
    return work.block.capture(pair.parent, range(stride // 2, num_samples, stride))


def _rounded_weight(work: Workspace, name: str, scales: Tensor) -> Tensor:
    """What a weight becomes if its columns are scaled by [K], rounded and scaled back."""
    return awq.round_scaled(work.linear(name).weight, scales, work.schemes[name], work.dtype)


def _rounded_input(work: Workspace, name: str, x: Tensor, scales: Tensor) -> Tensor:
    """What an input becomes if it is divided by [K], rounded and scaled back."""
    scheme = work.schemes[name].activations
    if scheme is None:
        return x
    static = None
    if not scheme.dynamic:
        static = scale_of((work.inputs[name].peak / scales).max(), scheme)
    return round_input(x / scales, scheme, static) * scales
