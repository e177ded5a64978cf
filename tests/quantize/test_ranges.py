"""Searched ranges against plain loops: clips of integer grids, octaves of float grids."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from qtool.calibration.products import rounded_products
from qtool.formats import affine
from qtool.formats.scheme import WeightScheme, fp8_scheme
from qtool.formats.tensor import round_to_grid
from qtool.quantize import ranges
from qtool.quantize.awq import output_error
from qtool.quantize.ranges import CLIP_FACTORS, OCTAVE_FACTORS, search_clip, search_octave
from qtool.quantize.rtn import quantize_rtn

SCHEME = WeightScheme(4, False, "group", 16)


def _problem(seed: int = 0, rows: int = 24, columns: int = 64) -> tuple[Tensor, Tensor]:
    """A weight [rows, columns] and inputs [200, columns] with a few loud channels."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator)
    x = torch.randn(200, columns, generator=generator)
    x[:, ::9] *= 20
    return weight, x


def test_losses_that_decide_are_exact_where_calibration_rounds_its_factors() -> None:
    """It may fail only on CPUs with instructions for bfloat16; others never round."""
    generator = torch.Generator().manual_seed(2)
    weight, inputs = (torch.randn(64, 256, generator=generator) for _ in range(2))
    hessian = inputs.T @ inputs

    def judged() -> tuple[Tensor, Tensor]:
        clip = search_clip(weight, hessian, SCHEME, torch.float32)
        return output_error(weight, hessian), clip

    expected = judged()
    with rounded_products():
        found = judged()
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize(
    "scheme", [SCHEME, WeightScheme(4, True, "group", 32), WeightScheme(4, True, "channel", None)]
)
def test_the_clip_is_the_best_of_all_ratios_for_every_group_alone(scheme: WeightScheme) -> None:
    weight, x = _problem()
    clip = search_clip(weight, x.T @ x / len(x), scheme, torch.float32)
    size = scheme.block_shape((24, 64))[1]
    for row in (0, 7, 23):
        for group in range(64 // size):
            columns = slice(group * size, (group + 1) * size)
            part, inputs = weight[row : row + 1, columns], x[:, columns]
            losses = []
            for shrink in CLIP_FACTORS:
                factor = torch.full((1, 1), shrink)
                one = WeightScheme(scheme.bits, scheme.symmetric, "channel", None)
                grid = affine.choose_grid(part, one, torch.float32, factor)
                error = inputs @ (round_to_grid(part, *grid, one) - part).T
                losses.append(float(error.square().mean()))
            chosen = round((1 - float(clip[row, group])) * 20)
            assert losses[chosen] <= min(losses) * 1.001


def test_clipping_never_raises_the_error_of_a_group() -> None:
    weight, x = _problem(3)
    moment = x.T @ x / len(x)
    clip = search_clip(weight, moment, SCHEME, torch.bfloat16)
    plain = round_to_grid(weight, *affine.choose_grid(weight, SCHEME, torch.bfloat16), SCHEME)
    grid = affine.choose_grid(weight, SCHEME, torch.bfloat16, clip)
    clipped = round_to_grid(weight, *grid, SCHEME)
    for columns in torch.arange(64).split(16):
        part = moment[columns][:, columns]
        before = output_error((plain - weight)[:, columns], part)
        after = output_error((clipped - weight)[:, columns], part)
        assert after <= before * 1.0001
    assert (clip < 1).any()


def _e4m3(value: float) -> float:
    """The nearest number of e4m3fn, ties to even: three bits of mantissa, exponents from -6."""
    if value == 0:
        return 0.0
    step = 2.0 ** (max(math.floor(math.log2(abs(value))), -6) - 3)
    return max(-448.0, min(448.0, round(value / step) * step))


def _errors_of_octave(block: Tensor, moment: Tensor | None) -> list[float]:
    """Squared error of a block [r, c] under every factor, in Python's floats.

    ``moment``: [c, c] of the block's inputs; of the weights themselves without.
    """
    largest = float(block.abs().max())
    errors = []
    for factor in OCTAVE_FACTORS:
        scale = float(torch.tensor(largest * factor) / 448)
        deltas = torch.tensor(
            [[_e4m3(w / scale) * scale - w for w in row] for row in block.tolist()],
            dtype=torch.float64,
        )
        weighted = deltas if moment is None else deltas @ moment.double()
        errors.append(float((weighted * deltas).sum()))
    return errors


@pytest.mark.parametrize("granularity", ["tensor", "channel", "block"])
@pytest.mark.parametrize("judged", ["by output", "by weights"])
def test_the_octave_is_the_best_start_for_every_block_alone(granularity: str, judged: str) -> None:
    weight, x = _problem(1, rows=130, columns=200)
    scheme = fp8_scheme(granularity)  # type: ignore[arg-type]
    hessian = x.T @ x / len(x) if judged == "by output" else None
    found = search_octave(weight, scheme, torch.float32, hessian)
    rows, columns = scheme.block_shape((130, 200))
    assert found.shape == scheme.grid_shape((130, 200))
    picks = {0, found.shape[0] // 2, found.shape[0] - 1}
    for i in sorted(picks):
        for j in range(found.shape[1]):
            part = slice(j * columns, (j + 1) * columns)
            moment = None if hessian is None else hessian[part, part]
            errors = _errors_of_octave(weight[i * rows : (i + 1) * rows, part], moment)
            chosen = OCTAVE_FACTORS.index(pytest.approx(float(found[i, j]), rel=1e-6))
            assert errors[chosen] <= min(errors) * 1.001


@given(
    rows=st.integers(1, 40),
    columns=st.integers(1, 300),
    granularity=st.sampled_from(["tensor", "channel", "block"]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 99),
)
def test_fp8_never_loses_more_than_on_the_plain_grid_and_never_saturates(
    rows: int, columns: int, granularity: str, dtype: torch.dtype, seed: int
) -> None:
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    weight[rows // 2] *= 1e-9
    scheme = fp8_scheme(granularity)  # type: ignore[arg-type]
    plain = round_to_grid(weight, *affine.choose_grid(weight, scheme, dtype), scheme)
    found = quantize_rtn(weight, scheme, dtype, input_scale=_input_scale(scheme))
    before, after = (
        affine.to_blocks(rounded - weight, scheme).square().sum(-1)
        for rounded in (plain, found.dequantize())
    )
    assert (after <= before * (1 + 1e-5)).all()
    # A scale in bfloat16 may lie half a step, 2^-9, under the range.
    steps = affine.to_blocks(weight, scheme) / found.scales.float().unsqueeze(-1)
    assert steps.abs().max() <= 448 * (1 + 2**-8)


def _input_scale(scheme: WeightScheme) -> Tensor | None:
    return torch.ones(1) if scheme.has_input_scale else None


def test_the_octave_saves_a_tenth_of_the_error_of_a_gaussian_weight() -> None:
    weight = torch.randn(64, 576, generator=torch.Generator().manual_seed(0))
    scheme = fp8_scheme()
    plain = round_to_grid(weight, *affine.choose_grid(weight, scheme, torch.bfloat16), scheme)
    found = quantize_rtn(weight, scheme, torch.bfloat16).dequantize()
    assert (found - weight).square().sum() < 0.9 * (plain - weight).square().sum()


def test_the_octave_follows_the_input_where_it_is_known() -> None:
    """Judged by its own objective it wins, row by row, by far: errors cancel where inputs agree."""
    weight, x = _problem(2)
    x += 3  # a mean that all rows' errors meet
    moment, scheme = x.T @ x / len(x), fp8_scheme()

    def losses(factor: Tensor | None) -> Tensor:
        delta = quantize_rtn(weight, scheme, torch.float32, factor).dequantize() - weight
        return ((delta @ moment) * delta).sum(1)

    by_output = losses(search_octave(weight, scheme, torch.float32, moment))
    by_weights = losses(None)
    assert (by_output <= by_weights * 1.0001).all()
    assert by_output.sum() < 0.7 * by_weights.sum()


@pytest.mark.parametrize("granularity", ["tensor", "channel", "block"])
def test_a_weight_searched_in_parts_has_the_same_ranges(
    granularity: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, x = _problem(3, rows=300, columns=70)
    scheme, hessian = fp8_scheme(granularity), x.T @ x  # type: ignore[arg-type]
    whole = search_octave(weight, scheme, torch.bfloat16, hessian)
    monkeypatch.setattr(ranges, "CHUNK", 1000)
    assert torch.equal(search_octave(weight, scheme, torch.bfloat16, hessian), whole)


def test_zeros_and_a_moment_that_is_not_finite_leave_ranges_alone() -> None:
    weight, x = _problem(4)
    weight[3] = 0
    scheme = fp8_scheme()
    assert search_octave(weight, scheme, torch.float32, x.T @ x)[3] == 1
    assert not quantize_rtn(weight, scheme, torch.float32).dequantize()[3].any()
    broken = torch.full((64, 64), math.nan)
    assert (search_octave(weight, scheme, torch.float32, broken) == 1).all()
    assert (search_clip(weight, broken, SCHEME, torch.float32) == 1).all()
