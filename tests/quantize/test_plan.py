"""Plans come from shapes alone."""

from __future__ import annotations

from typing import Any

import pytest

from qtool.calibration.families import FAMILIES
from qtool.errors import QuantizationError, UsageError
from qtool.formats.scheme import WeightScheme
from qtool.quantize.plan import check_not_quantized, plan_schemes
from qtool.quantize.schemes import IntegerWeights, SchemesAsked

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
