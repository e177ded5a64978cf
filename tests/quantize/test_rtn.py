"""Round to nearest against a plain loop over numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from qtool.formats.scheme import WeightScheme
from qtool.quantize.rtn import quantize_rtn


def _ref_group(
    values: list[float], bits: int, symmetric: bool, dtype: torch.dtype
) -> tuple[list[float], list[int]]:
    """Dequantized values and codes of one group, straight from the definition.

    In float32 scalars, because the largest weight of a symmetric group lies on a tie.
    """
    numbers = [np.float32(value) for value in values]
    high, low = max(np.float32(0), *numbers), min(np.float32(0), *numbers)
    levels = 2**bits
    if high == low == 0:
        return [0.0] * len(values), [levels // 2 if symmetric else 0] * len(values)
    steps = np.float32((levels - 1) / 2 if symmetric else levels - 1)
    span = (max(high, -low) if symmetric else high - low) / steps
    scale = np.float32(torch.tensor(max(span, np.float32(1e-5))).to(dtype).item())
    zero = levels // 2 if symmetric else min(max(round(-low / scale), 0), levels - 1)
    codes = [min(max(round(value / scale) + zero, 0), levels - 1) for value in numbers]
    return [float(scale * np.float32(code - zero)) for code in codes], codes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("bits", "symmetric", "group_size"),
    [(4, False, 8), (4, True, 8), (8, True, 16), (4, False, None), (8, True, None)],
)
def test_every_code_is_the_one_a_plain_loop_computes(
    bits: int, symmetric: bool, group_size: int | None, dtype: torch.dtype
) -> None:
    strategy = "channel" if group_size is None else "group"
    scheme = WeightScheme(bits, symmetric, strategy, group_size)
    weight = torch.randn(6, 48, generator=torch.Generator().manual_seed(bits))
    weight[1, :24] = 0
    weight[2] = weight[2].abs()
    weight[3] *= 1e-6
    quantized = quantize_rtn(weight, scheme, dtype)
    span = group_size or 48
    for row in range(6):
        for start in range(0, 48, span):
            values = weight[row, start : start + span].tolist()
            expected, codes = _ref_group(values, bits, symmetric, dtype)
            found = quantized.dequantize()[row, start : start + span]
            torch.testing.assert_close(found, torch.tensor(expected), rtol=1e-6, atol=1e-9)
            assert quantized.codes[row, start : start + span].tolist() == codes
    assert quantized.scales.dtype == dtype


def test_a_clip_narrows_the_grid_and_leaves_the_weight_alone() -> None:
    scheme = WeightScheme(4, False, "group", 16)
    weight = torch.randn(4, 32, generator=torch.Generator().manual_seed(0))
    before = weight.clone()
    whole = quantize_rtn(weight, scheme, torch.float32)
    half = quantize_rtn(weight, scheme, torch.float32, torch.full((4, 2), 0.5))
    torch.testing.assert_close(half.scales, whole.scales / 2)
    assert torch.equal(weight, before)
