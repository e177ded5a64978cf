"""Peaks of keys and values: those that transformers' own cache would hold."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from qtool.calibration.cache_peaks import CachePeaks, cache_peaks
from qtool.calibration.families import find_family
from qtool.calibration.walk import Walk
from qtool.errors import CalibrationError
from qtool.formats.checkpoint import CheckpointReader
from support.offline import OFFLINE_VARIANTS

CPU = torch.device("cpu")


def _ids(count: int = 3, length: int = 40) -> torch.Tensor:
    return torch.randint(0, 384, (count, length), generator=torch.Generator().manual_seed(2))


def _open(reader: CheckpointReader, ids: torch.Tensor, *, watch: bool = True) -> Walk:
    family = find_family(reader.config)
    return Walk(reader, family, CPU, ids=ids, watch_cache=watch)


def _peaks_of_transformers(
    folder: Path, ids: torch.Tensor
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Of each layer, largest \\|key\\| [num_kv_heads, head_dim] and \\|value\\|."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        output = model(ids, use_cache=True)
    cache = output.cache if "cache" in output else output.past_key_values
    return [(la.keys.abs().amax((0, 2)), la.values.abs().max()) for la in cache.layers]


@pytest.mark.parametrize("name", OFFLINE_VARIANTS)
@torch.no_grad()
def test_peaks_are_those_of_the_cache_of_every_family(
    name: str, model_factory: Callable[..., Path]
) -> None:
    variant: dict[str, Any] = OFFLINE_VARIANTS[name]
    folder = model_factory(**variant)
    # Short enough that no window lets go of a token.
    ids = _ids(length=20)
    with CheckpointReader(folder) as reader:
        walk = _open(reader, ids)
        found = []
        for block in walk.blocks():
            walk.advance()
            assert walk.cache_peaks is not None and walk.cache_peaks.prefix == block.prefix
            found.append(walk.cache_peaks)
    for peaks, (keys, value) in zip(found, _peaks_of_transformers(folder, ids), strict=True):
        assert torch.tensor(peaks.keys).allclose(keys, rtol=1e-4)
        assert peaks.key == pytest.approx(float(keys.max()), rel=1e-4)
        assert peaks.value == pytest.approx(float(value), rel=1e-4)


@torch.no_grad()
def test_the_weights_a_block_is_left_with_count(tiny_model_folder: Path) -> None:
    with CheckpointReader(tiny_model_folder) as reader:
        walk = _open(reader, _ids())
        block = next(walk.blocks())
        before = cache_peaks(block)
        block.module.get_submodule("self_attn.v_proj").weight.mul_(3.0)
        walk.advance()
    after = walk.cache_peaks
    assert after is not None and after.key == before.key
    assert after.value == pytest.approx(3.0 * before.value, rel=1e-5)


@torch.no_grad()
def test_a_stand_in_for_attention_is_lifted_and_put_back(tiny_model_folder: Path) -> None:
    with CheckpointReader(tiny_model_folder) as reader:
        block = next(_open(reader, _ids()).blocks())
        expected = cache_peaks(block)

        def stand_in(*_: Any, **__: Any) -> None:
            raise AssertionError("nobody runs this")

        attention = block.module.get_submodule("self_attn")
        attention.forward = stand_in
        assert cache_peaks(block) == expected
        assert attention.forward is stand_in


@torch.no_grad()
def test_inputs_and_outputs_are_as_without_watching(tiny_model_folder: Path) -> None:
    states = []
    for watch in (False, True):
        with CheckpointReader(tiny_model_folder) as reader:
            walk = _open(reader, _ids(), watch=watch)
            walk.advance()
            states.append(walk.state.hidden)
    assert states[0] is not None and states[1] is not None
    assert torch.equal(states[0], states[1])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_is_refused(value: float) -> None:
    with pytest.raises(CalibrationError, match=r"a value of model.layers.1 is (nan|inf)"):
        CachePeaks("model.layers.1", ((1.0,),), value)
    with pytest.raises(CalibrationError, match=r"a key of model.layers.1 is (nan|inf)"):
        CachePeaks("model.layers.1", ((1.0, 2.0), (1.0, value)), 1.0)
