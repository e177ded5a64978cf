"""Plans come from shapes alone."""

from __future__ import annotations

from typing import Any

import pytest

from qtool.calibration.families import FAMILIES
from qtool.errors import QuantizationError, UsageError
from qtool.formats.scheme import WeightScheme, fp8_scheme, w8a8_scheme
from qtool.quantize.plan import check_not_quantized, plan_schemes
from qtool.quantize.schemes import IntegerWeights, SchemesAsked, parse_override

LLAMA = FAMILIES["llama"]


class _Shapes:
    def __init__(self, hidden: int, intermediate: int) -> None:
        self._widths = {"down_proj": intermediate}
        self._hidden = hidden

    def shape(self, name: str) -> tuple[int, ...]:
        return (8, self._widths.get(name.split(".")[-2], self._hidden))


def _plan(
    group_size: Any, hidden: int = 576, intermediate: int = 1536, layers: int = 2
) -> dict[str, WeightScheme]:
    config = {"num_hidden_layers": layers}
    asked = SchemesAsked(default=IntegerWeights(4, False, group_size))
    return plan_schemes(_Shapes(hidden, intermediate), config, LLAMA, asked)


@pytest.mark.parametrize(
    ("hidden", "intermediate", "expected"), [(576, 1536, 64), (256, 512, 128), (96, 32, 32)]
)
def test_auto_is_the_largest_usual_size_that_divides_every_row(
    hidden: int, intermediate: int, expected: int
) -> None:
    schemes = _plan("auto", hidden, intermediate)
    assert {scheme.group_size for scheme in schemes.values()} == {expected}


def test_the_plan_holds_every_linear_in_true_sequential_order_and_no_head() -> None:
    schemes = _plan("row")
    names = [name.removeprefix("model.layers.0.") for name in list(schemes)[:7]]
    assert names == list(LLAMA.linears)
    assert len(schemes) == 14 and "lm_head" not in schemes
    assert all(scheme.strategy == "channel" for scheme in schemes.values())


def test_a_group_size_that_does_not_divide_names_every_such_module_width_and_remedy() -> None:
    with pytest.raises(QuantizationError) as caught:
        _plan(128)
    message = str(caught.value)
    for layer in range(2):
        for name in LLAMA.linears:
            listed = f"model.layers.{layer}.{name}: rows of 576" in message
            assert listed == (name != "mlp.down_proj"), name
    assert "64, 32, 16, 8, or 'row'" in message
    assert "12 modules" in message


def test_auto_without_a_fitting_size_is_refused_rather_than_changed_to_something_else() -> None:
    with pytest.raises(QuantizationError, match="'row' for one scale a row"):
        _plan("auto", hidden=36, intermediate=52)


@pytest.mark.parametrize("group_size", [0, -1, "tall"])
def test_a_group_size_that_is_none_is_refused(group_size: Any) -> None:
    with pytest.raises(UsageError, match="use a positive number, 'auto' or 'row'"):
        _plan(group_size)


def test_a_quantized_source_is_refused() -> None:
    check_not_quantized({"quantization_config": None})
    with pytest.raises(QuantizationError, match="already quantized.*gptq"):
        check_not_quantized({"quantization_config": {"quant_method": "gptq"}})


def _asked(*layers: str, layers_total: int = 3, **more: Any) -> dict[str, WeightScheme]:
    overrides = tuple(parse_override(text) for text in layers)
    asked = SchemesAsked(default=IntegerWeights(4), overrides=overrides, **more)
    config = {"num_hidden_layers": layers_total, "tie_word_embeddings": True}
    return plan_schemes(_Shapes(576, 1536), config, LLAMA, asked)


def test_overrides_change_the_linears_they_mean_and_the_last_one_holds() -> None:
    schemes = _asked("mlp=w8", "re:.*down_proj=fp8", "layers.1.self_attn=w8a8")
    for name, scheme in schemes.items():
        if "down_proj" in name:
            assert scheme == fp8_scheme()
        elif ".mlp." in name:
            # 576 = 9 * 64: of 128, 64 and 32 the largest that divides the row.
            assert (scheme.bits, scheme.symmetric, scheme.group_size) == (8, True, 64)
        elif "layers.1." in name:
            assert scheme == w8a8_scheme()
        else:
            assert (scheme.bits, scheme.symmetric, scheme.group_size) == (4, False, 64)


def test_an_automatic_group_size_looks_only_at_the_linears_that_ask_for_it() -> None:
    assert _asked("down_proj=w8")["model.layers.0.mlp.down_proj"].group_size == 128


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        ("downproj=w8", "layer='downproj': means none.*near are down_proj"),
        ("q_proj=w8", r"q_proj W8 sym g64, .*k_proj W4 asym g64.*give all of them the same"),
        ("up_proj=fp8", r"gate_proj W4 asym g64, .*up_proj FP8 channel, dynamic"),
        ("down_proj=w8-g100", "group_size=100 does not divide the rows of 2 modules"),
        ("layers.0=w8", "means only linears that are left as they are"),
        ("lm_head=w8", "layer='lm_head': .*the head has --lm-head BITS"),
    ],
)
def test_an_override_that_cannot_be_met_is_refused(layer: str, message: str) -> None:
    with pytest.raises(QuantizationError, match=message):
        _asked(layer, skip_first=1)


def test_blocks_at_both_ends_are_skipped() -> None:
    schemes = _asked(skip_first=1, skip_last=2, layers_total=5)
    assert {name.split(".")[2] for name in schemes} == {"1", "2"}
    with pytest.raises(QuantizationError, match="has 3 blocks, so nothing is left"):
        _asked(skip_first=2, skip_last=1)


def test_a_head_is_planned_last_from_the_tensor_that_holds_it() -> None:
    schemes = _asked(head=IntegerWeights(8))
    assert list(schemes)[-1] == "lm_head"
    assert schemes["lm_head"].describe() == "W8 sym g64"
    with pytest.raises(UsageError, match="lm_head asks for it"):
        _asked(head=IntegerWeights(8), ignore=("lm_head",))
