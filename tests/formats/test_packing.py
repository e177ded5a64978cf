"""Words against an independent packer: the bit string spelled out as Python integers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qtool.formats import packing


def _ref_pack_row(codes: list[int], bits: int) -> list[int]:
    """One row as a little-endian bit string, cut into signed 32-bit words."""
    number = sum(code << (i * bits) for i, code in enumerate(codes))
    count = -(-len(codes) * bits // 32)
    words = [(number >> (32 * i)) & 0xFFFFFFFF for i in range(count)]
    return [word - 2**32 if word >= 2**31 else word for word in words]


@settings(max_examples=100, deadline=None)
@given(
    bits=st.sampled_from([1, 2, 4, 8]),
    rows=st.integers(1, 4),
    columns=st.integers(1, 70),
    seed=st.integers(0, 2**16),
)
def test_words_equal_the_bit_string_and_unpack_again(
    bits: int, rows: int, columns: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 2**bits, (rows, columns), generator=generator, dtype=torch.uint8)
    words = packing.pack_rows(codes, bits)
    assert words.dtype == torch.int32
    assert words.tolist() == [_ref_pack_row(row, bits) for row in codes.tolist()]
    assert torch.equal(packing.unpack_rows(words, bits, columns), codes)


def test_the_highest_code_sets_the_sign_bit() -> None:
    codes = torch.full((1, 8), 15, dtype=torch.uint8)
    assert packing.pack_rows(codes, 4).tolist() == [[-1]]


@pytest.mark.parametrize("bits", [0, 3, 5, 16])
def test_widths_that_straddle_words_are_refused(bits: int) -> None:
    with pytest.raises(ValueError, match=f"bits={bits}"):
        packing.pack_rows(torch.zeros(1, 8, dtype=torch.uint8), bits)


def test_bad_input_is_refused() -> None:
    with pytest.raises(ValueError, match="code 16 does not fit in 4 bits"):
        packing.pack_rows(torch.full((1, 8), 16, dtype=torch.uint8), 4)
    with pytest.raises(ValueError, match=r"takes torch\.uint8"):
        packing.pack_rows(torch.zeros(1, 8, dtype=torch.int32), 4)
    with pytest.raises(ValueError, match=r"takes torch\.int32"):
        packing.unpack_rows(torch.zeros(1, 1, dtype=torch.int64), 4, 8)
    with pytest.raises(ValueError, match="17 codes of 4 bits take 3"):
        packing.unpack_rows(torch.zeros(1, 2, dtype=torch.int32), 4, 17)
