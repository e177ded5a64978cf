"""Norms, gates, rounding of inputs and dequantization against plain torch, in the interpreter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from qtool.formats import activations
from qtool.formats.scheme import (
    ActivationScheme,
    WeightScheme,
    fp8_scheme,
    w8a8_scheme,
    weight_scheme,
)
from qtool.runtime.kernels.backend import RoundedRows
from support.gemm import fenced, make_input, make_weight

pytest.importorskip("triton")
import triton
import triton.language as tl

from qtool.runtime.kernels.triton.backend import TritonBackend
from qtool.runtime.kernels.triton.dequantize import dequantize
from qtool.runtime.kernels.triton.gated import gated
from qtool.runtime.kernels.triton.layout import pack
from qtool.runtime.kernels.triton.norm import norm_heads, rms_norm, rms_norm_rounded
from qtool.runtime.kernels.triton.round_input import Gate, round_input
from qtool.runtime.kernels.triton.rounding import DTYPES, through
from qtool.runtime.kernels.triton.target import sample_target

INT8 = ActivationScheme("int", "token")
FP8 = ActivationScheme("float", "token")
BLOCKS = ActivationScheme("float", "group")


def _values(rounded: RoundedRows) -> Tensor:
    codes, scales = rounded.codes.float(), rounded.scales
    if scales.ndim == 1:
        return codes * scales[:, None]
    wide = scales.T.repeat_interleave(128, dim=1)[:, : codes.shape[1]]
    return codes * wide


@pytest.mark.parametrize("scheme", [INT8, FP8, BLOCKS], ids=lambda s: f"{s.type} {s.strategy}")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("columns", "padded"), [(128, 128), (100, 128), (300, 384)])
def test_an_input_is_rounded_as_the_checkpoint_says_to_the_bit(
    scheme: ActivationScheme, dtype: torch.dtype, columns: int, padded: int
) -> None:
    x = make_input(5, columns, dtype)
    x[1] = 0
    x[2] *= 1e-6
    x[3] *= 1e3
    rounded = round_input(fenced(x), scheme, padded)
    assert torch.equal(_values(rounded)[:, :columns], activations.round_input(x, scheme))
    assert not rounded.codes[:, columns:].float().any()


@pytest.mark.parametrize("kind", ["int", "float"])
def test_a_static_scale_saturates(kind: str) -> None:
    scheme, static = ActivationScheme(kind, "tensor"), torch.tensor([0.01])
    x = make_input(4, 96, torch.float32) * 10
    rounded = round_input(x, scheme, 96, static=static)
    assert torch.equal(_values(rounded), activations.round_input(x, scheme, static))
    assert float(_values(rounded).abs().max() / static) < 448.1


def test_every_float16_becomes_the_nearest_e4m3() -> None:
    every = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.float16)
    x = every[every.isfinite()].float().view(-1, 2048)
    static = torch.ones(1)
    expected = x.clamp(-448, 448).to(torch.float8_e4m3fn)
    scheme = ActivationScheme("float", "tensor")
    codes = round_input(x, scheme, 2048, static=static).codes
    assert torch.equal(codes.view(torch.uint8), expected.view(torch.uint8))
    values = round_input(x, scheme, 2048, static=static, as_values=torch.float16).codes
    assert torch.equal(values.float(), expected.float())


@pytest.mark.parametrize("columns", [64, 96, 130])
@pytest.mark.parametrize("with_residual", [False, True])
def test_the_norm_is_torchs(columns: int, with_residual: bool) -> None:
    x, weight = make_input(5, columns, torch.float32), make_input(1, columns, torch.float32)[0]
    residual = make_input(6, columns, torch.float32)[1:].contiguous() if with_residual else None
    total = x if residual is None else x + residual
    expected = functional.rms_norm(total, (columns,), weight, 1e-5)
    out = torch.full_like(x, torch.nan)
    rms_norm(fenced(x), weight, 1e-5, out, residual)
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-6)
    if residual is not None:
        assert torch.equal(residual, total)


@pytest.mark.parametrize("scheme", [INT8, FP8, BLOCKS], ids=["INT8", "FP8", "FP8 blocks"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("static", [None, torch.tensor([0.02])], ids=["dynamic", "static"])
def test_a_norm_rounds_its_result_as_the_two_would_one_after_the_other(
    scheme: ActivationScheme, dtype: torch.dtype, static: Tensor | None
) -> None:
    x, weight = make_input(5, 300, torch.float32), make_input(1, 300, torch.float32)[0]
    x[2] *= 1e-3
    normed = torch.empty_like(x)
    rms_norm(x, weight, 1e-5, normed)
    apart = round_input(normed.to(dtype), scheme, 384, static=static)
    fused = rms_norm_rounded(fenced(x), weight, 1e-5, scheme, 384, static=static, dtype=dtype)
    assert torch.equal(fused.codes.view(torch.uint8), apart.codes.view(torch.uint8))
    assert torch.equal(fused.scales, apart.scales)


@pytest.mark.parametrize("update_normed", [False, True])
@pytest.mark.parametrize("rounded", [False, True])
def test_an_update_is_normed_added_and_kept_before_the_norm(
    update_normed: bool, rounded: bool
) -> None:
    update, rows = make_input(5, 96, torch.float16), make_input(6, 96, torch.float32)[1:].clone()
    weight, update_weight = make_input(2, 96, torch.float32)
    added = functional.rms_norm(update.float(), (96,), update_weight, 1e-5)
    total = rows + (added if update_normed else update.float())
    expected = functional.rms_norm(total, (96,), weight, 1e-5)
    stream, own = fenced(rows), update_weight.clone() if update_normed else None
    if rounded:
        result = rms_norm_rounded(
            fenced(update), weight, 1e-5, INT8, 128, stream=stream, x_weight=own
        )
        step = result.scales.max().item()
        torch.testing.assert_close(_values(result)[:, :96], expected, rtol=0, atol=0.51 * step)
    else:
        out = torch.full_like(rows, torch.nan)
        rms_norm(fenced(update), weight, 1e-5, out, stream, own)
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(stream, total, rtol=1e-6, atol=1e-6)


def test_a_trip_through_bfloat16_is_torchs_for_every_exponent_and_not_a_number() -> None:
    high = torch.arange(65536, dtype=torch.int32) << 16
    lows = [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF]
    x = torch.cat([high + low for low in lows]).view(torch.float32).view(-1, 1024)
    found = _through(x.contiguous(), torch.bfloat16)
    expected = x.to(torch.bfloat16).float()
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.nan_to_num(), expected.nan_to_num())


def _through(x: Tensor, dtype: torch.dtype) -> Tensor:
    out = torch.empty_like(x)
    through_kernel[(x.shape[0],)](x, out, SIZE=x.shape[1], DTYPE=DTYPES[dtype])
    return out


@triton.jit
def through_kernel(
    x_ptr: tl.tensor, out_ptr: tl.tensor, SIZE: tl.constexpr, DTYPE: tl.constexpr
) -> None:
    places = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(out_ptr + places, through(tl.load(x_ptr + places), DTYPE))


@pytest.mark.parametrize("width", [32, 80])
def test_heads_are_normed_each_by_itself_where_they_lie(width: int) -> None:
    heads = make_input(3, 9 * width, torch.float16).view(3, 9, width)
    q, k, _ = heads.split((4, 2, 3), dim=1)
    weights = make_input(2, width, torch.float32)
    outs = [torch.full_like(x, torch.nan).contiguous() for x in (q, k)]
    before = heads.clone()
    norm_heads(q, k, *weights, 1e-5, *outs)
    assert torch.equal(heads, before)
    for x, weight, out in zip((q, k), weights, outs, strict=True):
        expected = functional.rms_norm(x.float(), (width,), weight, 1e-5)
        torch.testing.assert_close(out, expected.half())
    with pytest.raises(ValueError, match="lie together"):
        norm_heads(q.transpose(0, 1), k, *weights, 1e-5, *outs)


@pytest.mark.parametrize("gelu", [False, True])
@pytest.mark.parametrize("width", [8, 1024, 1500])
def test_the_gate_is_torchs(gelu: bool, width: int) -> None:
    gate_up = make_input(3, 2 * width, torch.float32) * 3
    gate_up[0, 0], gate_up[1, 1], gate_up[2, 2] = 1e4, -1e4, 0.0
    gate, up = gate_up.chunk(2, dim=1)
    act = functional.gelu(gate, approximate="tanh") if gelu else functional.silu(gate)
    out = torch.full((3, width), torch.nan)
    gated(fenced(gate_up), out, gelu=gelu)
    torch.testing.assert_close(out, act * up, rtol=1e-5, atol=1e-6)


STATIC = torch.tensor([0.02])


@pytest.mark.parametrize(
    ("scheme", "static"),
    [(INT8, None), (INT8, STATIC), (FP8, None), (FP8, STATIC), (BLOCKS, None)],
    ids=["INT8", "INT8 static", "FP8", "FP8 static", "FP8 blocks"],
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("gate", ["silu", "gelu"])
def test_a_gated_product_is_rounded_as_the_two_would_one_after_the_other(
    scheme: ActivationScheme, dtype: torch.dtype, static: Tensor | None, gate: Gate
) -> None:
    gate_up = make_input(5, 600, dtype) * 3
    gate_up[1, :300], gate_up[2, 0], gate_up[3] = 0, 1e4, gate_up[3] * 1e-3
    out = torch.empty(5, 300)
    gated(gate_up, out, gelu=gate == "gelu")
    product = out.to(dtype)
    apart = round_input(product, scheme, 384, static=static)
    fused = round_input(fenced(gate_up), scheme, 384, static=static, gate=gate)
    assert torch.equal(fused.codes.view(torch.uint8), apart.codes.view(torch.uint8))
    assert torch.equal(fused.scales, apart.scales)
    assert torch.equal(_values(fused)[:, :300], activations.round_input(product, scheme, static))


def test_rows_too_wide_for_a_program_are_gated_and_rounded_apart() -> None:
    from qtool.runtime.kernels.triton import linear

    backend = TritonBackend(torch.device("cpu"), torch.float16, sample_target("sm_90"))
    layer = backend.linear(make_weight(w8a8_scheme(), 64, 256), None)
    gate_up = make_input(3, 512, torch.float16)
    together = backend.gate_for(layer, gate_up, "silu")
    assert isinstance(together, RoundedRows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear, "MAX_GATED", 128)
        apart = backend.gate_for(layer, gate_up, "silu")
    assert isinstance(apart, Tensor)
    assert torch.equal(layer.read(together), layer.read(apart))


@pytest.mark.parametrize(
    "scheme",
    [
        weight_scheme(4, False, 64),
        weight_scheme(4, False, None),
        weight_scheme(8, True, 128),
        weight_scheme(8, True, None),
        fp8_scheme("block", weight_only=True),
    ],
    ids=WeightScheme.describe,
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_dequantized_weights_have_the_bits_of_the_plain_ones(
    scheme: WeightScheme, dtype: torch.dtype
) -> None:
    weight = make_weight(scheme, 70, 256)
    assert torch.equal(dequantize(pack(weight), dtype), weight.dequantize(dtype))
