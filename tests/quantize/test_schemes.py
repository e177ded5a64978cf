"""Schemes in words: what the command line may say, and what it may not."""

from __future__ import annotations

from typing import Any

import pytest

from qtool.errors import UsageError
from qtool.formats.scheme import fp8_scheme, w8a8_scheme
from qtool.quantize.options import QuantizeOptions
from qtool.quantize.schemes import IntegerWeights, Override, parse_override, parse_scheme


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("w4", IntegerWeights(4)),
        ("W8", IntegerWeights(8)),
        ("w4-sym-g32", IntegerWeights(4, True, 32)),
        ("w4-row-asym", IntegerWeights(4, False, "row")),
        ("w8-asym-g32", IntegerWeights(8, False, 32)),
        ("w8a8", w8a8_scheme()),
        ("w8a8-static", w8a8_scheme(static=True)),
        ("fp8", fp8_scheme("channel")),
        ("fp8-tensor", fp8_scheme("tensor")),
        ("fp8-block", fp8_scheme("block")),
        ("fp8-weights", fp8_scheme(weight_only=True)),
    ],
)
def test_words_become_schemes(text: str, expected: Any) -> None:
    assert parse_scheme(text) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("w3", "'w3' is no scheme; known are w4"),
        ("", "is no scheme"),
        ("w4-sym-asym", "sym and asym contradict"),
        ("w4-g32-row", "contradict"),
        ("w4-g0", "'g0' has no meaning"),
        ("w8a8-g64", "'g64' has no meaning"),
        ("fp8-sym", "'sym' has no meaning"),
        ("fp8-block-tensor", "contradict"),
    ],
)
def test_words_without_meaning_are_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_scheme(text)


def test_the_last_equals_sign_parts_pattern_and_scheme() -> None:
    found = parse_override("re:.*(?=x)down_proj=w8")
    assert found == Override("re:.*(?=x)down_proj", IntegerWeights(8))
    for text in ("down_proj", "=w8", "down_proj="):
        with pytest.raises(UsageError, match="write PATTERN=SCHEME"):
            parse_override(text)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"method": "fp8", "bits": 8}, "bits=8: has no meaning for method fp8, which takes gran"),
        ({"method": "smoothquant", "group_size": 64}, "takes activations"),
        ({"method": "smoothquant", "symmetric": False}, "symmetric=False: has no meaning"),
        ({"method": "awq", "granularity": "block"}, "granularity='block': has no meaning"),
        ({"method": "gptq", "activations": "static"}, "takes bits, group_size, symmetric"),
        ({"method": "rtn", "weight_only": True}, "weight_only=True: has no meaning"),
        ({"method": "fp8", "granularity": "row"}, "choose one of tensor, channel, block"),
        ({"method": "smoothquant", "activations": "fast"}, "choose dynamic or static"),
        ({"method": "rtn", "lm_head": 3}, "choose 4 or 8 bits"),
        ({"method": "rtn", "skip_first": -1}, "0 or more"),
        ({"method": "rtn", "layers": ("down_proj=w5",)}, "layer='down_proj=w5': 'w5' is no scheme"),
    ],
)
def test_options_that_do_not_go_together_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        QuantizeOptions(**values)


def test_only_what_looks_at_data_needs_calibration() -> None:
    needs = {
        ("rtn", ()): False,
        ("rtn+clip", ()): True,
        ("gptq", ()): True,
        ("smoothquant", ()): True,
        ("fp8", ()): False,
        ("rtn", ("down_proj=w8a8",)): False,
        ("rtn", ("down_proj=w8a8-static",)): True,
    }
    for (method, layers), expected in needs.items():
        assert QuantizeOptions(method=method, layers=layers).needs_calibration == expected
    assert QuantizeOptions(method="fp8", granularity="tensor").needs_calibration
    only_weights = QuantizeOptions(method="fp8", granularity="tensor", weight_only=True)
    assert not only_weights.needs_calibration


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, IntegerWeights(8, None, "auto")),
        ({"group_size": "row"}, IntegerWeights(8, None, "row")),
        ({"symmetric": True, "group_size": 64}, IntegerWeights(8, True, 64)),
        # Zero points that 4-bit weights are to have are none that an 8-bit head is to have.
        ({"symmetric": False}, IntegerWeights(8, None, "auto")),
        ({"symmetric": False, "bits": 8}, IntegerWeights(8, False, "auto")),
        ({"formats": ("gptq",), "bits": 8}, IntegerWeights(8, True, "auto")),
    ],
)
def test_a_head_has_the_groups_and_the_grid_of_the_run(
    values: dict[str, Any], expected: IntegerWeights
) -> None:
    assert QuantizeOptions(method="rtn", lm_head=8, **values).schemes.head == expected
