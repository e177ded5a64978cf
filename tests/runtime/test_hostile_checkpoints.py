"""Quantized checkpoints that are damaged or contradict themselves: one error, never a guess."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from qtool.errors import CheckpointError, QtoolError
from qtool.runtime.loaded_model import load_model
from qtool.runtime.options import ModelOptions
from support.peers import FIXTURES, PEERS

LOADING = ModelOptions(device="cpu", dtype="fp32", backend="reference")
UP = "model.layers.1.mlp.up_proj"

Tensors = dict[str, Tensor]
Config = dict[str, Any]


def _copy(
    name: str,
    folder: Path,
    tensors: Callable[[Tensors], object] = lambda _: None,
    config: Callable[[Config], object] = lambda _: None,
) -> Path:
    """A fixture with changed tensors and config."""
    folder.mkdir(exist_ok=True)
    loaded = load_file(FIXTURES / name / "model.safetensors")
    tensors(loaded)
    save_file(loaded, folder / "model.safetensors")
    values = json.loads((FIXTURES / name / "config.json").read_text())
    config(values)
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def _drop(name: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.pop(f"{UP}.{name}")


def _change(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[Tensors], object]:
    def apply(tensors: Tensors) -> None:
        tensors[f"{UP}.{name}"] = change(tensors[f"{UP}.{name}"]).contiguous()

    return apply


@pytest.mark.parametrize(
    ("name", "tensors", "message"),
    [
        ("w4-asym-rtn", _drop("weight_scale"), f"{UP}: weight_scale missing"),
        ("w4-asym-rtn", _drop("weight_packed"), f"{UP}: weight_packed missing"),
        ("w4-asym-rtn", _drop("weight_zero_point"), f"{UP}: weight_zero_point missing"),
        ("w4-asym-rtn", _drop("weight_shape"), f"{UP}: weight_shape missing"),
        ("w8a8-int8", _drop("weight_scale"), f"{UP}: weight_scale missing"),
        ("fp8-static-kv", _drop("input_scale"), f"{UP}: input_scale missing"),
        ("awq-gemm-asym", _drop("scales"), f"{UP}: scales missing"),
        ("awq-gemm-asym", _drop("qweight"), f"no tensor {UP}.weight"),
        ("gptq-v1-sym", _drop("qzeros"), f"{UP}: qzeros missing"),
        ("gptq-v1-sym-descact", _drop("g_idx"), f"{UP}: g_idx missing"),
        ("w8a8-int8", _change("weight", Tensor.half), f"{UP}: weight is torch.float16"),
        ("fp8-dynamic", _change("weight", Tensor.bfloat16), f"{UP}: weight is torch.bfloat16"),
        (
            "w4-asym-rtn",
            _change("weight_packed", Tensor.long),
            f"{UP}: weight_packed is torch.int64",
        ),
        ("gptq-v2-asym", _change("qweight", lambda t: t[:-1]), f"{UP}: "),
        ("awq-gemm-asym", _change("qweight", lambda t: t[:, :-1]), f"{UP}: "),
        ("awq-gemm-asym", _change("qweight", Tensor.t), f"{UP}: "),
        ("fp8-dynamic", _change("weight_scale", lambda t: t[:5]), f"{UP}: "),
    ],
)
def test_missing_and_wrong_tensors_are_named(
    name: str, tensors: Callable[[Tensors], object], message: str, tmp_path: Path
) -> None:
    folder = _copy(name, tmp_path / "model", tensors)
    with pytest.raises(CheckpointError, match=message):
        load_model(folder, LOADING)


@pytest.mark.parametrize("name", PEERS)
@pytest.mark.parametrize("extra", [f"{UP}.surprise", "model.layers.9.mlp.up_proj.weight", "other"])
def test_a_tensor_too_many_is_named(name: str, extra: str, tmp_path: Path) -> None:
    folder = _copy(name, tmp_path / "model", lambda t: t.update({extra: torch.ones(2)}))
    with pytest.raises(CheckpointError, match=f"1 tensors .* belong to no part .*{extra}"):
        load_model(folder, LOADING)


def test_a_bias_of_zeros_that_old_writers_add_is_no_surprise(tmp_path: Path) -> None:
    def add(value: float) -> Callable[[Tensors], object]:
        return lambda t: t.update({f"{UP}.bias": torch.full((256,), value)})

    load_model(_copy("gptq-v1-sym", tmp_path / "zeros", add(0.0)), LOADING)
    with pytest.raises(CheckpointError, match="up_proj.bias"):
        load_model(_copy("gptq-v1-sym", tmp_path / "ones", add(1.0)), LOADING)


def test_a_label_that_contradicts_the_zeros_is_reported(tmp_path: Path) -> None:
    def relabel(config: Config) -> None:
        config["quantization_config"]["checkpoint_format"] = "gptq_v2"

    right = load_model(FIXTURES / "gptq-v1-sym", LOADING)
    wrong = load_model(_copy("gptq-v1-sym", tmp_path / "model", config=relabel), LOADING)
    assert not any("zeros" in note for note in right.notes)
    assert any("the config says gptq_v2, but zeros are" in note for note in wrong.notes)
    x = torch.randn(2, 128, generator=torch.Generator().manual_seed(0))
    operation = "model.layers.1.mlp.gate_proj, model.layers.1.mlp.up_proj"
    assert torch.equal(right.decoder.linears[operation](x), wrong.decoder.linears[operation](x))


def _rewrite_header(folder: Path, change: Callable[[str], str]) -> None:
    path = folder / "model.safetensors"
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = change(raw[8 : 8 + length].decode()).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + raw[8 + length :])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda text: text.replace("{", f'{{"{UP}.scales":{{}},', 1),
            f"{UP}.scales is there twice",
        ),
        (lambda text: text.replace('"F16"', '"F13"', 1), "dtype 'F13'"),
        (lambda text: text.replace('"shape":[', '"shape":[-1,-', 1), "damaged safetensors header"),
        (lambda text: text.replace('"shape":[', f'"shape":[{2**60},', 1), "damaged safetensors"),
        (
            lambda text: text.replace('"data_offsets":[', '"data_offsets":[-', 1),
            "damaged|promises|cannot read",
        ),
        (lambda text: text[:-9], "damaged safetensors header"),
    ],
)
def test_a_header_that_lies_is_found_before_anything_is_read(
    change: Callable[[str], str], message: str, tmp_path: Path
) -> None:
    folder = _copy("awq-gemm-asym", tmp_path / "model")
    _rewrite_header(folder, change)
    with pytest.raises(CheckpointError, match=message):
        load_model(folder, LOADING)


JUNK: tuple[Any, ...] = (None, -1, 0, 3, 10**12, 1.5, "x", "re:(", [], [1], {}, {"a": {}}, True)


def _mutate(value: Any, source: random.Random) -> Any:
    """One junk value somewhere in a JSON tree, or a key gone."""
    if isinstance(value, dict) and value and source.random() < 0.9:
        key = source.choice(sorted(value))
        if source.random() < 0.2:
            return {k: v for k, v in value.items() if k != key}
        return value | {key: _mutate(value[key], source)}
    if isinstance(value, list) and value and source.random() < 0.5:
        return [_mutate(value[0], source), *value[1:]]
    return source.choice(JUNK)


@pytest.mark.parametrize("name", PEERS)
def test_no_config_however_wrong_is_a_crash(name: str, tmp_path: Path) -> None:
    source = random.Random(name)
    block = json.loads((FIXTURES / name / "config.json").read_text())["quantization_config"]
    folder = _copy(name, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    refused = 0
    for _ in range(40):
        config["quantization_config"] = _mutate(block, source)
        (folder / "config.json").write_text(json.dumps(config))
        try:
            load_model(folder, LOADING)
        except QtoolError:
            refused += 1
    assert refused > 3


@pytest.mark.parametrize("name", ["awq-gemm-asym", "gptq-v1-sym-descact", "fp8-static-kv"])
def test_no_byte_of_a_header_however_wrong_is_a_crash(name: str, tmp_path: Path) -> None:
    source = random.Random(name)
    folder = _copy(name, tmp_path / "model")
    path = folder / "model.safetensors"
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    refused = 0
    for _ in range(60):
        damaged = bytearray(raw)
        damaged[source.randrange(8 + length)] = source.choice(b'0123456789{}[]":,AFI\x00\xff')
        path.write_bytes(damaged)
        try:
            load_model(folder, LOADING)
        except QtoolError:
            refused += 1
    assert refused > 30
