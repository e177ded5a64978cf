"""Checkpoints of other tools: the weights their own code decodes, and the logits that follow."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from qtool.formats.checkpoint import CheckpointReader
from qtool.formats.dequantized import DequantizedReader
from qtool.formats.registry import stored_linears
from qtool.formats.safetensors_file import tensor_digest
from qtool.formats.tensor import QuantizedTensor
from qtool.runtime.kernels.backend import LinearOp, ReorderedInput, SideBySide
from qtool.runtime.kernels.reference import ReferenceBackend
from qtool.runtime.loaded_model import LoadedModel, load_model
from qtool.runtime.loader import load_decoder
from qtool.runtime.options import ModelOptions
from support.batches import run_whole
from support.peers import FIXTURES, PEERS, decoded_as_recorded, expected_of

# Where what decoded the record computed in 16 bits (tests/fixtures/README.md); one step of a zero
# is 50 times as much.
SIXTEEN_BITS = 0.005
FLOAT32 = 1e-5


class UnroundedInputs(ReferenceBackend):
    """The reference without what a scheme does to inputs."""

    def linear(self, weight: Tensor | QuantizedTensor, bias: Tensor | None) -> LinearOp:
        if isinstance(weight, QuantizedTensor):
            plain = replace(weight.scheme, activations=None)
            weight = replace(weight, scheme=plain, input_scale=None)
        return super().linear(weight, bias)


def _load(name: str, **options: object) -> LoadedModel:
    return load_model(FIXTURES / name, ModelOptions(device="cpu", dtype="fp32", **options))


@pytest.mark.parametrize("name", PEERS)
def test_weights_are_those_the_writer_decodes_bit_for_bit(name: str) -> None:
    with CheckpointReader(FIXTURES / name) as reader:
        linears = stored_linears(reader)
        assert linears is not None
        assert len(linears.modules()) == 14
        for weight, digest in expected_of(name).weights_sha256.items():
            tensor = linears.read(weight.removesuffix(".weight"), reader.get)
            assert tensor_digest(decoded_as_recorded(name, tensor)) == digest, weight


@pytest.mark.parametrize("name", PEERS)
def test_logits_are_the_recorded_ones_where_inputs_are_not_rounded(name: str) -> None:
    expected = expected_of(name)
    with CheckpointReader(FIXTURES / name) as reader:
        backend = UnroundedInputs(torch.device("cpu"), torch.float32)
        decoder, stored = load_decoder(reader, backend)
    logits = run_whole(decoder, expected.input_ids)
    bound = SIXTEEN_BITS if name.startswith(("awq", "gptq")) else FLOAT32
    assert float((logits - expected.logits).norm() / expected.logits.norm()) < bound
    assert len(stored.schemes) == 14


@pytest.mark.parametrize("name", PEERS)
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_rounded_inputs_stay_near(name: str, backend: str) -> None:
    expected = expected_of(name)
    loaded = _load(name, backend=backend)
    logits = run_whole(loaded.decoder, expected.input_ids)
    bound = 0.35 if name == "fp8-static-kv" else 0.2
    assert float((logits - expected.logits).abs().max()) < bound


def test_act_order_is_said_in_the_load_plan() -> None:
    loaded = _load("gptq-v1-sym-descact", backend="reference")
    assert any("act-order" in note and "14 linears" in note for note in loaded.notes)
    operations = [op for name, op in loaded.decoder.linears.items() if name != "lm_head"]
    assert all(isinstance(op, ReorderedInput) for op in operations)
    assert {op.kernel for op in operations} == {"torch linear, row tiles, inputs reordered"}


def test_linears_of_one_input_with_other_orders_run_side_by_side(tmp_path: Path) -> None:
    source = FIXTURES / "gptq-v1-sym-descact"
    tensors = load_file(source / "model.safetensors")
    gate, up = (f"model.layers.0.mlp.{name}_proj" for name in ("gate", "up"))
    tensors[f"{up}.g_idx"] = tensors[f"{up}.g_idx"].flip(0).contiguous()
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    loaded = load_model(tmp_path, ModelOptions(device="cpu", dtype="fp32", backend="reference"))
    operation = loaded.decoder.linears[f"{gate}, {up}"]
    assert isinstance(operation, SideBySide)
    with DequantizedReader(tmp_path) as reader:
        weight = torch.cat([reader.get(f"{name}.weight") for name in (gate, up)])
    x = torch.randn(5, 128, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(operation(x), x @ weight.T)


def test_scales_of_the_cache_reach_whoever_loads_the_model() -> None:
    loaded = _load("fp8-static-kv", backend="reference")
    assert list(loaded.kv_scales) == [f"model.layers.{index}.self_attn" for index in (0, 1)]
    assert all(scales.key.shape == (1,) for scales in loaded.kv_scales.values())
    assert loaded.decoder.kv_cache_dtype == "fp8 static (e4m3, scales of the checkpoint)"
    assert loaded.kv_reason == "the checkpoint's kv_cache_scheme"
    told_otherwise = _load("fp8-static-kv", backend="reference", kv_cache_dtype="wide")
    assert told_otherwise.decoder.kv.schemes.is_wide
    assert any("FP8 scales for the cache of 2 layers" in note for note in told_otherwise.notes)
    assert loaded.quantization == "FP8 tensor, static"
