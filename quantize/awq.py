"""Activation-aware weight quantization (Lin et al. 2023) as pure functions.

Two searches. Scales: an input channel that is large on average is multiplied into a finer part
of the grid before rounding and divided out again (section 3.2). Clip: a group's range is shrunk
where that lowers the error of its output. Both are judged by output error on calibration data,
never by weight error.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from qtool.calibration.products import exact_products
from qtool.formats import affine
from qtool.formats.scheme import WeightScheme
from qtool.formats.tensor import round_to_grid
from qtool.quantize.smoothing import ScaleChoice, choose_scales

# The paper's grid: exponents 0, 1/20, ... 19/20 of the mean magnitude.
NUM_RATIOS = 20

# Floor of a scale: a nearly silent channel must not be multiplied into nothing.
MIN_SCALE = 1e-4

# A range is shrunk at most to 11/20, where the paper's search ends too.
NUM_CLIP_STEPS = 10
CLIP_STEP = 1 / 20


def smoothing_scales(mean_abs: Tensor, ratio: float) -> Tensor:
    """Scales ``mean_abs ** ratio``, normalized so that largest times smallest is 1.

    A channel that never fired has scale 1: its weights keep their precision for the day it does.
    """
    fired = mean_abs > 0
    if ratio == 0 or not fired.any():
        return torch.ones_like(mean_abs)
    scales = mean_abs.pow(ratio).clamp(min=MIN_SCALE)
    center = (scales[fired].max() * scales[fired].min()).sqrt()
    return torch.where(fired, scales / center, torch.ones_like(scales))


def search_scales(mean_abs: Tensor, loss: Callable[[Tensor], float]) -> ScaleChoice:
    """The scales of the grid with the smallest loss; identity wins ties and non-finite losses.

    Args:
        mean_abs: mean of \\|x\\| per channel, float32 [K].
        loss: output error of the parent module with weights rounded under given scales [K].
    """
    ratios = [step / NUM_RATIOS for step in range(1, NUM_RATIOS)]
    candidates = ((ratio, smoothing_scales(mean_abs, ratio)) for ratio in ratios)
    return choose_scales(smoothing_scales(mean_abs, 0), candidates, loss)


def round_scaled(
    weight: Tensor, scales: Tensor, scheme: WeightScheme, scale_dtype: torch.dtype
) -> Tensor:
    """What a weight [N, K] becomes if its columns are scaled, rounded and scaled back."""
    scaled = weight * scales
    grid = affine.choose_grid(scaled, scheme, scale_dtype)
    return round_to_grid(scaled, *grid, scheme) / scales


def output_error(delta: Tensor, hessian: Tensor) -> Tensor:
    """``tr(delta H delta^T)``: squared output error per token of a weight change [N, K].

    Exact for a linear layer, and independent of the number of tokens behind ``hessian`` [K, K].
    """
    with exact_products():
        return ((delta @ hessian) * delta).sum()


def search_clip(
    weight: Tensor, hessian: Tensor, scheme: WeightScheme, scale_dtype: torch.dtype
) -> Tensor:
    """Shrink factor of each group's range with the smallest error of the group's output.

    Groups are judged one by one, by the diagonal blocks of the second moment; all rows and
    groups are searched at once.

    Args:
        weight: [N, K], float32.
        hessian: second moment of the input, [K, K].
        scheme: one scale a row or a group.
        scale_dtype: dtype the scales are stored in.

    Returns:
        float32 [N, K / group], in [1 - 9/20, 1].
    """
    moments = _diagonal_blocks(hessian, scheme.block_shape((1, weight.shape[1]))[1])
    clip = torch.ones(scheme.grid_shape((weight.shape[0], weight.shape[1])), device=weight.device)
    best_loss = torch.full_like(clip, math.inf)
    best_clip = clip
    for step in range(NUM_CLIP_STEPS):
        candidate = clip * (1 - step * CLIP_STEP)
        grid = affine.choose_grid(weight, scheme, scale_dtype, candidate)
        delta = affine.to_blocks(round_to_grid(weight, *grid, scheme) - weight, scheme)
        loss = _group_errors(delta, moments)
        better = loss < best_loss
        best_loss = torch.where(better, loss, best_loss)
        best_clip = torch.where(better, candidate, best_clip)
    return best_clip


def _diagonal_blocks(hessian: Tensor, size: int) -> Tensor:
    """[K, K] -> its diagonal blocks [K / size, size, size]."""
    count = hessian.shape[0] // size
    grid = hessian.reshape(count, size, count, size)
    return grid.diagonal(dim1=0, dim2=2).permute(2, 0, 1)


def _group_errors(delta: Tensor, moments: Tensor) -> Tensor:
    """delta [N, G, g] and moments [G, g, g] -> output error of every group [N, G]."""
    by_group = delta.transpose(0, 1)
    with exact_products():
        return ((by_group @ moments) * by_group).sum(-1).t()
