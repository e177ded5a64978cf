"""AWQ's two searches on small numbers."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from qtool.calibration.products import rounded_products
from qtool.formats import affine
from qtool.formats.scheme import WeightScheme
from qtool.formats.tensor import round_to_grid
from qtool.quantize import awq

SCHEME = WeightScheme(4, False, "group", 16)


def _problem(seed: int = 0) -> tuple[Tensor, Tensor]:
    """A weight [24, 64] and inputs [200, 64] with a few loud channels."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(24, 64, generator=generator)
    x = torch.randn(200, 64, generator=generator)
    x[:, ::9] *= 20
    return weight, x


def test_ratio_zero_is_identity_to_the_bit() -> None:
    assert torch.equal(awq.smoothing_scales(torch.rand(9) + 0.1, 0), torch.ones(9))


@pytest.mark.parametrize("ratio", [0.05, 0.5, 0.95])
def test_scales_are_centred_and_a_silent_channel_keeps_its_weights(ratio: float) -> None:
    mean_abs = torch.tensor([0.0, 0.01, 3.0, 40.0])
    scales = awq.smoothing_scales(mean_abs, ratio)
    assert scales[0] == 1
    assert math.isclose(float(scales[1:].max() * scales[1:].min()), 1, rel_tol=1e-5)
    assert (scales[1:].diff() > 0).all()


def test_a_module_that_never_fired_is_not_smoothed() -> None:
    assert torch.equal(awq.smoothing_scales(torch.zeros(4), 0.5), torch.ones(4))


@pytest.mark.parametrize("seed", range(4))
def test_smoothing_never_has_a_larger_loss_than_identity_and_helps_with_loud_channels(
    seed: int,
) -> None:
    weight, x = _problem(seed)
    moment = x.T @ x / len(x)

    def loss(scales: Tensor) -> float:
        delta = awq.round_scaled(weight, scales, SCHEME, torch.float32) - weight
        return float(awq.output_error(delta, moment))

    choice = awq.search_scales(x.abs().mean(0), loss)
    assert choice.ratio > 0
    assert choice.loss < 0.8 * choice.identity_loss
    assert choice.identity_loss == loss(torch.ones(64))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_never_wins(bad: float) -> None:
    losses = iter([3.0, *[bad] * (awq.NUM_RATIOS - 2), 2.0])
    choice = awq.search_scales(torch.rand(4) + 0.5, lambda _: next(losses))
    assert choice.ratio == 0.95 and choice.loss == 2.0


def test_identity_wins_a_tie() -> None:
    assert awq.search_scales(torch.rand(4) + 0.5, lambda _: 1.0).ratio == 0


def test_the_second_moment_form_is_the_mean_squared_output_error() -> None:
    weight, x = _problem()
    delta = 0.01 * weight
    direct = (x @ delta.T).square().sum(1).mean()
    torch.testing.assert_close(awq.output_error(delta, x.T @ x / len(x)), direct)


def test_losses_that_decide_are_exact_where_calibration_rounds_its_factors() -> None:
    """It may fail only on CPUs with instructions for bfloat16; others never round."""
    generator = torch.Generator().manual_seed(2)
    weight, inputs = (torch.randn(64, 256, generator=generator) for _ in range(2))
    hessian = inputs.T @ inputs

    def judged() -> tuple[Tensor, Tensor]:
        clip = awq.search_clip(weight, hessian, SCHEME, torch.float32)
        return awq.output_error(weight, hessian), clip

    expected = judged()
    with rounded_products():
        found = judged()
    assert all(map(torch.equal, found, expected))


def test_scaling_back_leaves_only_rounding() -> None:
    weight, _ = _problem()
    scales = torch.rand(64, generator=torch.Generator().manual_seed(1)) + 0.5
    rounded = awq.round_scaled(weight, scales, WeightScheme(8, True, "group", 16), torch.float32)
    assert (rounded - weight).abs().max() < 0.05


@pytest.mark.parametrize(
    "scheme", [SCHEME, WeightScheme(4, True, "group", 32), WeightScheme(4, True, "channel", None)]
)
def test_the_clip_is_the_best_of_all_ratios_for_every_group_alone(scheme: WeightScheme) -> None:
    weight, x = _problem()
    clip = awq.search_clip(weight, x.T @ x / len(x), scheme, torch.float32)
    size = scheme.block_shape((24, 64))[1]
    for row in (0, 7, 23):
        for group in range(64 // size):
            columns = slice(group * size, (group + 1) * size)
            part, inputs = weight[row : row + 1, columns], x[:, columns]
            losses = []
            for step in range(awq.NUM_CLIP_STEPS):
                factor = torch.full((1, 1), 1 - step / 20)
                one = WeightScheme(scheme.bits, scheme.symmetric, "channel", None)
                grid = affine.choose_grid(part, one, torch.float32, factor)
                error = inputs @ (round_to_grid(part, *grid, one) - part).T
                losses.append(float(error.square().mean()))
            chosen = round((1 - float(clip[row, group])) * 20)
            assert losses[chosen] <= min(losses) * 1.001


def test_clipping_never_raises_the_error_of_a_group() -> None:
    weight, x = _problem(3)
    moment = x.T @ x / len(x)
    clip = awq.search_clip(weight, moment, SCHEME, torch.bfloat16)
    plain = round_to_grid(weight, *affine.choose_grid(weight, SCHEME, torch.bfloat16), SCHEME)
    grid = affine.choose_grid(weight, SCHEME, torch.bfloat16, clip)
    clipped = round_to_grid(weight, *grid, SCHEME)
    for columns in torch.arange(64).split(16):
        part = moment[columns][:, columns]
        before = awq.output_error((plain - weight)[:, columns], part)
        after = awq.output_error((clipped - weight)[:, columns], part)
        assert after <= before * 1.0001
    assert (clip < 1).any()
