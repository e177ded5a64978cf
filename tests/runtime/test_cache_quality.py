"""Forms of the cache side by side: the numbers are those of models loaded with each form."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from qtool.errors import UsageError
from qtool.runtime.cache_quality import compare_caches
from qtool.runtime.evaluate import evaluate
from qtool.runtime.kv_schemes import KVScheme, LayerSchemes, Stored
from qtool.runtime.loaded_model import LoadedModel, load_model
from qtool.runtime.options import ModelOptions

NAMES = ["auto", "int8", "int4"]


def _load(folder: Path, name: str = "auto") -> LoadedModel:
    options = ModelOptions(device="cpu", dtype="fp32", backend="reference", kv_cache_dtype=name)
    return load_model(folder, options)


def _windows(length: int) -> torch.Tensor:
    return torch.randint(384, (2, length), generator=torch.Generator().manual_seed(6))


def test_every_row_is_what_evaluate_says_of_a_model_with_that_cache(
    tiny_model_folder: Path,
) -> None:
    windows, steps = _windows(200), list[tuple[int, int]]()
    wide = _load(tiny_model_folder)
    rows = compare_caches(wide, NAMES, windows, lambda *step: steps.append(step))
    assert [row.name for row in rows] == NAMES and steps == [(1, 2), (2, 2)]
    for row in rows:
        decoder = _load(tiny_model_folder, row.name).decoder
        expected = evaluate(decoder, windows, wide.decoder)
        assert row.nll == pytest.approx(expected.nll, abs=1e-9)
        assert row.kl == pytest.approx(expected.kl, abs=1e-9)
        assert row.top1 == pytest.approx(expected.top1)
        assert row.bytes_per_token == decoder.kv_bytes_per_token
    assert rows[0].kl == 0.0 < rows[1].kl < rows[2].kl
    assert [row.bits for row in rows] == [32, 9, 5.25]  # heads of 16, a grid is 1, .5 and 2 bits


def test_positions_cover_a_window_and_weigh_up_to_the_whole(tiny_model_folder: Path) -> None:
    (row,) = compare_caches(_load(tiny_model_folder), ["int4"], _windows(151))
    assert [(part.start, part.end) for part in row.ranges] == [(0, 128), (128, 150)]
    total = sum(part.nll * (part.end - part.start) for part in row.ranges)
    assert total / 150 == pytest.approx(row.nll)


@pytest.mark.parametrize("name", ["k8v4", "int4"])
def test_the_first_page_of_a_cache_by_pages_costs_nothing(
    name: str, tiny_model_folder: Path
) -> None:
    model = _load(tiny_model_folder)
    _, row = compare_caches(model, ["auto", name], _windows(65))
    assert row.kl == 0.0
    _, row = compare_caches(model, ["auto", name], _windows(67))
    assert row.kl > 0.0


def test_a_window_of_one_token_and_an_unknown_form_are_refused(tiny_model_folder: Path) -> None:
    model = _load(tiny_model_folder)
    with pytest.raises(UsageError, match="nothing to predict"):
        compare_caches(model, NAMES, _windows(1))
    with pytest.raises(UsageError, match="'int2'"):
        compare_caches(model, ["int2"], _windows(20))


def test_large_key_biases_hold_where_scales_are_by_channel(
    model_factory: Callable[..., Path], tmp_path: Path
) -> None:
    """Qwen2's keys have channels whose bias is far larger than what tokens add to it."""
    folder = _with_key_biases(model_factory(model_type="qwen2", max_positions=512), 30.0)
    model = _load(folder)
    windows = torch.randint(384, (2, 400), generator=torch.Generator().manual_seed(3))
    count = len(model.decoder.layers)
    forms = ["wide", "int4", "k8v4", LayerSchemes("per token", (_per_token_int4(),) * count)]
    _, by_channel, k8v4, by_token = compare_caches(model, forms, windows)
    assert by_channel.kl < 0.01 and k8v4.kl < 0.01
    assert by_token.kl > 10 * max(by_channel.kl, k8v4.kl)


def _per_token_int4() -> KVScheme:
    """What others store: keys in 4 bits, a scale a token and group."""
    group = Stored(4, "int", "group")
    return KVScheme("per token", group, group, "keys and values in groups of 64")


def _with_key_biases(folder: Path, size: float) -> Path:
    """Every head's keys with two channels, a rotary pair apart, of that size."""
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith("k_proj.bias"):
            heads = tensor.view(2, -1)
            heads[:, heads.shape[1] // 2 - 1] = size
            heads[:, -1] = -size
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_eviction_has_rows_of_its_own_and_costs_something_beyond_its_budget(
    tiny_model_folder: Path,
) -> None:
    model, windows = _load(tiny_model_folder), _windows(250)
    rows = compare_caches(model, ["auto", "int8"], windows, budget=130)
    names = ["auto", "int8", "auto, 128 kept", "int8, 128 kept"]
    assert [row.name for row in rows] == names
    assert [row.kept for row in rows] == [None, None, 128, 128]
    assert rows[2].ranges[0].kl == 0.0 < rows[2].ranges[1].kl
    assert rows[3].ranges[0].kl == rows[1].ranges[0].kl < rows[3].ranges[1].kl
    with pytest.raises(UsageError, match="kv_budget=130: no sequence here is longer than 100"):
        compare_caches(model, ["auto"], _windows(100), budget=130)
