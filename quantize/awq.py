"""Activation-aware weight quantization (Lin et al. 2023) as pure functions.

An input channel that is large on average is multiplied into a finer part of the grid before
rounding and divided out again (section 3.2), by what lowers the output error on calibration data.
The clip that follows is :func:`qtool.quantize.ranges.search_clip`.
"""

from __future__ import annotations

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
