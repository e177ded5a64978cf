"""The table of cache schemes: what a token costs, and which blocks a scheme takes."""

from __future__ import annotations

import pytest

from qtool.errors import UsageError
from qtool.runtime.kv_schemes import FP8_STATIC, SCHEMES, kv_scheme


def _bits(name: str, head_dim: int) -> float:
    """Bits of an element of keys and values, scales included, in pages of 64."""
    scheme = FP8_STATIC if name == "fp8 static" else SCHEMES[name]
    return 8 * scheme.page_bytes(64, 1, head_dim, 2) / (2 * 64 * head_dim)


@pytest.mark.parametrize(
    ("name", "head_dim", "bits"),
    [
        ("wide", 64, 16),
        ("int8", 64, 8.25),
        ("int8", 128, 8.125),
        ("fp8", 64, 8.25),
        ("fp8 static", 64, 8),
        ("int4", 64, 4.5),
        ("int4", 256, 4.5),
        ("k8v4", 64, 6.375),
        ("int4", 80, (4.5 + 4.4) / 2),  # 64 does not divide 80: one group of values
    ],
)
def test_an_element_costs_its_bits_and_its_share_of_the_scales(
    name: str, head_dim: int, bits: float
) -> None:
    assert _bits(name, head_dim) == pytest.approx(bits)


def test_heads_and_tokens_multiply_the_bytes() -> None:
    int8 = SCHEMES["int8"]
    assert int8.page_bytes(16, 3, 64, 2) == 3 * 16 * 2 * (64 + 2)
    assert SCHEMES["wide"].page_bytes(16, 3, 64, 4) == 3 * 16 * 2 * 64 * 4


def test_what_has_elements_of_4_bits_is_stored_page_by_page() -> None:
    assert [name for name, scheme in SCHEMES.items() if scheme.has_tails] == ["k8v4", "int4"]
    assert {name: scheme.block_size(None) for name, scheme in SCHEMES.items()} == {
        "wide": 16,
        "fp8": 16,
        "int8": 16,
        "k8v4": 64,
        "int4": 64,
    }
    assert SCHEMES["int8"].block_size(48) == 48


@pytest.mark.parametrize("name", ["k8v4", "int4"])
def test_a_block_size_that_the_scheme_cannot_have_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match=f"block_size=16: the {name} cache.*pages of 64"):
        SCHEMES[name].block_size(16)
    assert SCHEMES[name].block_size(64) == 64


def test_an_unknown_scheme_is_refused_with_those_there_are() -> None:
    with pytest.raises(UsageError, match="'int3': use one of wide, fp8, int8, k8v4, int4"):
        kv_scheme("int3")
