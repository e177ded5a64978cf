"""The same codes under another writer's names are the same model."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from qtool.formats.convert import convert_checkpoint
from qtool.formats.scheme import ActivationScheme
from qtool.runtime.loaded_model import LoadedModel, load_model
from qtool.runtime.options import ModelOptions
from support.batches import run_whole
from support.peers import FIXTURES, expected_of

REFERENCE = ModelOptions(device="cpu", dtype="fp32", backend="reference")

Tensors = dict[str, Tensor]


def _relabel(
    name: str, folder: Path, rename: Callable[[str, Tensor], tuple[str, Tensor]], **block: Any
) -> Path:
    """A fixture with its tensors renamed and another ``quantization_config``."""
    folder.mkdir()
    loaded = load_file(FIXTURES / name / "model.safetensors")
    save_file(dict(rename(*item) for item in loaded.items()), folder / "model.safetensors")
    config = json.loads((FIXTURES / name / "config.json").read_text())
    config["quantization_config"] = block or config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _logits(loaded: LoadedModel, name: str) -> Tensor:
    return run_whole(loaded.decoder, expected_of(name).input_ids)


def _to_modelopt(name: str, tensor: Tensor) -> tuple[str, Tensor]:
    for what in "kv":
        name = name.replace(f"self_attn.{what}_scale", f"self_attn.{what}_proj.{what}_scale")
    return name, tensor.reshape(()).float() if name.endswith("_scale") else tensor


def test_modelopt(tmp_path: Path) -> None:
    block = {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}
    folder = _relabel("fp8-static-kv", tmp_path / "modelopt", _to_modelopt, **block)
    found = load_model(folder, REFERENCE)
    known = load_model(FIXTURES / "fp8-static-kv", REFERENCE)
    assert torch.equal(_logits(found, "fp8-static-kv"), _logits(known, "fp8-static-kv"))
    assert found.kv_scales.keys() == known.kv_scales.keys()
    convert_checkpoint(folder, tmp_path / "back", "compressed-tensors")
    back = load_model(tmp_path / "back", REFERENCE)
    assert torch.equal(_logits(back, "fp8-static-kv"), _logits(known, "fp8-static-kv"))
    for attention, scales in known.kv_scales.items():
        assert torch.equal(back.kv_scales[attention].key, scales.key)
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert config["quantization_config"]["kv_cache_scheme"]["type"] == "float"


def _with_float_scales(name: str, tensor: Tensor) -> tuple[str, Tensor]:
    return name, tensor.float() if name.endswith("_scale") else tensor


@pytest.mark.parametrize("bound", [None, 1e6])
def test_fbgemm(bound: float | None, tmp_path: Path) -> None:
    block = {"quant_method": "fbgemm_fp8", "activation_scale_ub": bound}
    folder = _relabel("fp8-dynamic", tmp_path / "fbgemm", _with_float_scales, **block)
    found = load_model(folder, REFERENCE)
    known = load_model(FIXTURES / "fp8-dynamic", REFERENCE)
    assert torch.equal(_logits(found, "fp8-dynamic"), _logits(known, "fp8-dynamic"))
    (inputs,) = {scheme.activations for scheme in found.schemes.values()}
    assert inputs == ActivationScheme("float", "token", bound)


def test_a_bound_of_fbgemm_cuts_off_what_lies_beyond(tmp_path: Path) -> None:
    block = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 0.01}
    folder = _relabel("fp8-dynamic", tmp_path / "fbgemm", _with_float_scales, **block)
    known = load_model(FIXTURES / "fp8-dynamic", REFERENCE)
    found = _logits(load_model(folder, REFERENCE), "fp8-dynamic")
    assert float((found - _logits(known, "fp8-dynamic")).abs().max()) > 0.1


def test_fp8_without_blocks(tmp_path: Path) -> None:
    def rename(name: str, tensor: Tensor) -> tuple[str, Tensor]:
        name = name.replace("weight_scale", "weight_scale_inv")
        return name.replace("input_scale", "activation_scale"), tensor

    block = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}
    folder = _relabel("fp8-static-kv", tmp_path / "fp8", rename, **block)
    # The fp8 block itself promises no cache, where the other's does.
    wide = replace(REFERENCE, kv_cache_dtype="wide")
    found = _logits(load_model(folder, wide), "fp8-static-kv")
    known = load_model(FIXTURES / "fp8-static-kv", wide)
    assert torch.equal(found, _logits(known, "fp8-static-kv"))


@pytest.mark.parametrize("name", ["w8a8-int8", "fp8-dynamic", "fp8-static-kv"])
def test_naive_quantized(name: str, tmp_path: Path) -> None:
    def relabel(block: dict[str, Any]) -> dict[str, Any]:
        group = block["config_groups"]["group_0"] | {"format": "naive-quantized"}
        return block | {"format": "naive-quantized", "config_groups": {"group_0": group}}

    block = json.loads((FIXTURES / name / "config.json").read_text())["quantization_config"]
    folder = _relabel(name, tmp_path / "naive", lambda n, t: (n, t), **relabel(block))
    known = load_model(FIXTURES / name, REFERENCE)
    assert torch.equal(_logits(load_model(folder, REFERENCE), name), _logits(known, name))
