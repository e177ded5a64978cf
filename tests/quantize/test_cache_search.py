"""A scheme for each layer: within the budget, none smaller by sum, fewer bytes for more loss."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qtool.quantize.cache_search import MAX_TRIES, Choice, cheapest, frontier, search

SIZES = {"wide": 32, "int8": 17, "k8v4": 13, "int4": 9}

LOSS = st.floats(0, 1, allow_subnormal=False)
LAYER = st.fixed_dictionaries({"int8": LOSS, "k8v4": LOSS, "int4": LOSS}).map(
    lambda found: {"wide": 0.0, **found}
)
LAYERS = st.lists(LAYER, min_size=1, max_size=4)


def _all(losses: Sequence[dict[str, float]]) -> list[Choice]:
    """Every choice there is."""
    return [
        Choice(
            sum(SIZES[name] for name in names),
            sum(layer[name] for layer, name in zip(losses, names, strict=True)),
            names,
        )
        for names in itertools.product(SIZES, repeat=len(losses))
    ]


@settings(max_examples=60, deadline=None)
@given(LAYERS, st.floats(0, 3))
def test_none_of_all_choices_within_the_budget_is_smaller(
    losses: list[dict[str, float]], budget: float
) -> None:
    choice = cheapest(frontier(SIZES, losses), budget)
    assert choice.loss <= budget
    best = min(other.size for other in _all(losses) if other.loss <= budget)
    assert choice.size == best
    # What a choice says of itself is true.
    assert choice in _all(losses)


@settings(max_examples=60, deadline=None)
@given(LAYERS, st.lists(st.floats(0, 3), min_size=2, max_size=6).map(sorted))
def test_a_larger_budget_never_takes_more_bytes(
    losses: list[dict[str, float]], budgets: list[float]
) -> None:
    front = frontier(SIZES, losses)
    sizes = [cheapest(front, budget).size for budget in budgets]
    assert sizes == sorted(sizes, reverse=True)
    assert [c.size for c in front] == sorted({c.size for c in front})
    assert [c.loss for c in front] == sorted({c.loss for c in front}, reverse=True)


@settings(max_examples=60, deadline=None)
@given(LAYERS, st.floats(0.001, 3), st.floats(0.2, 5))
def test_what_is_found_was_measured_within_the_budget(
    losses: list[dict[str, float]], budget: float, factor: float
) -> None:
    asked = list[tuple[str, ...]]()

    def measure(names: Sequence[str]) -> float:
        """Losses that do not add up: together they cost a factor more, or less."""
        asked.append(tuple(names))
        return factor * sum(layer[name] for layer, name in zip(losses, names, strict=True))

    found = search(frontier(SIZES, losses), budget, measure)
    assert found.loss <= budget and found.tries == len(set(asked)) <= MAX_TRIES + 1
    assert found.choice.schemes in asked and found.loss == measure(found.choice.schemes)


def test_a_sum_that_promised_too_much_is_made_up_for() -> None:
    """Twenty layers, each twice as dear together as alone: the search aims at half the budget."""
    losses = [{"wide": 0.0, "int8": 0.001 * n, "k8v4": 0.002 * n, "int4": 0.004 * n}
              for n in range(1, 21)]  # fmt: skip

    def joint(names: Sequence[str]) -> float:
        return 2 * sum(layer[name] for layer, name in zip(losses, names, strict=True))

    front = frontier(SIZES, losses)
    found = search(front, 0.2, joint)
    assert joint(cheapest(front, 0.2).schemes) > 0.2
    assert found.loss == joint(found.choice.schemes) <= 0.2
    assert found.choice == cheapest(front, 0.1)


def test_where_nothing_fits_the_widest_is_left() -> None:
    losses = [{"wide": 0.0, "int8": 1.0, "k8v4": 1.0, "int4": 1.0}] * 3
    found = search(frontier(SIZES, losses), 1e-6, lambda names: 5.0 * (set(names) != {"wide"}))
    assert found.choice.schemes == ("wide",) * 3 and found.loss == 0.0


@pytest.mark.parametrize("loss", [-1e-9, float("nan"), float("inf")])
def test_a_loss_that_is_none_is_refused(loss: float) -> None:
    with pytest.raises(ValueError, match=r"layer 1: a loss of .* with int4"):
        frontier({"wide": 2, "int4": 1}, [{"wide": 0, "int4": 1}, {"wide": 0, "int4": loss}])


def test_eighty_layers_take_little_time() -> None:
    losses = [
        {"wide": 0.0, "int8": 1e-5 * n, "k8v4": 7e-5 * n, "int4": 3e-4 * (n % 7)} for n in range(80)
    ]
    front = frontier({"wide": 256, "int8": 130, "k8v4": 101, "int4": 72}, losses)
    assert front[-1].loss == 0.0 and 300 < len(front) < 15000
