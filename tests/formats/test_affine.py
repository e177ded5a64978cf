"""The affine grid against a plain loop in float64, and what must hold for every weight."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qtool.errors import UsageError
from qtool.formats import affine
from qtool.formats.scheme import WeightScheme
from qtool.formats.tensor import QuantizedTensor, concatenate_rows, round_to_grid

SCHEMES = [
    WeightScheme(4, False, "group", 32),
    WeightScheme(4, True, "group", 32),
    WeightScheme(4, False, "channel", None),
    WeightScheme(8, True, "channel", None),
    WeightScheme(8, True, "group", 16),
    WeightScheme(4, False, "tensor", None),
    WeightScheme(4, True, "tensor", None),
]


def _make_weight(rows: int = 6, columns: int = 64, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator)


def _quantize(weight: torch.Tensor, scheme: WeightScheme, dtype: torch.dtype) -> QuantizedTensor:
    scales, zeros = affine.choose_grid(weight, scheme, dtype)
    return QuantizedTensor(affine.quantize(weight, scales, zeros, scheme), scales, zeros, scheme)


def _ref_dequantize(tensor: QuantizedTensor) -> torch.Tensor:
    """Weight by weight: find its block, apply scale * (code - zero)."""
    rows, columns = tensor.shape
    block_rows, block_columns = tensor.scheme.block_shape(tensor.shape)
    out = torch.empty(rows, columns, dtype=torch.float64)
    for n in range(rows):
        for k in range(columns):
            i, j = n // block_rows, k // block_columns
            code, zero = int(tensor.codes[n, k]), int(tensor.zeros[i, j])
            out[n, k] = float(tensor.scales[i, j]) * (code - zero)
    return out


@pytest.mark.parametrize("scheme", SCHEMES, ids=WeightScheme.describe)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dequantize_equals_the_plain_loop(scheme: WeightScheme, dtype: torch.dtype) -> None:
    tensor = _quantize(_make_weight(), scheme, dtype)
    assert torch.equal(tensor.dequantize(), _ref_dequantize(tensor).float())


@pytest.mark.parametrize("scheme", SCHEMES, ids=WeightScheme.describe)
def test_every_weight_is_within_one_step_of_its_grid(scheme: WeightScheme) -> None:
    weight = _make_weight(seed=1)
    tensor = _quantize(weight, scheme, torch.float32)
    steps = affine.from_blocks(
        tensor.scales.unsqueeze(-1).expand(affine.to_blocks(weight, scheme).shape),
        scheme,
        tensor.shape,
    )
    error = (tensor.dequantize() - weight).abs()
    # Half a step, and at the ends of the grid what rounding of the zero and the half step
    # outside a symmetric grid add.
    assert bool((error <= 1.001 * steps).all())
    assert float((error / steps).median()) < 0.5


@pytest.mark.parametrize("scheme", SCHEMES, ids=WeightScheme.describe)
def test_quantizing_a_dequantized_weight_changes_no_code(scheme: WeightScheme) -> None:
    tensor = _quantize(_make_weight(seed=2), scheme, torch.bfloat16)
    again = affine.quantize(tensor.dequantize(), tensor.scales, tensor.zeros, scheme)
    assert torch.equal(again, tensor.codes)


@pytest.mark.parametrize("scheme", SCHEMES, ids=WeightScheme.describe)
def test_an_all_zero_block_has_scale_one_and_dequantizes_to_zero(scheme: WeightScheme) -> None:
    weight = torch.zeros(6, 64)
    if scheme.strategy != "tensor":
        weight[1:] = _make_weight(5)
    tensor = _quantize(weight, scheme, torch.float16)
    assert float(tensor.scales[0, 0]) == 1
    assert bool((tensor.dequantize()[0] == 0).all())


def test_tiny_weights_do_not_underflow_the_scale() -> None:
    weight = _make_weight() * 1e-12
    tensor = _quantize(weight, SCHEMES[0], torch.float16)
    assert float(tensor.scales.min()) >= 0.99 * affine.MIN_SCALE
    assert bool(tensor.dequantize().isfinite().all())


@pytest.mark.parametrize("sign", [1, -1])
def test_a_block_of_one_sign_keeps_its_range(sign: int) -> None:
    weight = sign * (_make_weight().abs() + 1)
    tensor = _quantize(weight, SCHEMES[0], torch.float32)
    assert float((tensor.dequantize() - weight).abs().max()) <= 0.51 * float(tensor.scales.max())


def test_clip_shrinks_the_range_of_its_block_only() -> None:
    weight = _make_weight()
    clip = torch.ones(6, 2)
    clip[2, 1] = 0.5
    plain, _ = affine.choose_grid(weight, SCHEMES[0], torch.float32)
    clipped, _ = affine.choose_grid(weight, SCHEMES[0], torch.float32, clip)
    expected = plain.clone()
    expected[2, 1] *= 0.5
    torch.testing.assert_close(clipped, expected)


@pytest.mark.parametrize("scheme", SCHEMES, ids=WeightScheme.describe)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_short_way_to_the_grid_equals_the_long_one(
    scheme: WeightScheme, dtype: torch.dtype
) -> None:
    weight = 3 * _make_weight(seed=9)
    # A narrow grid, so that both of its ends are met.
    scales, zeros = affine.choose_grid(weight / 2, scheme, dtype)
    codes = affine.quantize(weight, scales, zeros, scheme)
    expected = affine.dequantize(codes, scales, zeros, scheme)
    assert torch.equal(round_to_grid(weight, scales, zeros, scheme), expected)


def test_codes_are_computed_from_the_stored_scale() -> None:
    """With the unrounded scale some codes differ: the file would hold another grid's codes."""
    weight = _make_weight(64, 256, seed=3)
    scheme = WeightScheme(4, False, "group", 32)
    scales, zeros = affine.choose_grid(weight, scheme, torch.bfloat16)
    stored = round_to_grid(weight, scales, zeros, scheme)
    wide, wide_zeros = affine.choose_grid(weight, scheme, torch.float32)
    mismatched = affine.dequantize(
        affine.quantize(weight, wide, wide_zeros, scheme), scales, zeros, scheme
    )
    assert (stored - weight).norm() < (mismatched - weight).norm()


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 7),
    groups=st.integers(1, 5),
    group_size=st.sampled_from([1, 2, 5, 16, 32]),
    bits=st.sampled_from([4, 8]),
    seed=st.integers(0, 2**16),
)
def test_blocks_round_trip_and_codes_fit(
    rows: int, groups: int, group_size: int, bits: int, seed: int
) -> None:
    scheme = WeightScheme(bits, bits == 8, "group", group_size)
    weight = _make_weight(rows, groups * group_size, seed)
    assert torch.equal(
        affine.from_blocks(affine.to_blocks(weight, scheme), scheme, (rows, weight.shape[1])),
        weight,
    )
    tensor = _quantize(weight, scheme, torch.float32)
    assert int(tensor.codes.max()) <= scheme.max_code
    assert tuple(tensor.scales.shape) == (rows, groups)


def test_a_group_size_that_does_not_divide_a_row_is_refused() -> None:
    with pytest.raises(UsageError, match="group_size=48 does not divide a row of 64"):
        affine.choose_grid(_make_weight(), WeightScheme(4, False, "group", 48), torch.float32)


def test_stacking_rows_keeps_every_part() -> None:
    parts = [_quantize(_make_weight(rows, seed=rows), SCHEMES[0], torch.float32) for rows in (2, 5)]
    stacked = concatenate_rows(parts)
    assert torch.equal(stacked.dequantize(), torch.cat([part.dequantize() for part in parts]))
    other = _quantize(_make_weight(), SCHEMES[1], torch.float32)
    with pytest.raises(ValueError, match="one scheme whose scales stay within rows"):
        concatenate_rows([parts[0], other])


def test_a_tensor_with_a_grid_of_another_shape_is_refused() -> None:
    tensor = _quantize(_make_weight(), SCHEMES[0], torch.float32)
    with pytest.raises(ValueError, match=r"needs \(6, 2\)"):
        QuantizedTensor(tensor.codes, tensor.scales[:, :1], tensor.zeros[:, :1], tensor.scheme)
