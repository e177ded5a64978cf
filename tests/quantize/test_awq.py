"""AWQ's search for scales on small numbers."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from qtool.formats.scheme import WeightScheme
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


def test_scaling_back_leaves_only_rounding() -> None:
    weight, _ = _problem()
    scales = torch.rand(64, generator=torch.Generator().manual_seed(1)) + 0.5
    rounded = awq.round_scaled(weight, scales, WeightScheme(8, True, "group", 16), torch.float32)
    assert (rounded - weight).abs().max() < 0.05
