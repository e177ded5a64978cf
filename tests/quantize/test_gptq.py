"""GPTQ against a plain float64 loop that eliminates one column at a time from H itself."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from qtool.formats.scheme import WeightScheme, fp8_scheme, w8a8_scheme, weight_scheme
from qtool.formats.tensor import QuantizedTensor
from qtool.quantize import gptq
from qtool.quantize.awq import output_error
from qtool.quantize.rtn import quantize_rtn

SCHEMES = [
    weight_scheme(4, False, 32),
    weight_scheme(4, True, 64),
    weight_scheme(4, False, None),
    weight_scheme(8, True, 32),
    weight_scheme(8, True, None),
    weight_scheme(8, False, 64),
    w8a8_scheme(),
    fp8_scheme("tensor", weight_only=True),
    fp8_scheme("channel"),
    fp8_scheme("block"),
]


def _inputs(columns: int, tokens: int = 400, seed: int = 0) -> Tensor:
    """Correlated channels of different loudness."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(columns, columns, generator=generator) / columns**0.5
    loudness = torch.rand(columns, generator=generator) * 3 + 0.1
    return torch.randn(tokens, columns, generator=generator) @ mixing * loudness


def _hessian(x: Tensor) -> Tensor:
    return x.T @ x / x.shape[0]


def _weight(rows: int, columns: int, seed: int = 1) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def _solve(
    weights: list[Tensor], nearest: list[QuantizedTensor], hessian: Tensor
) -> list[gptq.Outcome]:
    return gptq.solve_group(weights, nearest, hessian, gptq.factorize(hessian))


