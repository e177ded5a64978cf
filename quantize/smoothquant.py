"""SmoothQuant (Xiao et al. 2023) as pure functions: share out the range of input and weight.

An input channel's range is divided by ``s = peak_x^a / peak_w^(1 - a)`` (equation 4) and the
weight's column multiplied by it, so that a few loud channels do not take all steps of the
input's grid. The strength ``a`` is searched by output error; identity is always a candidate.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from qtool.quantize.smoothing import ScaleChoice, choose_scales

# The paper's 0.5 suits OPT, 0.8 to 0.85 Llama; the grid covers all of them.
STRENGTHS = tuple(step / 20 for step in range(4, 20))

# Floor of a peak: a nearly silent channel or column must not be scaled into nothing.
MIN_PEAK = 1e-5


def smoothing_scales(peak: Tensor, weight_peak: Tensor, strength: float) -> Tensor:
    """Scales [K] of an input with largest magnitudes ``peak`` [K], its weights' ``weight_peak``.

    A channel that never fired has scale 1: nothing is known of its range.
    """
    fired = peak > 0
    if not fired.any():
        return torch.ones_like(peak)
    scales = peak.clamp(min=MIN_PEAK).pow(strength)
    scales = scales / weight_peak.clamp(min=MIN_PEAK).pow(1 - strength)
    center = (scales[fired].max() * scales[fired].min()).sqrt()
    return torch.where(fired, scales / center, torch.ones_like(scales))


def search_scales(
    peak: Tensor, weight_peak: Tensor, loss: Callable[[Tensor], float]
) -> ScaleChoice:
    """The scales of the grid with the smallest loss; identity wins ties and non-finite losses.

    Args:
        peak: largest \\|x\\| per channel, float32 [K].
        weight_peak: largest \\|w\\| per column, over all weights that read the input, [K].
        loss: output error of the parent module with input and weights rounded under scales [K].
    """
    candidates = ((a, smoothing_scales(peak, weight_peak, a)) for a in STRENGTHS)
    return choose_scales(torch.ones_like(peak), candidates, loss)
