"""Rotary position embedding (Su et al. 2021, section 3.2), halves-rotated as in Llama."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qtool.runtime.rope_config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int, length: int) -> Tensor:
    """Angle per position of each pair of channels, float32 [rotary_dim / 2].

    Args:
        length: the longest sequence that will run. ``dynamic`` and ``longrope`` choose by it, once
            for all sequences: keys in the cache must stay what they are while a sequence grows.
    """
    dim = rope.rotary_dim(head_dim)
    exponents = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
    theta = _dynamic_theta(rope, dim, length) if rope.kind == "dynamic" else rope.theta
    frequencies: Tensor = 1.0 / (theta**exponents)
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        return _llama3(frequencies, rope)
    if rope.kind == "yarn":
        return _yarn(frequencies, rope, dim)
    if rope.kind == "longrope":
        factors = rope.long_factor if length > rope.original_max_position else rope.short_factor
        return frequencies / torch.tensor(factors, dtype=torch.float32)
    return frequencies


def _dynamic_theta(rope: RopeConfig, dim: int, length: int) -> float:
    """NTK-aware base for a length beyond the original (Peng et al. 2023, section 3.1 and 3.3)."""
    stretch = max(length, rope.original_max_position) / rope.original_max_position
    return float(rope.theta * (rope.factor * stretch - (rope.factor - 1)) ** (dim / (dim - 2)))


def _llama3(frequencies: Tensor, rope: RopeConfig) -> Tensor:
    """Llama 3.1's scaling: long waves slowed by ``factor``, short ones kept, a ramp between."""
    wavelengths = 2 * math.pi / frequencies
    turns = rope.original_max_position / wavelengths
    ramp = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    keep = ramp.clamp(0, 1)
    return (1 - keep) * frequencies / rope.factor + keep * frequencies


def _yarn(frequencies: Tensor, rope: RopeConfig, dim: int) -> Tensor:
    """YaRN (Peng et al. 2023, section 3.2): pairs that turn often are kept, a ramp over pairs."""

    def pair_of(turns: float) -> float:
        """The pair that turns so often within the original length, as a real number."""
        wavelength = rope.original_max_position / (turns * 2 * math.pi)
        return dim * math.log(wavelength) / (2 * math.log(rope.theta))

    first, last = pair_of(rope.beta_fast), pair_of(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    width = last - first if last != first else 0.001
    scaled = ((torch.arange(dim // 2, dtype=torch.float32) - first) / width).clamp(0, 1)
    return frequencies / rope.factor * scaled + frequencies * (1 - scaled)


@dataclass(frozen=True, slots=True)
class RotaryRows:
    """Cosines and sines of a batch's rows, [T, rotary_dim]."""

    cos: Tensor
    sin: Tensor


class Rotary:
    """Cosines and sines of every position, computed once.

    Args:
        rope: base and scaling.
        head_dim: channels of a head.
        length: the longest sequence, see :func:`inverse_frequencies`.

    Attributes:
        cos, sin: [length, rotary_dim], halves repeated, in the compute dtype.
    """

    def __init__(
        self,
        rope: RopeConfig,
        head_dim: int,
        length: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        positions = torch.arange(length, dtype=torch.float32)
        angles = torch.outer(positions, inverse_frequencies(rope, head_dim, length))
        angles = torch.cat((angles, angles), dim=-1)
        self.cos = (angles.cos() * rope.attention_factor).to(device, dtype)
        self.sin = (angles.sin() * rope.attention_factor).to(device, dtype)

    def rows(self, positions: Tensor) -> RotaryRows:
        """The entries of ``positions``, int64 [T]."""
        return RotaryRows(self.cos[positions], self.sin[positions])


def rotate(x: Tensor, rows: RotaryRows | None) -> Tensor:
    """Rotate heads x [T, H, D] by the angles of their tokens; channels behind these stay.

    Args:
        rows: ``None`` where a layer's heads are not rotated.
    """
    if rows is None:
        return x
    width = rows.cos.shape[-1]
    turning, rest = x[..., :width], x[..., width:]
    half = width // 2
    turned = torch.cat((-turning[..., half:], turning[..., :half]), dim=-1)
    rotated = turning * rows.cos.unsqueeze(1) + turned * rows.sin.unsqueeze(1)
    return torch.cat((rotated, rest), dim=-1) if rest.shape[-1] else rotated


def scaling_notes(ropes: Sequence[RopeConfig], length: int) -> tuple[str, ...]:
    """What a model's scalings do to every sequence, where they depend on the longest one."""
    notes = []
    for rope in ropes:
        beyond = length > rope.original_max_position
        if beyond and rope.kind in ("dynamic", "longrope"):
            notes.append(
                f"{rope.kind} rotary scaling for sequences of up to {length} tokens applies to "
                f"all, short ones too; with a max_model_len of {rope.original_max_position} or "
                "less the model runs as it was trained"
            )
    return tuple(notes)
