"""Rotary position embedding (Su et al. 2021, section 3.2), halves-rotated as in Llama."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from qtool.runtime.config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Angle per position of each pair of channels, float32 [head_dim / 2]."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        return _llama3(frequencies, rope)
    return frequencies


def _llama3(frequencies: Tensor, rope: RopeConfig) -> Tensor:
    """Llama 3.1's scaling: long waves slowed by ``factor``, short ones kept, a ramp between."""
    wavelengths = 2 * math.pi / frequencies
    turns = rope.original_max_position / wavelengths
    ramp = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    keep = ramp.clamp(0, 1)
    return (1 - keep) * frequencies / rope.factor + keep * frequencies


class Rotary:
    """Cosines and sines of every position, computed once.

    Attributes:
        cos, sin: [max_position, head_dim], halves repeated, in the compute dtype.
    """

    def __init__(
        self,
        rope: RopeConfig,
        head_dim: int,
        max_position: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        positions = torch.arange(max_position, dtype=torch.float32)
        angles = torch.outer(positions, inverse_frequencies(rope, head_dim))
        angles = torch.cat((angles, angles), dim=-1)
        self.cos = angles.cos().to(device, dtype)
        self.sin = angles.sin().to(device, dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate heads x [T, H, D] by the angles of their tokens, cos and sin [T, D]."""
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos.unsqueeze(1) + turned * sin.unsqueeze(1)
