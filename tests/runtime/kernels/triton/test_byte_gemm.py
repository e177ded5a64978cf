"""Products of 8-bit weights and 8-bit activations against float64, in the interpreter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from qtool.formats.scheme import WeightScheme, fp8_scheme, w8a8_scheme
from qtool.formats.tensor import QuantizedTensor
from support.gemm import make_input, make_weight, relative_error

pytest.importorskip("triton")
from qtool.runtime.kernels.triton.byte_gemm import byte_gemm
from qtool.runtime.kernels.triton.config import Tiles, select_config, shape_of
from qtool.runtime.kernels.triton.launch import Workspace
from qtool.runtime.kernels.triton.layout import pack
from qtool.runtime.kernels.triton.target import sample_target

CPU = torch.device("cpu")


def _codes(scheme: WeightScheme, tokens: int, columns: int) -> tuple[Tensor, Tensor]:
    """Random codes of activations, and a scale a token, or a token and 128 columns."""
    generator = torch.Generator().manual_seed(tokens)
    if scheme.type == "int":
        codes = torch.randint(-128, 128, (tokens, columns), generator=generator).to(torch.int8)
    else:
        spread = torch.randn(tokens, columns, generator=generator) * 60
        codes = spread.clamp(-448, 448).to(torch.float8_e4m3fn)
    count = -(-columns // 128) if scheme.strategy == "block" else 1
    scales = torch.rand(count, tokens, generator=generator) + 0.5
    return codes, scales if scheme.strategy == "block" else scales[0]


def _expected(weight: QuantizedTensor, codes: Tensor, scales: Tensor) -> Tensor:
    x = codes.double()
    if scales.ndim == 2:
        wide = scales.double().T.repeat_interleave(128, dim=1)[:, : x.shape[1]]
        return (x * wide) @ weight.dequantize().double().T
    return (x * scales.double()[:, None]) @ weight.dequantize().double().T


def _run(
    weight: QuantizedTensor,
    codes: Tensor,
    scales: Tensor,
    tiles: Tiles | None = None,
    **more: Tensor | None,
) -> Tensor:
    packed = pack(weight, as_bytes=True)
    tiles = tiles or select_config(sample_target("sm_90"), shape_of(packed), codes.shape[0])
    assert tiles is not None
    workspace = Workspace.on(CPU)
    workspace.reserve(packed.padded[0], codes.shape[0], tiles)
    workspace.partials.fill_(torch.nan)
    padding = packed.padded[1] - codes.shape[1]
    stored = torch.nn.functional.pad(codes.view(torch.uint8), (0, padding)).view(codes.dtype)
    out = torch.full((codes.shape[0], weight.shape[0]), torch.nan)
    byte_gemm(stored, scales.contiguous(), packed, out, tiles, workspace, asm=False, **more)
    assert not workspace.locks.any()
    return out


SCHEMES = (w8a8_scheme(), fp8_scheme("channel"), fp8_scheme("tensor"), fp8_scheme("block"))


@pytest.mark.parametrize("scheme", SCHEMES, ids=WeightScheme.describe)
@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize(("rows", "columns", "tokens"), [(100, 512, 5), (256, 600, 18)])
def test_the_product_is_that_of_codes_and_scales(
    scheme: WeightScheme, rows: int, columns: int, tokens: int, splits: int
) -> None:
    weight = make_weight(scheme, rows, columns, input_scale=1.0 if scheme.has_input_scale else None)
    codes, scales = _codes(scheme, tokens, columns)
    found = _run(weight, codes, scales, Tiles(16, 64, 2, 3, splits))
    assert relative_error(found, _expected(weight, codes, scales)) < 1e-6


def test_sums_of_integers_are_exact() -> None:
    weight = make_weight(w8a8_scheme(), 64, 512)
    codes, scales = _codes(weight.scheme, 5, 512)
    ones = torch.ones_like(weight.scales)
    weight = QuantizedTensor(weight.codes, ones, weight.zeros, weight.scheme)
    exact = codes.long() @ (weight.codes.long() - 128).T
    assert torch.equal(_run(weight, codes, torch.ones(5), Tiles(8, 64, 2, 3, 1)).long(), exact)
    assert scales.shape == (5,)


@pytest.mark.parametrize("scheme", [SCHEMES[0], SCHEMES[3]], ids=WeightScheme.describe)
def test_bias_and_residual_are_added(scheme: WeightScheme) -> None:
    weight = make_weight(scheme, 70, 256)
    codes, scales = _codes(scheme, 9, 256)
    bias, residual = make_input(1, 70, torch.float16)[0], make_input(9, 70, torch.float16)
    found = _run(weight, codes, scales, bias=bias, residual=residual)
    expected = _expected(weight, codes, scales) + bias.double() + residual.double()
    assert relative_error(found, expected) < 1e-6


def test_what_breaks_the_contract_is_refused() -> None:
    weight = make_weight(w8a8_scheme(), 64, 128)
    codes, scales = _codes(weight.scheme, 3, 128)
    packed, out = pack(weight, as_bytes=True), torch.empty(3, 64)
    tiles, workspace = Tiles(8, 64, 2, 3), Workspace.on(CPU)
    for wrong, wrong_scales, match in (
        (codes.half(), scales, "the same bytes"),
        (codes, scales[:2], "expected"),
        (codes[:, :64].contiguous(), scales, "expected"),
        (codes.t().contiguous().t(), scales, "contiguous"),
    ):
        with pytest.raises(ValueError, match=match):
            byte_gemm(wrong, wrong_scales, packed, out, tiles, workspace, asm=False)
