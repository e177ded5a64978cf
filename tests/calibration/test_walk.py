"""The walk hands out what the whole model would compute, one block in memory at a time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from qtool.calibration.decoder_block import DecoderBlock
from qtool.calibration.families import find_family
from qtool.calibration.observers import AbsMax, MeanAbs
from qtool.calibration.walk import walk_blocks
from qtool.errors import CalibrationError, CheckpointError, ModelError, QuantizationError
from qtool.formats.checkpoint import CheckpointReader
from support.offline import OFFLINE_VARIANTS

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _quiet() -> None:
    transformers_logging.disable_progress_bar()


@pytest.fixture
def ids() -> Tensor:
    return torch.randint(4, 384, (5, 12), generator=torch.Generator().manual_seed(0))


def _walk(folder: Path, ids: Tensor):
    reader = CheckpointReader(folder)
    return walk_blocks(reader, find_family(reader.config), ids, CPU)


def _hidden_states(model: torch.nn.Module, ids: Tensor) -> tuple[Tensor, ...]:
    with torch.no_grad():
        return model(ids, output_hidden_states=True, use_cache=False).hidden_states


@pytest.mark.parametrize("variant", OFFLINE_VARIANTS)
def test_every_block_gets_the_input_the_whole_model_gives_it(
    variant: str, model_factory, ids: Tensor
) -> None:
    # A window shorter than the text makes masks matter where the family has one.
    settings = {"layers": 3} | OFFLINE_VARIANTS[variant]
    if "sliding_window" in settings:
        settings["sliding_window"] = 4
    folder = model_factory(**settings)
    expected = _hidden_states(AutoModelForCausalLM.from_pretrained(folder), ids)
    for block in _walk(folder, ids):
        torch.testing.assert_close(block.inputs, expected[block.index], rtol=1e-5, atol=1e-5)
        assert block.num_tokens == ids.numel()


def test_a_batch_smaller_than_the_samples_gives_the_same_inputs(
    tiny_model_folder: Path, ids: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = [block.inputs.clone() for block in _walk(tiny_model_folder, ids)]
    monkeypatch.setattr("qtool.calibration.decoder_block.BATCH_TOKENS", 2 * ids.shape[1])
    parts = [block.inputs.clone() for block in _walk(tiny_model_folder, ids)]
    for one, other in zip(whole, parts, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_the_next_block_sees_the_error_of_replaced_weights(
    tiny_model_folder: Path, ids: Tensor
) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model_folder)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(0.5)
    expected = _hidden_states(model, ids)[1]
    walk = _walk(tiny_model_folder, ids)
    with torch.no_grad():
        next(walk).module.mlp.up_proj.weight.mul_(0.5)
        torch.testing.assert_close(next(walk).inputs, expected, rtol=1e-5, atol=1e-5)


def test_the_original_flows_beside_what_became_of_it(tiny_model_folder: Path, ids: Tensor) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model_folder)
    expected = _hidden_states(model, ids)
    reader = CheckpointReader(tiny_model_folder)
    with torch.no_grad():
        for block in walk_blocks(reader, find_family(reader.config), ids, CPU, originals=True):
            assert block.original_inputs is not None
            torch.testing.assert_close(
                block.original_inputs, expected[block.index], rtol=1e-5, atol=1e-5
            )
            assert torch.equal(block.inputs, block.original_inputs) == (block.index == 0)
            block.keep_original()
            block.module.mlp.up_proj.weight.mul_(0.5)
            ((now, then),) = block.beside_original(["mlp.down_proj", "input_layernorm"])
            torch.testing.assert_close(then["input_layernorm"], block.original_inputs.flatten(0, 1))
            torch.testing.assert_close(now["input_layernorm"], block.inputs.flatten(0, 1))
            if block.index == 0:
                torch.testing.assert_close(now["mlp.down_proj"], 0.5 * then["mlp.down_proj"])


def test_only_the_current_block_has_weights_in_memory(tiny_model_folder: Path, ids: Tensor) -> None:
    seen: list[DecoderBlock] = []
    for block in _walk(tiny_model_folder, ids):
        for earlier in seen:
            assert all(p.is_meta for p in earlier.module.parameters())
        assert not any(p.is_meta for p in block.module.parameters())
        assert all(p.dtype == torch.float32 for p in block.module.parameters())
        seen.append(block)
    assert len(seen) == 2
    assert all(p.is_meta for block in seen for p in block.module.parameters())


def test_observers_see_every_token_once_at_the_named_linear(
    tiny_model_folder: Path, ids: Tensor
) -> None:
    block = next(_walk(tiny_model_folder, ids))
    peak, mean = AbsMax("q"), MeanAbs("down")
    block.observe({"self_attn.q_proj": [peak], "mlp.down_proj": [mean]})
    normed = block.module.input_layernorm(block.inputs).abs()
    torch.testing.assert_close(peak.result(), normed.amax((0, 1)))
    assert peak.tokens == mean.tokens == ids.numel()
    assert not block.module.self_attn.q_proj._forward_pre_hooks


def test_a_captured_input_runs_the_submodule_alone(tiny_model_folder: Path, ids: Tensor) -> None:
    block = next(_walk(tiny_model_folder, ids))
    hidden, arguments = block.capture("self_attn", (0, 3))
    assert hidden.shape[0] == 2
    output, _ = block.module.self_attn(hidden, **arguments)
    residual = block.inputs[[0, 3]] + output
    rest = block.module.mlp(block.module.post_attention_layernorm(residual))
    torch.testing.assert_close(next(block.run())[[0, 3]], residual + rest)


def test_a_weight_that_is_not_finite_is_an_error_that_names_the_tensor(
    model_factory, ids: Tensor
) -> None:
    folder = model_factory()
    _poison(folder, "model.layers.1.mlp.up_proj.weight", float("nan"))
    with pytest.raises(QuantizationError, match=r"model\.layers\.1\.mlp\.up_proj\.weight holds 1"):
        list(_walk(folder, ids))


def test_overflow_on_the_calibration_text_is_an_error_that_names_the_block(
    model_factory, ids: Tensor
) -> None:
    folder = model_factory()
    _poison(folder, "model.layers.0.mlp.down_proj.weight", 3e38)
    with pytest.raises(CalibrationError, match=r"model\.layers\.0 puts out NaN or infinity"):
        list(_walk(folder, ids))


def test_a_block_without_all_its_tensors_is_an_error(model_factory, ids: Tensor) -> None:
    folder = model_factory()
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.0.self_attn.k_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"layers\.0\.self_attn\.k_proj"):
        next(_walk(folder, ids))


def test_weights_of_another_shape_than_the_configs_are_an_error_that_names_both(
    model_factory, ids: Tensor
) -> None:
    folder = model_factory()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 192}))
    with pytest.raises(
        CheckpointError, match=r"gate_proj\.weight has shape \[128, 64\].*\[192, 64"
    ):
        next(_walk(folder, ids))


def test_a_config_that_transformers_refuses_is_an_error_that_says_why(
    model_factory, ids: Tensor
) -> None:
    folder = model_factory()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rms_norm_eps": "small"}))
    with pytest.raises(ModelError, match="transformers cannot build this model .*rms_norm_eps"):
        next(_walk(folder, ids))


def _poison(folder: Path, name: str, value: float) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors[name] = tensors[name].clone()
    tensors[name][0, 0] = value
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
