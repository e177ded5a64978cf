"""The end of a model without its blocks gives what the whole model gives."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from qtool.calibration.families import find_family
from qtool.calibration.logits import FinalLogits, final_logits
from qtool.calibration.walk import Walk, WalkState
from qtool.formats.checkpoint import CheckpointReader

CPU = torch.device("cpu")


@pytest.fixture
def ids() -> Tensor:
    return torch.randint(4, 384, (3, 12), generator=torch.Generator().manual_seed(0))


def _expected(folder: Path, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder)(ids).logits


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2"])
@pytest.mark.parametrize("tie", [True, False])
def test_logits_are_those_of_the_whole_model(
    model_type: str, tie: bool, model_factory, ids: Tensor
) -> None:
    folder = model_factory(model_type=model_type, tie=tie)
    expected = _expected(folder, ids)
    with CheckpointReader(folder) as reader:
        final = final_logits(reader, find_family(reader.config), CPU, ids)
        assert final.vocab_size == 384
        for window, start, end in ((2, 0, 12), (0, 3, 7), (1, 11, 12)):
            found = final.logits(window, start, end)
            torch.testing.assert_close(found, expected[window, start:end], rtol=1e-5, atol=1e-5)


def test_held_out_windows_see_the_original_weights_beside_samples_that_do_not(
    model_factory, ids: Tensor
) -> None:
    folder = model_factory(layers=3)
    samples = ids.flip(0)
    with CheckpointReader(folder) as reader, torch.no_grad():
        family = find_family(reader.config)
        walk = Walk(reader, family, CPU, ids=samples, held_out=ids)
        for block in walk.blocks():
            block.module.mlp.down_proj.weight.mul_(0.5)
        hidden = walk.state.held_out
        assert hidden is not None
        found = FinalLogits(reader, family, CPU, ids, hidden).logits(1, 0, 12)
    torch.testing.assert_close(found, _expected(folder, ids)[1], rtol=1e-5, atol=1e-5)


def test_peaks_are_the_largest_inputs_of_the_original(model_factory, ids: Tensor) -> None:
    folder = model_factory()
    norm = load_file(folder / "model.safetensors")["model.layers.1.input_layernorm.weight"]
    model = AutoModelForCausalLM.from_pretrained(folder)
    with CheckpointReader(folder) as reader, torch.no_grad():
        hidden = model(ids, output_hidden_states=True).hidden_states[1]
        walk = Walk(reader, find_family(reader.config), CPU, held_out=ids)
        walk.advance()
        walk.advance()
    normed = hidden * (hidden.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * norm
    assert len(walk.peaks) == 7
    found = walk.peaks["model.layers.1.self_attn.q_proj"]
    assert found == pytest.approx(float(normed.abs().max()), rel=1e-4)


def test_a_walk_goes_on_from_its_state_to_the_bit(model_factory, ids: Tensor) -> None:
    folder = model_factory(layers=4)

    def halve(walk: Walk, blocks: int) -> None:
        for block in walk.blocks():
            block.module.mlp.down_proj.weight.mul_(0.5)
            walk.advance()
            if walk.state.index == blocks:
                return

    with CheckpointReader(folder) as reader, torch.no_grad():
        family = find_family(reader.config)
        whole = Walk(reader, family, CPU, ids=ids, held_out=ids[:2])
        halve(whole, 4)
        first = Walk(reader, family, CPU, ids=ids, held_out=ids[:2])
        halve(first, 2)
        state = first.state
        assert state.hidden is not None and state.held_out is not None
        copy = WalkState(state.index, state.hidden.clone(), state.held_out.clone())
        second = Walk(reader, family, CPU, ids=ids, held_out=ids[:2], state=copy)
        halve(second, 4)
    for one, other in ((whole.state, second.state),):
        assert one.index == other.index == 4
        assert torch.equal(one.hidden, other.hidden)
        assert torch.equal(one.held_out, other.held_out)
