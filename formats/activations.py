"""Rounding of a linear's input: the arithmetic of W8A8, the same for methods and back ends.

``input = scale * code``; scales are float32, ``absmax / 127.5`` for integers -128 .. 127 and
``absmax / 448`` for FP8, as compressed-tensors defines them. A span of zeros has scale 1.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from qtool.formats.scheme import BLOCK_SIZE, FLOAT8_MAX, ActivationScheme


def scale_of(peak: Tensor, scheme: ActivationScheme) -> Tensor:
    """Float32 scales for the largest magnitudes ``peak``, of any shape, as far as the bound."""
    peak = peak.float() if scheme.bound is None else peak.float().clamp(max=scheme.bound)
    return torch.where(peak > 0, peak / scheme.steps, torch.ones_like(peak))


def round_input(x: Tensor, scheme: ActivationScheme, static: Tensor | None = None) -> Tensor:
    """Float32 input [..., K] after one trip through 8 bits.

    Args:
        x: [..., K], any floating dtype.
        scheme: type of the codes and what shares a scale.
        static: the checkpoint's scale [1], for a static scheme only. Values beyond its range
            saturate.
    """
    x = x.float()
    if scheme.strategy != "group":
        scale = scale_of(x.abs().amax(-1, keepdim=True), scheme) if static is None else static
        return _round(x, scale.float(), scheme)
    width = x.shape[-1]
    groups = functional.pad(x, (0, -width % BLOCK_SIZE)).unflatten(-1, (-1, BLOCK_SIZE))
    scale = scale_of(groups.abs().amax(-1, keepdim=True), scheme)
    return _round(groups, scale, scheme).flatten(-2)[..., :width]


def _round(x: Tensor, scale: Tensor, scheme: ActivationScheme) -> Tensor:
    steps = x / scale
    if scheme.type == "int":
        return steps.round_().clamp_(-128, 127).mul_(scale)
    codes = steps.clamp_(-FLOAT8_MAX, FLOAT8_MAX).to(torch.float8_e4m3fn)
    return codes.float().mul_(scale)
