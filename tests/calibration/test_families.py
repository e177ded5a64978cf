"""The table of model families against the modules transformers really builds."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

from qtool.calibration.families import FAMILIES, find_family, head_dim
from qtool.calibration.meta_model import build_on_meta
from qtool.errors import ModelError
from qtool.formats.checkpoint import read_json
from support.offline import OFFLINE_VARIANTS


@pytest.mark.parametrize("variant", OFFLINE_VARIANTS)
def test_a_row_names_every_linear_of_a_block_and_only_modules_that_exist(
    variant: str, model_factory
) -> None:
    folder = model_factory(**OFFLINE_VARIANTS[variant])
    model = build_on_meta(folder)
    family = find_family(read_json(folder / "config.json"))
    block = model.get_submodule(family.blocks)[1]
    linears = {name for name, module in block.named_modules() if isinstance(module, nn.Linear)}
    assert linears - set(family.routers) == set(family.linears)
    assert all(block.get_submodule(name) for name in family.routers)
    for pair in family.pairs:
        assert all(block.get_submodule(name) for name in (pair.source, pair.parent, *pair.targets))


def test_an_unknown_family_is_refused_with_the_list_of_known_ones() -> None:
    with pytest.raises(ModelError, match="'mamba'.*llama, mistral, mixtral"):
        find_family({"model_type": "mamba"})


def test_the_head_width_is_the_explicit_one_where_the_config_has_it() -> None:
    config = {"hidden_size": 64, "num_attention_heads": 4}
    assert head_dim(config) == 16
    assert head_dim({**config, "head_dim": 32}) == 32


def test_a_config_gives_one_prefix_a_block(tiny_model_folder: Path) -> None:
    family = FAMILIES["llama"]
    prefixes = family.block_prefixes({"num_hidden_layers": 3})
    assert prefixes == ["model.layers.0", "model.layers.1", "model.layers.2"]
