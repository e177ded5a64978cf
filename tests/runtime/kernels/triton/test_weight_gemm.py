"""Products of packed weights and 16-bit activations against float64, in the interpreter."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from qtool.formats.scheme import WeightScheme, fp8_scheme, weight_scheme
from qtool.formats.tensor import QuantizedTensor
from support.gemm import fenced, make_input, make_weight, relative_error

pytest.importorskip("triton")
from qtool.runtime.kernels.triton.config import Tiles, select_config, shape_of
from qtool.runtime.kernels.triton.launch import Workspace
from qtool.runtime.kernels.triton.layout import pack
from qtool.runtime.kernels.triton.target import sample_target
from qtool.runtime.kernels.triton.weight_gemm import weight_gemm

CPU = torch.device("cpu")
SCHEMES = (
    weight_scheme(4, False, 128),
    weight_scheme(4, True, 64),
    weight_scheme(4, False, 32),
    weight_scheme(4, False, None),
    weight_scheme(4, True, None),
    weight_scheme(8, True, 128),
    weight_scheme(8, True, None),
    fp8_scheme("tensor", weight_only=True),
    fp8_scheme("channel", weight_only=True),
    fp8_scheme("block", weight_only=True),
)
# Weights are exact and sums float32: what remains is the order of the sums.
BOUND = 1e-6


def _run(
    weight: QuantizedTensor, x: Tensor, tiles: Tiles | None = None, **more: Tensor | None
) -> Tensor:
    """The kernel's float32 result, from and into memory that poison surrounds."""
    packed = pack(weight)
    tiles = tiles or select_config(sample_target("sm_90"), shape_of(packed), x.shape[0])
    assert tiles is not None
    workspace = Workspace.on(CPU)
    workspace.reserve(packed.padded[0], x.shape[0], tiles)
    workspace.partials.fill_(torch.nan)
    padding = packed.padded[1] - x.shape[1]
    x = fenced(torch.nn.functional.pad(x, (0, padding)))
    out = fenced(torch.full((x.shape[0], weight.shape[0]), torch.nan))
    weight_gemm(x, packed, out, tiles, workspace, asm=True, **more)
    assert not workspace.locks.any(), "a captured graph would not run twice"
    assert out._base is not None and bool(out._base[:64].isnan().all())
    assert bool(out._base[-64:].isnan().all()), "stored beyond the end"
    return out


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scheme", SCHEMES, ids=WeightScheme.describe)
@pytest.mark.parametrize(("rows", "columns", "tokens"), [(100, 256, 3), (128, 640, 17)])
def test_the_product_is_that_of_the_dequantized_weight(
    scheme: WeightScheme, dtype: torch.dtype, rows: int, columns: int, tokens: int
) -> None:
    weight, x = make_weight(scheme, rows, columns), make_input(tokens, columns, dtype)
    expected = x.double() @ weight.dequantize().double().T
    assert relative_error(_run(weight, x), expected) < BOUND


@settings(max_examples=25)
@given(
    scheme=st.sampled_from(SCHEMES),
    rows=st.integers(1, 140),
    groups=st.integers(1, 5),
    tokens=st.integers(1, 40),
    block_m=st.sampled_from([8, 16, 32]),
    splits=st.sampled_from([1, 2, 4]),
)
def test_any_shape_in_any_tile_and_split(
    scheme: WeightScheme, rows: int, groups: int, tokens: int, block_m: int, splits: int
) -> None:
    columns = groups * (scheme.group_size or 40)
    weight, x = make_weight(scheme, rows, columns), make_input(tokens, columns, torch.float16)
    expected = x.double() @ weight.dequantize().double().T
    found = _run(weight, x, Tiles(block_m, 64, 2, 3, splits))
    assert relative_error(found, expected) < BOUND


def test_splits_are_summed_in_their_order_whoever_is_last() -> None:
    weight, x = make_weight(SCHEMES[2], 64, 512), make_input(5, 512, torch.float16)
    once = _run(weight, x, Tiles(8, 64, 2, 3, 4))
    assert torch.equal(once, _run(weight, x, Tiles(8, 64, 2, 3, 4)))
    parts = [slice(128 * i, 128 * (i + 1)) for i in range(4)]
    sums = torch.zeros(5, 64)
    for part in parts:
        codes, grid = weight.codes[:, part].contiguous(), slice(part.start // 32, part.stop // 32)
        piece = QuantizedTensor(codes, weight.scales[:, grid], weight.zeros[:, grid], weight.scheme)
        sums += _run(piece, x[:, part].contiguous(), Tiles(8, 64, 2, 3, 1))
    assert torch.equal(once, sums)


def test_a_row_has_the_same_bits_whatever_its_company_in_a_tile() -> None:
    weight, x = make_weight(SCHEMES[0], 64, 256), make_input(8, 256, torch.float16)
    tiles = Tiles(8, 64, 2, 3, 2)
    alone = _run(weight, x[5:6].contiguous(), tiles)
    assert torch.equal(_run(weight, x, tiles)[5:6], alone)


@pytest.mark.parametrize("tokens", [3, 9])
def test_bias_residual_and_token_scales_are_added_in_float32(tokens: int) -> None:
    weight, x = make_weight(SCHEMES[0], 70, 256), make_input(tokens, 256, torch.float16)
    bias, residual = make_input(1, 70, torch.float16)[0], make_input(tokens, 70, torch.float16)
    scales = make_input(tokens, 1, torch.float32)[:, 0].contiguous()
    found = _run(weight, x, bias=bias, residual=residual, token_scales=scales)
    product = x.double() @ weight.dequantize().double().T * scales.double()[:, None]
    assert relative_error(found, product + bias.double() + residual.double()) < BOUND


@pytest.mark.parametrize("value", [0.0, 65504.0, 6e-8, -1.0])
def test_extreme_activations_meet_exact_weights(value: float) -> None:
    weight = make_weight(SCHEMES[0], 64, 128)
    x = torch.zeros(2, 128, dtype=torch.float16)
    x[0, 77], x[1, 3] = value, -value
    expected = x.double() @ weight.dequantize().double().T
    torch.testing.assert_close(_run(weight, x).double(), expected, rtol=1e-6, atol=0)


def test_not_a_number_stays_in_its_row() -> None:
    weight, x = make_weight(SCHEMES[0], 64, 128), make_input(4, 128, torch.float16)
    clean = _run(weight, x)
    x[2, 5] = torch.nan
    found = _run(weight, x)
    assert bool(found[2].isnan().all())
    kept = [0, 1, 3]
    assert torch.equal(found[kept], clean[kept])


def test_what_breaks_the_contract_is_refused() -> None:
    weight = pack(make_weight(SCHEMES[0], 64, 128))
    tiles, workspace = Tiles(8, 64, 2, 3), Workspace.on(CPU)
    x, out = make_input(3, 128, torch.float16), torch.empty(3, 64)
    for wrong_x, wrong_out, match in (
        (x.float(), out, "16 bits each"),
        (x[:, :64].contiguous(), out, "expected"),
        (x, out[:, :32].contiguous(), "expected"),
        (x.t().contiguous().t(), out, "contiguous"),
    ):
        with pytest.raises(ValueError, match=match):
            weight_gemm(wrong_x, weight, wrong_out, tiles, workspace, asm=True)
