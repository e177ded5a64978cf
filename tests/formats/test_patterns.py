"""Which modules a pattern means."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qtool.errors import QtoolError, QuantizationError, UsageError
from qtool.formats.patterns import pattern_matches, select, target_matches

MODULES = [
    f"model.layers.{layer}.{name}"
    for layer in range(12)
    for name in ("self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj")
]


@pytest.mark.parametrize(
    ("pattern", "count"),
    [
        ("layers.0", 4),
        ("layers.1", 4),
        ("down_proj", 12),
        ("mlp", 24),
        ("model.layers.3.mlp", 2),
        ("model.layers.3.mlp.up_proj", 1),
        ("model", 48),
        (r"re:.*layers\.\d\..*down_proj$", 10),
        ("re:model.layers.1", 12),
        ("re:model", 48),
    ],
)
def test_a_pattern_means_whole_dotted_parts_or_a_regular_expression(
    pattern: str, count: int
) -> None:
    assert len(select([pattern], MODULES)) == count


@pytest.mark.parametrize(
    "pattern",
    [
        "",
        "layer",
        "layers.",
        ".layers",
        "proj",
        "odel.layers",
        "re:layers",
        "Linear",
        "*",
        "up.proj",
    ],
)
def test_what_is_no_whole_part_means_nothing_and_is_an_error(pattern: str) -> None:
    with pytest.raises(QuantizationError, match="means none of the model's 48 linears"):
        select([pattern], MODULES)


@pytest.mark.parametrize(
    ("pattern", "near"),
    [
        ("downproj", "down_proj"),
        ("layers.12", "layers.1"),
        ("self_atn.q_proj", "self_attn.q_proj"),
        ("re:mlp.up_proj", "mlp.up_proj"),
        ("zzz", "one is model.layers.0.self_attn.q_proj"),
    ],
)
def test_the_error_lists_names_near_the_pattern(pattern: str, near: str) -> None:
    with pytest.raises(QuantizationError) as caught:
        select(["mlp", pattern], MODULES)
    assert near in str(caught.value).partition("from its start: ")[2]


def test_a_broken_regular_expression_is_refused_with_its_problem() -> None:
    with pytest.raises(UsageError, match=r"'re:\(': is no regular expression \(missing \)"):
        select(["re:("], MODULES)


@given(module=st.sampled_from(MODULES), data=st.data())
def test_every_run_of_parts_means_its_module_and_a_cut_part_does_not(
    module: str, data: st.DataObject
) -> None:
    parts = module.split(".")
    start = data.draw(st.integers(0, len(parts) - 1))
    end = data.draw(st.integers(start + 1, len(parts)))
    run = ".".join(parts[start:end])
    assert pattern_matches(run, module)
    assert not pattern_matches(f"{run}x", module) and not pattern_matches(f"x{run}", module)


@given(st.text(alphabet="re:model.layers*()[]\\d0", max_size=12))
def test_any_text_selects_something_or_is_an_error_of_ours(pattern: str) -> None:
    try:
        assert select([pattern], MODULES)
    except QtoolError as error:
        assert repr(pattern) in str(error)


@pytest.mark.parametrize(
    ("target", "means"),
    [
        ("Linear", True),
        ("model.layers.0.mlp.up_proj", True),
        (r"re:.*up_proj$", True),
        ("re:model.layers.0", True),
        # Parts are our users' grammar, not the exchange format's.
        ("up_proj", False),
        ("model.layers.0", False),
        ("re:up_proj", False),
    ],
)
def test_targets_of_checkpoints_keep_the_grammar_of_compressed_tensors(
    target: str, means: bool
) -> None:
    from compressed_tensors.utils import match_name

    module = "model.layers.0.mlp.up_proj"
    assert target_matches(target, module) is means
    if target != "Linear":  # a class name, which the reference looks up in the module
        assert match_name(module, target) is means
