"""A scheme cannot be wrong: every impossible combination is refused with its remedy."""

from __future__ import annotations

from typing import Any

import pytest

from qtool.errors import UsageError
from qtool.formats.scheme import WeightScheme, weight_scheme


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"bits": 3}, "bits=3: portable widths are 4 and 8"),
        ({"strategy": "row"}, "use tensor, channel, group or block"),
        ({"strategy": "group", "group_size": None}, "at least one weight"),
        ({"strategy": "group", "group_size": 0}, "at least one weight"),
        ({"strategy": "channel", "group_size": 64}, "only the group strategy"),
    ],
)
def test_impossible_schemes_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        WeightScheme(**values)


@pytest.mark.parametrize("scheme", [WeightScheme(), weight_scheme(8, True, None)])
def test_a_scheme_survives_json(scheme: WeightScheme) -> None:
    assert WeightScheme.from_dict(scheme.to_dict()) == scheme


def test_unknown_keys_are_refused() -> None:
    with pytest.raises(UsageError, match=r"unknown scheme keys \['bit'\]"):
        WeightScheme.from_dict({"bit": 4})


def test_bits_per_weight_counts_scales_and_zeros() -> None:
    # 4 + (16 + 4) / 64 for asymmetric groups of 64; 4 + 16 / 128 for symmetric ones of 128.
    assert weight_scheme(4, False, 64).bits_per_weight((8, 128)) == 4.3125
    assert weight_scheme(4, True, 128).bits_per_weight((8, 128)) == 4.125


def test_names_for_tables() -> None:
    assert weight_scheme(4, False, 64).describe() == "W4 asym g64"
    assert weight_scheme(8, True, None).describe() == "W8 sym channel"
    assert weight_scheme(8, False, 32).describe() == "W8 asym g32"
