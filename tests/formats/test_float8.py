"""FP8 weights: every code against a search over all e4m3 values, and the traps of the cast."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from qtool.errors import UsageError
from qtool.formats.scheme import ActivationScheme, WeightScheme, fp8_scheme, w8a8_scheme
from qtool.formats.tensor import QuantizedTensor, can_stack, concatenate_rows, round_to_grid
from qtool.quantize.rtn import quantize_rtn

WEIGHT_ONLY = [fp8_scheme(g, weight_only=True) for g in ("tensor", "channel", "block")]


def _weight(rows: int, columns: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def _ref_e4m3(values: Tensor) -> Tensor:
    """Nearest e4m3 value; of two equally near the one with an even code."""
    codes = torch.arange(127, dtype=torch.uint8)  # 0 .. 448, in order
    table = codes.view(torch.float8_e4m3fn).double()
    distance = (values.abs().double().unsqueeze(-1) - table).abs()
    nearest = distance.amin(-1, keepdim=True)
    even_first = torch.where(distance == nearest, codes.double() % 2, torch.inf)
    return table[even_first.argmin(-1)] * values.double().sign()


@pytest.mark.parametrize("scheme", WEIGHT_ONLY, ids=WeightScheme.describe)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "columns"), [(3, 40), (130, 140)])
def test_every_weight_is_the_nearest_value_of_its_block(
    scheme: WeightScheme, dtype: torch.dtype, rows: int, columns: int
) -> None:
    weight = _weight(rows, columns)
    found = quantize_rtn(weight, scheme, dtype, torch.ones(scheme.grid_shape((rows, columns))))
    high, wide = scheme.block_shape((rows, columns))
    for top in range(0, rows, high):
        for left in range(0, columns, wide):
            block = weight[top : top + high, left : left + wide]
            scale = (block.abs().max() / 448).clamp(min=1e-5).to(dtype).float()
            expected = _ref_e4m3((block / scale).clamp(-448, 448)) * scale.double()
            actual = found.dequantize()[top : top + high, left : left + wide]
            torch.testing.assert_close(actual.double(), expected, rtol=1e-6, atol=0)
    assert torch.equal(round_to_grid(weight, found.scales, found.zeros, scheme), found.dequantize())


@pytest.mark.parametrize("scheme", WEIGHT_ONLY, ids=WeightScheme.describe)
def test_a_scale_rounded_down_saturates_and_gives_no_nan(scheme: WeightScheme) -> None:
    # A bfloat16 scale and a little: it rounds back, and the largest weight is beyond 448 steps.
    largest = float(torch.tensor(0.002).bfloat16()) * 1.0015 * 448
    weight = torch.full((2, 8), largest)
    found = quantize_rtn(weight, scheme, torch.bfloat16)
    assert largest / float(found.scales.max()) > 448.5
    assert found.dequantize().isfinite().all()
    assert found.codes.float().max() == 448


@pytest.mark.parametrize("scheme", [*WEIGHT_ONLY, w8a8_scheme()], ids=WeightScheme.describe)
def test_a_block_of_zeros_has_scale_one_and_stays_zero(scheme: WeightScheme) -> None:
    found = quantize_rtn(torch.zeros(130, 130), scheme, torch.float16)
    assert (found.scales == 1).all()
    assert (found.dequantize() == 0).all()


def test_what_stacks_and_what_does_not() -> None:
    def parts(scheme: WeightScheme, *rows: int) -> list[QuantizedTensor]:
        return [quantize_rtn(_weight(n, 130, n), scheme, torch.float32) for n in rows]

    tensor, channel, block = WEIGHT_ONLY
    assert not can_stack(parts(tensor, 8, 8))
    assert can_stack(parts(channel, 8, 5))
    assert can_stack(parts(block, 128, 256, 40)), "only the last one may be ragged"
    assert not can_stack(parts(block, 40, 128))
    stacked = concatenate_rows(parts(block, 128, 40))
    expected = torch.cat([part.dequantize() for part in parts(block, 128, 40)])
    assert torch.equal(stacked.dequantize(), expected)
    static = w8a8_scheme(static=True)
    scaled = [
        quantize_rtn(_weight(4, 8), static, torch.float32, None, torch.tensor([scale]))
        for scale in (0.1, 0.1, 0.2)
    ]
    assert can_stack(scaled[:2]) and not can_stack(scaled)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"type": "float", "strategy": "group", "group_size": 64}, "FP8 has 8 bits, and a scale"),
        ({"type": "int", "strategy": "block"}, "only FP8 has blocks"),
        ({"type": "real", "strategy": "channel"}, "use int or float"),
        ({"strategy": "channel", "activations": ActivationScheme("float")}, "one type"),
        (
            {"strategy": "group", "group_size": 64, "activations": ActivationScheme()},
            "weights have a scale",
        ),
        (
            {"type": "float", "strategy": "block", "activations": ActivationScheme("float")},
            "go together",
        ),
    ],
)
def test_schemes_nothing_can_hold_are_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        WeightScheme(**{"bits": 8, "symmetric": True, "group_size": None, **values})


def test_a_static_scheme_needs_its_input_scale_and_others_have_none() -> None:
    with pytest.raises(ValueError, match="a static scheme has one"):
        quantize_rtn(_weight(2, 8), w8a8_scheme(static=True), torch.float32)
    with pytest.raises(ValueError, match="others none"):
        quantize_rtn(_weight(2, 8), w8a8_scheme(), torch.float32, None, torch.ones(1))
