"""Rounded inputs against plain loops and against the compressed-tensors package."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from qtool.formats.activations import round_input, scale_of
from qtool.formats.scheme import ActivationScheme

TOKEN, GROUP = ActivationScheme("int", "token"), ActivationScheme("float", "group")
FP8_TOKEN, FP8_TENSOR = ActivationScheme("float", "token"), ActivationScheme("float", "tensor")
INT_TENSOR = ActivationScheme("int", "tensor")
DYNAMIC = [TOKEN, FP8_TOKEN, GROUP]


def _x(tokens: int = 5, features: int = 300, seed: int = 0) -> Tensor:
    x = torch.randn(tokens, features, generator=torch.Generator().manual_seed(seed))
    x[0, 3] = 40
    x[1] = 0
    return x


def _ref_e4m3(value: float) -> float:
    """Nearest e4m3 value by search over all of them; ties to the even mantissa."""
    if abs(value) >= 448:
        return 448.0 if value > 0 else -448.0
    bits = torch.arange(0, 127, dtype=torch.uint8)
    table = bits.view(torch.float8_e4m3fn).double().tolist()
    best = min(range(127), key=lambda i: (abs(table[i] - abs(value)), i % 2))
    return table[best] if value >= 0 else -table[best]


@pytest.mark.parametrize("scheme", DYNAMIC, ids=str)
def test_every_value_is_the_one_a_plain_loop_gives(scheme: ActivationScheme) -> None:
    x = _x(3, 260)
    found = round_input(x, scheme)
    width = 128 if scheme.strategy == "group" else 260
    for row in range(3):
        for start in range(0, 260, width):
            values = x[row, start : start + width]
            peak = float(values.abs().max())
            steps = 127.5 if scheme.type == "int" else 448.0
            scale = float(torch.tensor(peak) / steps) if peak else 1.0
            for value, rounded in zip(
                values.tolist(), found[row, start : start + width], strict=True
            ):
                ratio = float(torch.tensor(value) / torch.tensor(scale))
                code = (
                    min(max(round(ratio), -128), 127) if scheme.type == "int" else _ref_e4m3(ratio)
                )
                assert float(rounded) == pytest.approx(code * scale, rel=1e-6)


@pytest.mark.parametrize("scheme", [TOKEN, FP8_TOKEN, GROUP], ids=str)
def test_the_reference_package_rounds_the_same(scheme: ActivationScheme) -> None:
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize
    from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp

    x = _x(4, 256)[None]
    args = QuantizationArgs(
        num_bits=8,
        type=scheme.type,
        strategy=scheme.strategy,
        dynamic=True,
        group_size=128 if scheme.strategy == "group" else None,
    )
    scale, zero = compute_dynamic_scales_and_zp(x, args, torch.nn.Linear(1, 1))
    expected = fake_quantize(x, scale, zero, args)
    assert torch.equal(round_input(x, scheme), expected)


@pytest.mark.parametrize("scheme", [FP8_TENSOR, INT_TENSOR], ids=str)
def test_a_static_scale_saturates_instead_of_overflowing(scheme: ActivationScheme) -> None:
    scale = scale_of(torch.tensor(2.0), scheme).reshape(1)
    rounded = round_input(torch.tensor([[1e6, -1e6, 2.0, 0.0]]), scheme, scale)
    assert rounded.isfinite().all()
    torch.testing.assert_close(rounded, torch.tensor([[2.0, -2.0, 2.0, 0.0]]), rtol=0.01, atol=0)


@given(
    scale=st.floats(min_value=1e-30, max_value=1e30),
    features=st.integers(1, 200),
    scheme=st.sampled_from(DYNAMIC),
)
def test_rounding_is_odd_bounded_and_within_half_a_step(
    scale: float, features: int, scheme: ActivationScheme
) -> None:
    x = torch.randn(2, features, generator=torch.Generator().manual_seed(features)) * scale
    rounded = round_input(x, scheme)
    assert rounded.isfinite().all()
    peak = x.abs().amax(-1, keepdim=True)
    assert (rounded.abs() <= peak * 1.004).all()
    # Half a step; e4m3's largest steps are a sixteenth of the value, and clipping takes half one.
    bound = peak / 127 * 0.51 if scheme.type == "int" else peak / 27
    assert ((rounded - x).abs() <= bound).all()


def test_a_row_does_not_depend_on_its_company() -> None:
    x = _x(6)
    for scheme in DYNAMIC:
        assert torch.equal(round_input(x, scheme)[2:3], round_input(x[2:3], scheme))