def _ref_solve(weight: Tensor, hessian: Tensor, nearest: QuantizedTensor) -> Tensor:
    """Codes by Optimal Brain Surgeon: round a column, update the free ones, remove it from H^-1."""
    scheme = nearest.scheme
    w, h = weight.double().clone(), hessian.double().clone()
    columns = w.shape[1]
    rows, width = scheme.block_shape(nearest.shape)
    grid = [g.repeat_interleave(rows, 0)[: len(w)] for g in (nearest.scales, nearest.zeros)]
    order = torch.argsort(hessian.diagonal(), descending=True, stable=True).tolist()
    h += torch.eye(columns).double() * 0.01 * h.diagonal().mean()
    inverse = torch.linalg.inv(h)
    codes = torch.zeros(weight.shape)
    free = list(order)
    for column in order:
        scale, zero = (g[:, column // width].double() for g in grid)
        steps = w[:, column] / scale
        if scheme.type == "float":
            code = steps.clamp(-448, 448).to(torch.float8_e4m3fn).double()
        else:
            code = (steps.round() + zero).clamp(0, 2**scheme.bits - 1)
        codes[:, column] = code
        error = (w[:, column] - (code - zero) * scale) / inverse[column, column]
        w[:, free] -= error.unsqueeze(1) * inverse[column, free]
        pivot = inverse[:, column].clone()
        inverse = inverse - torch.outer(pivot, pivot) / pivot[column]
        free.remove(column)
    return codes


@pytest.mark.parametrize("scheme", SCHEMES, ids=WeightScheme.describe)
def test_codes_are_those_of_a_plain_elimination(scheme: WeightScheme) -> None:
    columns = 320  # more than two blocks of columns, the last one ragged
    weight, hessian = _weight(24, columns), _hessian(_inputs(columns, 600))
    nearest = quantize_rtn(weight, scheme, torch.float32)
    (outcome,) = _solve([weight], [nearest], hessian)
    expected = _ref_solve(weight, hessian, nearest)
    # A value near a tie may round the other way in float32, and moves its row a little.
    different = (outcome.tensor.codes.float() != expected).float().mean()
    assert different < 0.01
    assert outcome.fallback is None and outcome.remedy is None
    ref_error = output_error(_dequantize(expected, nearest) - weight, hessian)
    error = output_error(outcome.tensor.dequantize() - weight, hessian)
    assert float(error) == pytest.approx(float(ref_error), rel=0.02)


def _dequantize(codes: Tensor, nearest: QuantizedTensor) -> Tensor:
    rows, width = nearest.scheme.block_shape(nearest.shape)
    scales, zeros = (
        grid.float().repeat_interleave(rows, 0).repeat_interleave(width, 1)
        for grid in (nearest.scales, nearest.zeros)
    )
    found = tuple(slice(size) for size in codes.shape)
    return scales[found] * (codes - zeros[found])


@pytest.mark.parametrize("scheme", SCHEMES[:3], ids=WeightScheme.describe)
def test_the_output_error_is_far_below_that_of_rounding_to_nearest(scheme: WeightScheme) -> None:
    weight, x = _weight(48, 256), _inputs(256)
    nearest = quantize_rtn(weight, scheme, torch.bfloat16)
    (outcome,) = _solve([weight], [nearest], _hessian(x))
    plain = (x @ (nearest.dequantize() - weight).T).square().mean()
    solved = (x @ (outcome.tensor.dequantize() - weight).T).square().mean()
    assert solved < 0.5 * plain


def test_grids_are_fixed_from_the_original_columns_and_inputs_are_not_changed() -> None:
    weight, hessian = _weight(16, 128), _hessian(_inputs(128))
    before = weight.clone(), hessian.clone()
    nearest = quantize_rtn(weight, SCHEMES[0], torch.bfloat16)
    (outcome,) = _solve([weight], [nearest], hessian)
    assert torch.equal(outcome.tensor.scales, nearest.scales)
    assert torch.equal(outcome.tensor.zeros, nearest.zeros)
    assert torch.equal(weight, before[0]) and torch.equal(hessian, before[1])


def test_weights_that_share_an_input_get_what_each_would_get_alone() -> None:
    weights = [_weight(rows, 192, seed=rows) for rows in (5, 24, 8)]
    hessian = _hessian(_inputs(192))
    nearest = [quantize_rtn(weight, SCHEMES[1], torch.float32) for weight in weights]
    together = _solve(weights, nearest, hessian)
    for weight, plain, found in zip(weights, nearest, together, strict=True):
        (alone,) = _solve([weight], [plain], hessian)
        same = (alone.tensor.codes == found.tensor.codes).float().mean()
        assert same > 0.99  # sums of other lengths round differently


def test_a_channel_that_never_fired_keeps_its_rounded_value_and_moves_no_other() -> None:
    x = _inputs(128)
    x[:, ::9] = 0
    weight = _weight(16, 128)
    nearest = quantize_rtn(weight, SCHEMES[0], torch.float32)
    (outcome,) = _solve([weight], [nearest], _hessian(x))
    codes = outcome.tensor.codes
    assert torch.equal(codes[:, ::9], nearest.codes[:, ::9])
    assert (nearest.codes[:, ::9] != nearest.zeros[:, :1]).any(), "the value is not simply zero"
    assert not torch.equal(codes, nearest.codes)
    other = weight.clone()
    other[:, ::9] = 0.9 * weight[:, ::9]  # within the same range: the grids stay
    (again,) = _solve([other], [nearest], _hessian(x))
    live = torch.ones(128, dtype=torch.bool)
    live[::9] = False
    assert torch.equal(again.tensor.codes[:, live], codes[:, live])


def test_an_input_that_is_always_zero_rounds_to_nearest() -> None:
    weight = _weight(8, 64)
    nearest = quantize_rtn(weight, SCHEMES[0], torch.float32)
    (outcome,) = _solve([weight], [nearest], torch.zeros(64, 64))
    assert torch.equal(outcome.tensor.codes, nearest.codes)
    assert outcome.fallback is None


def test_fewer_tokens_than_channels_need_no_more_than_the_usual_damping() -> None:
    weight, x = _weight(8, 256), _inputs(256, tokens=3)
    nearest = quantize_rtn(weight, SCHEMES[0], torch.float32)
    (outcome,) = _solve([weight], [nearest], _hessian(x))
    assert outcome.fallback is None and outcome.remedy is None
    error = output_error(outcome.tensor.dequantize() - weight, _hessian(x))
    assert error < 0.1 * output_error(nearest.dequantize() - weight, _hessian(x))


def test_an_indefinite_moment_is_damped_more_and_the_record_says_so() -> None:
    hessian = _hessian(_inputs(64))
    values, vectors = torch.linalg.eigh(hessian)
    # The smallest eigenvalue becomes -5% of the mean diagonal.
    dent = values[0] + 0.05 * hessian.diagonal().mean()
    factor = gptq.factorize(hessian - dent * torch.outer(vectors[:, 0], vectors[:, 0]))
    assert factor is not None and factor.remedy == "damping 0.1"


def test_a_moment_no_damping_helps_gets_a_dominant_diagonal() -> None:
    hessian = torch.full((8, 8), -3.0) + torch.eye(8) * 4
    factor = gptq.factorize(hessian)
    assert factor is not None and factor.remedy == "diagonal floor"
    assert bool(factor.upper.isfinite().all())


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_moment_that_is_not_finite_falls_back_to_nearest_and_says_why(bad: float) -> None:
    hessian = _hessian(_inputs(64))
    hessian[3, 5] = bad
    weights = [_weight(4, 64, seed) for seed in (1, 2)]
    nearest = [quantize_rtn(weight, SCHEMES[0], torch.float32) for weight in weights]
    for outcome, plain in zip(_solve(weights, nearest, hessian), nearest, strict=True):
        assert outcome.tensor is plain
        assert outcome.fallback is not None and "cannot be factored" in outcome.fallback


def test_all_zero_groups_and_rows_stay_exactly_zero() -> None:
    weight = _weight(8, 128)
    weight[:, 32:64] = 0
    weight[3] = 0
    nearest = quantize_rtn(weight, SCHEMES[0], torch.float16)
    (outcome,) = _solve([weight], [nearest], _hessian(_inputs(128)))
    found = outcome.tensor.dequantize()
    assert found.isfinite().all()
    assert (found[3] == 0).all()


def test_the_factor_reproduces_the_inverse() -> None:
    hessian = _hessian(_inputs(96)).double()
    damped = hessian + torch.eye(96) * 0.01 * hessian.diagonal().mean()
    factor = gptq.factorize(hessian.float())
    assert factor is not None
    found = factor.upper.double().T @ factor.upper.double()
    expected = torch.linalg.inv(damped)[factor.order][:, factor.order]
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4 * float(expected.max()))
    assert torch.equal(factor.upper, factor.upper.triu())


def test_where_float32_fails_float64_begins_with_the_moment_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hessian = _hessian(_inputs(96))
    usual, invert = gptq.factorize(hessian), gptq._inverse_factor
    monkeypatch.setattr(
        gptq, "_inverse_factor", lambda h: invert(h) if h.dtype == torch.float64 else None
    )
    factor = gptq.factorize(hessian)
    assert usual is not None and factor is not None
    assert factor.remedy == "damping 0.01 in float64"
    torch.testing.assert_close(factor.upper, usual.upper, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("with_shortfall", [False, True])
@pytest.mark.parametrize(("tokens", "damping"), [(50, 40 / 50), (900, 0.3)])
def test_a_retargeted_weight_is_the_ridge_regression_on_what_has_drifted(
    tokens: int, damping: float, with_shortfall: bool
) -> None:
    rows, columns = 6, 40
    weight, then = _weight(rows, columns), _inputs(columns, tokens)
    now = then + 0.2 * _inputs(columns, tokens, seed=5)
    missing = _inputs(rows, tokens, seed=6) if with_shortfall else torch.zeros(tokens, rows)
    drift = (then - now).T @ now / tokens
    shortfall = missing.T @ now / tokens if with_shortfall else None
    (target,) = gptq.retarget([weight], _hessian(now), tokens, drift, shortfall)

    # In float64, around the weight itself.
    x, y = now.double(), then.double() @ weight.double().T + missing.double()
    moment = x.T @ x / tokens
    damped = moment + torch.eye(columns).double() * damping * moment.diagonal().mean()
    residual = (y - x @ weight.double().T).T @ x / tokens
    expected = weight.double() + torch.linalg.solve(damped, residual.T).T
    torch.testing.assert_close(target.double(), expected, rtol=1e-4, atol=1e-4)


def test_a_weight_whose_input_has_not_drifted_stays_its_own_target() -> None:
    weight, x = _weight(6, 40), _inputs(40)
    (target,) = gptq.retarget([weight], _hessian(x), 400, torch.zeros(40, 40))
    assert torch.equal(target, weight)


def test_a_channel_that_never_fired_keeps_its_column_in_the_target() -> None:
    weight, now = _weight(6, 40), _inputs(40)
    now[:, 7] = 0
    then = now + 0.2 * _inputs(40, seed=5)
    (target,) = gptq.retarget([weight], _hessian(now), 400, (then - now).T @ now / len(now))
    assert torch.allclose(target[:, 7], weight[:, 7])
    assert not torch.allclose(target, weight)


def test_a_singular_moment_moves_the_target_less_and_stays_finite() -> None:
    weight, x = _weight(6, 40), _inputs(40, tokens=3)
    drift = 0.1 * torch.randn(40, 40, generator=torch.Generator().manual_seed(2))
    (target,) = gptq.retarget([weight], 1e6 * _hessian(x), 10**9, drift)
    assert target.isfinite().all() and (target - weight).abs().max() < 1
