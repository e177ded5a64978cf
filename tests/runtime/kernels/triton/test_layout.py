"""Weights in the kernels' layout: every bit comes back, and filling up is worth nothing."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qtool.formats.scheme import WeightScheme, fp8_scheme, w8a8_scheme, weight_scheme
from qtool.formats.tensor import QuantizedTensor
from qtool.quantize.rtn import quantize_rtn
from qtool.runtime.kernels.triton.layout import (
    TILE_ROWS,
    Codes,
    gate_up_order,
    pack,
    unpack,
    why_not_packable,
)

SCHEMES = (
    weight_scheme(4, False, 128),
    weight_scheme(4, True, 64),
    weight_scheme(4, False, 32),
    weight_scheme(4, False, 96),
    weight_scheme(4, False, 256),
    weight_scheme(4, False, None),
    weight_scheme(4, True, None),
    WeightScheme(4, False, "tensor", None),
    weight_scheme(8, True, 128),
    weight_scheme(8, True, None),
    w8a8_scheme(),
    fp8_scheme("tensor", weight_only=True),
    fp8_scheme("channel", weight_only=True),
    fp8_scheme("block"),
)


def _quantized(
    scheme: WeightScheme, rows: int, columns: int, dtype: torch.dtype = torch.bfloat16
) -> QuantizedTensor:
    generator = torch.Generator().manual_seed(rows * columns)
    return quantize_rtn(torch.randn(rows, columns, generator=generator), scheme, dtype, None, None)


def _fitting(scheme: WeightScheme, columns: int) -> int:
    """Columns that the scheme's groups divide."""
    group = scheme.group_size or 1
    return -(-columns // group) * group


@given(
    scheme=st.sampled_from(SCHEMES),
    rows=st.integers(1, 200),
    columns=st.integers(1, 300),
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
)
def test_packing_and_unpacking_give_every_bit_back(
    scheme: WeightScheme, rows: int, columns: int, dtype: torch.dtype
) -> None:
    weight = _quantized(scheme, rows, _fitting(scheme, columns), dtype)
    for as_bytes in {False, scheme.bits == 8}:
        back = unpack(pack(weight, as_bytes=as_bytes))
        assert torch.equal(back.codes.view(torch.uint8), weight.codes.view(torch.uint8))
        assert torch.equal(back.scales, weight.scales.float())
        assert torch.equal(back.zeros, weight.zeros)


@pytest.mark.parametrize("scheme", SCHEMES, ids=WeightScheme.describe)
def test_a_gate_and_its_up_projection_take_turns_and_come_back(scheme: WeightScheme) -> None:
    weight = _quantized(scheme, 288, _fitting(scheme, 100))
    packed = pack(weight, gate_up=True)
    assert gate_up_order(32).tolist()[:17] == [*range(8), *range(16, 24), 8]
    back = unpack(packed)
    assert torch.equal(back.codes.view(torch.uint8), weight.codes.view(torch.uint8))
    assert torch.equal(back.scales, weight.scales.float())
    assert torch.equal(back.zeros, weight.zeros)
    assert not torch.equal(packed.words, pack(weight).words)


@pytest.mark.parametrize("scheme", SCHEMES, ids=WeightScheme.describe)
def test_rows_and_columns_are_filled_up_with_zeros(scheme: WeightScheme) -> None:
    weight = _quantized(scheme, 70, _fitting(scheme, 90))
    packed = pack(weight)
    rows, columns = packed.padded
    assert rows == 128 and columns >= weight.shape[1] and columns % packed.step == 0
    whole = unpack(_without_shape(packed))
    dense = whole.dequantize()
    assert torch.equal(dense[:70, : weight.shape[1]], weight.dequantize())
    assert not dense[70:].any() and not dense[:, weight.shape[1] :].any()


def _without_shape(packed):  # type: ignore[no-untyped-def]
    """The filled-up weight as if it were all of it; blocks and groups then end where tiles do."""
    from dataclasses import replace

    scheme = packed.scheme
    if scheme.strategy == "group":
        scheme = replace(scheme, group_size=packed.step)
    elif scheme.strategy == "tensor":
        scheme = replace(scheme, strategy="channel")
    return replace(packed, shape=packed.padded, scheme=scheme)


def test_a_word_holds_four_planes_of_a_tile() -> None:
    weight = _quantized(weight_scheme(4, False, 128), 64, 256)
    words = pack(weight).words
    assert words.shape == (1, 2, 64, 32) and words.dtype == torch.int16
    row, step, word = 5, 1, 7
    bits = int(words[0, step, row, word]) & 0xFFFF
    planes = [int(weight.codes[row, 128 * step + word + 32 * plane]) for plane in range(4)]
    assert bits == sum(code << 4 * plane for plane, code in enumerate(planes))


def test_scale_and_zero_share_a_word() -> None:
    weight = _quantized(weight_scheme(4, False, 64), 64, 128)
    word = pack(weight).scales[1, 3]
    assert int(word) & 0xF == int(weight.zeros[3, 1])
    assert (word & ~0xF).view(torch.float32) == weight.scales[3, 1].float()


def test_tiles_of_64_rows_follow_each_other_along_a_row() -> None:
    weight = _quantized(weight_scheme(8, True, None), 130, 256)
    packed = pack(weight)
    assert packed.padded == (3 * TILE_ROWS, 256) and packed.words.is_contiguous()
    low = packed.words[1, 1, 10] & 0xFF
    assert torch.equal(low.to(torch.uint8), weight.codes[TILE_ROWS + 10, 128:192])


@pytest.mark.parametrize("scale", [2.0**-30, 1e-7, 6e-5, 1.0, 3e38])
def test_scales_of_16_bits_are_exact_in_float32s_whole_range(scale: float) -> None:
    weight = _quantized(weight_scheme(4, False, 32), 8, 64)
    scales = torch.full_like(weight.scales, scale)
    weight = QuantizedTensor(weight.codes, scales, weight.zeros, weight.scheme)
    assert torch.equal(unpack(pack(weight)).scales, scales.float())


def test_what_cannot_be_packed_says_why() -> None:
    odd = _quantized(weight_scheme(4, False, 48), 8, 96)
    assert why_not_packable(odd) == "groups of 48 are not made of 32s"
    with pytest.raises(ValueError, match="W4 asym g48 cannot be packed: groups of 48"):
        pack(odd)
    fine = _quantized(weight_scheme(4, False, 32), 8, 64, torch.float32)
    assert why_not_packable(fine) == "its scales have more than 20 significant bits"
    assert why_not_packable(_quantized(weight_scheme(4, False, None), 8, 64)) is None
    fp8 = _quantized(fp8_scheme(weight_only=True), 8, 64)
    codes = fp8.codes.clone()
    codes.view(torch.uint8)[3, 3] = 0x7F
    poisoned = QuantizedTensor(codes, fp8.scales, fp8.zeros, fp8.scheme)
    assert why_not_packable(poisoned) == "it holds NaN"


def test_eight_bits_only_become_bytes() -> None:
    assert pack(_quantized(w8a8_scheme(), 8, 64), as_bytes=True).codes is Codes.INT8_BYTES
    with pytest.raises(AssertionError, match="bytes have 8 bits"):
        pack(_quantized(SCHEMES[0], 8, 128), as_bytes=True)
