"""SmoothQuant's formula against plain numbers."""

from __future__ import annotations

import pytest
import torch

from qtool.quantize import smoothquant


def test_scales_are_those_of_the_paper_up_to_one_common_factor() -> None:
    peak, weights = torch.tensor([8.0, 0.5, 100.0]), torch.tensor([0.1, 0.4, 0.2])
    scales = smoothquant.smoothing_scales(peak, weights, 0.7)
    expected = [x**0.7 / w**0.3 for x, w in zip(peak.tolist(), weights.tolist(), strict=True)]
    ratios = (scales / torch.tensor(expected)).tolist()
    assert ratios == pytest.approx([ratios[0]] * 3)
    assert float(scales.max() * scales.min()) == pytest.approx(1.0)


def test_a_silent_channel_has_scale_one_and_a_silent_column_a_finite_one() -> None:
    peak, weights = torch.tensor([8.0, 0.0, 2.0]), torch.tensor([0.1, 0.4, 0.0])
    scales = smoothquant.smoothing_scales(peak, weights, 0.5)
    assert scales.isfinite().all() and (scales > 0).all()
    assert float(scales[1]) == 1.0
    silent = smoothquant.smoothing_scales(torch.zeros(3), weights, 0.5)
    assert torch.equal(silent, torch.ones(3))


def test_identity_wins_unless_a_strength_is_better_and_finite() -> None:
    peak, weights = torch.tensor([8.0, 1.0]), torch.tensor([0.1, 0.1])
    worse = smoothquant.search_scales(peak, weights, lambda s: float((s - 1).abs().sum()))
    assert worse.ratio == 0 and torch.equal(worse.scales, torch.ones(2))
    broken = smoothquant.search_scales(
        peak, weights, lambda s: 1.0 if torch.equal(s, torch.ones(2)) else float("nan")
    )
    assert broken.ratio == 0
    target = smoothquant.smoothing_scales(peak, weights, 0.6)
    found = smoothquant.search_scales(peak, weights, lambda s: float((s - target).abs().sum()))
    assert found.ratio == pytest.approx(0.6)
