"""A layer's loss alone is what the whole comparison says of a cache with that layer coarse."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from qtool.errors import UsageError
from qtool.runtime.cache_quality import compare_caches
from qtool.runtime.cache_sweep import layer_losses
from qtool.runtime.kv_schemes import SCHEMES, LayerSchemes
from qtool.runtime.loaded_model import LoadedModel, load_model
from qtool.runtime.options import ModelOptions
from support.families import FAMILY_VARIANTS

NAMES = ["int4", "k8v4", "int8"]


def _load(folder: Path, **options: object) -> LoadedModel:
    return load_model(folder, ModelOptions(device="cpu", dtype="fp32", **options))  # type: ignore[arg-type]


def _windows(length: int, count: int = 2) -> torch.Tensor:
    return torch.randint(384, (count, length), generator=torch.Generator().manual_seed(6))


@pytest.mark.parametrize("variant", [{"layers": 3}, FAMILY_VARIANTS["gemma3 mha, soft caps"]])
def test_every_loss_is_that_of_a_cache_with_one_coarse_layer(
    variant: dict[str, object], model_factory: Callable[..., Path]
) -> None:
    model = _load(model_factory(**{"max_positions": 512} | variant), backend="reference")
    count, windows, steps = len(model.decoder.layers), _windows(300), list[tuple[int, int]]()
    losses = layer_losses(model.decoder, windows, NAMES, progress=lambda *step: steps.append(step))
    assert steps == [(n + 1, 2 * count * 3) for n in range(2 * count * 3)]
    for layer, found in enumerate(losses):
        forms = [["wide"] * count for _ in NAMES]
        for form, name in zip(forms, NAMES, strict=True):
            form[layer] = name
        rows = compare_caches(model, ["wide", *map(LayerSchemes.of, forms)], windows)
        for name, row in zip(NAMES, rows[1:], strict=True):
            assert found[name] == pytest.approx(row.kl, rel=1e-4, abs=1e-9), (layer, name)
        assert found["int4"] > found["int8"] > 0 and found["k8v4"] > found["int8"]


def test_a_wide_layer_costs_nothing_and_the_models_own_form_does_not_matter(
    tiny_model_folder: Path,
) -> None:
    windows = _windows(100, 1)
    found = [
        layer_losses(
            _load(tiny_model_folder, kv_cache_dtype=name).decoder, windows, ["wide", "int8"]
        )
        for name in ("wide", "int4")
    ]
    assert found[0] == found[1]
    assert all(layer["wide"] == 0.0 < layer["int8"] for layer in found[0])


def test_positions_that_are_left_out_change_the_mean_and_nothing_else(
    tiny_model_folder: Path,
) -> None:
    """At the least, only the first position is left."""
    decoder, windows = _load(tiny_model_folder).decoder, _windows(202, 1)
    whole, first = (layer_losses(decoder, w, ["int8"]) for w in (windows, windows[:, :2]))
    even = layer_losses(decoder, windows, ["int8"], every=2)
    assert even != whole
    one = layer_losses(decoder, windows, ["int8"], every=1000)
    assert [layer["int8"] for layer in one] == pytest.approx(
        [layer["int8"] for layer in first], rel=0.05
    )


def test_what_cannot_be_swept_is_refused(tiny_model_folder: Path) -> None:
    decoder = _load(tiny_model_folder).decoder
    with pytest.raises(UsageError, match="nothing to predict"):
        layer_losses(decoder, _windows(1), NAMES)
    with pytest.raises(UsageError, match="'int2'"):
        layer_losses(decoder, _windows(20), ["int2"])


def test_schemes_of_a_plan_are_rows_of_the_table_by_name() -> None:
    mixed = LayerSchemes.of(["int4", "wide"])
    assert mixed.layers == (SCHEMES["int4"], SCHEMES["wide"]) and mixed.name == "plan"
    assert LayerSchemes.of(["int8", "int8"]) == LayerSchemes.uniform(SCHEMES["int8"], 2)
