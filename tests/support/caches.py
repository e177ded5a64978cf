"""What a quantized cache holds, worked out number by number in float64."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import c_float
from functools import partial

import torch
from torch import Tensor

from qtool.runtime.kv_schemes import Stored


def _single(value: float) -> float:
    """Rounded to float32."""
    return c_float(value).value


def _half(value: float) -> float:
    """Rounded to float16."""
    return float(torch.tensor(_single(value)).half())


def _symmetric(values: list[float], stored: Stored) -> list[float]:
    largest = 448.0 if stored.type == "float" else 127.0
    return _codes8(values, max(_half(max(map(abs, values)) / largest), 2.0**-24), stored)


def _codes8(values: list[float], scale: float, stored: Stored) -> list[float]:
    scaled = [_single(value / scale) for value in values]
    if stored.type == "float":
        clipped = torch.tensor([min(max(value, -448.0), 448.0) for value in scaled])
        return [code * scale for code in clipped.to(torch.float8_e4m3fn).float().tolist()]
    return [min(max(round(value), -127), 127) * scale for value in scaled]


def _asymmetric(values: list[float]) -> list[float]:
    low = _half(min(values))
    scale = max(_half(_single(max(values) - low) / 15), 2.0**-24)
    steps = [_single(_single(value - low) / scale) for value in values]
    return [min(max(round(step), 0), 15) * scale + low for step in steps]


def _over(x: Tensor, round_trip: Callable[[list[float]], list[float]]) -> Tensor:
    """A function of lists over the last dimension."""
    rows = [round_trip(row) for row in x.flatten(0, -2).tolist()]
    return torch.tensor(rows, dtype=torch.float64).view(x.shape)


def ref_stored(pages: Tensor, stored: Stored, scale: Tensor | None = None) -> Tensor:
    """Float32 pages [n, tokens, heads, head_dim] as they come back, float64."""
    head_dim = pages.shape[-1]
    if stored.sharing == "checkpoint":
        assert scale is not None
        scales = scale.expand(pages.shape[2], 1)
        heads = [
            _over(pages[:, :, head], partial(_codes8, scale=float(factor), stored=stored))
            for head, factor in enumerate(scales)
        ]
        return torch.stack(heads, dim=2)
    if stored.sharing == "head":
        return _over(pages, partial(_symmetric, stored=stored))
    if stored.sharing == "group":
        width = 64 if head_dim % 64 == 0 else head_dim
        return _over(pages.unflatten(-1, (-1, width)), _asymmetric).flatten(-2)
    return _over(pages.movedim(1, -1), _asymmetric).movedim(-1, 1)
