"""Plans of equal bytes: what the benchmark compares is what it says."""

from __future__ import annotations

from collections import Counter

from kv_plans import best_within, dealt_otherwise, forms

from qtool.formats.kv_plan import KVPlan
from qtool.quantize.cache_search import frontier

SIZES = {"wide": 32, "int8": 17, "k8v4": 13, "int4": 9}
LOSSES = [{"int8": 0.001, "k8v4": 0.01 * n, "int4": 0.02 / n} for n in (1, 2, 3, 4)]
PLAN = KVPlan("auto", ("int8", "int4", "int4", "k8v4"), chosen_from={"layer_losses": LOSSES})


def test_dealt_plans_have_the_same_schemes_and_widest_ones_at_an_end() -> None:
    dealt = dict(dealt_otherwise(PLAN.layers, SIZES, 2))
    assert all(Counter(names) == Counter(PLAN.layers) for names in dealt.values())
    assert dealt["plan, widest first"] == ["int8", "k8v4", "int4", "int4"]
    assert dealt["plan, widest last"] == ["int4", "int4", "k8v4", "int8"]


def test_the_best_mix_is_no_larger_than_the_uniform_cache_and_costs_less_by_sum() -> None:
    found = forms(PLAN, SIZES, 1, ["k8v4"])
    assert found["wide"] == ["wide"] * 4 and found["plan"] == list(PLAN.layers)
    mix = found["best in k8v4's bytes"]
    assert sum(SIZES[name] for name in mix) <= 4 * SIZES["k8v4"]

    def loss(names: list[str]) -> float:
        return sum({"wide": 0.0, **la}[name] for la, name in zip(LOSSES, names, strict=True))

    assert loss(mix) < loss(found["k8v4"])
    front = frontier(SIZES, [{"wide": 0.0, **layer} for layer in LOSSES])
    assert best_within(front, 4 * SIZES["k8v4"]).schemes == tuple(mix)
