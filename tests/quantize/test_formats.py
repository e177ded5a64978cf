"""``--format``: the same weights in every format that holds them; others are refused early."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from qtool.errors import CheckpointError, QuantizationError, UsageError
from qtool.formats.dequantized import DequantizedReader
from qtool.quantize.card import command_line
from qtool.quantize.estimate import estimate_run
from qtool.quantize.options import QuantizeOptions
from qtool.quantize.pipeline import Progress, quantize_model
from qtool.runtime.loaded_model import load_model
from qtool.runtime.options import ModelOptions
from support.batches import run_whole
from support.families import FAMILY_VARIANTS
from support.variants import token_ids

REFERENCE = ModelOptions(device="cpu", dtype="fp32", backend="reference")

Factory = Callable[..., Path]


@pytest.fixture(scope="module")
def source(model_factory: Factory) -> Path:
    """A bfloat16 model whose matrices are whole blocks of FP8, or fit into one."""
    return model_factory(dtype=torch.bfloat16, hidden_size=128, intermediate_size=256)


def _options(method: str = "rtn", **values: Any) -> QuantizeOptions:
    return QuantizeOptions(method=method, device="cpu", eval_windows=0, **values)


def _weights(folder: Path) -> dict[str, Tensor]:
    with DequantizedReader(folder) as reader:
        return {name: reader.get(f"{name}.weight") for name in reader.linears.modules()}


def _quantize(source: Path, out: Path, options: QuantizeOptions) -> list[str]:
    """The notes of the run."""
    notes: list[str] = []

    def listen(progress: Progress) -> None:
        if progress.phase == "format":
            notes.append(progress.detail)

    quantize_model(source, out, options, listen)
    return notes


@pytest.mark.parametrize(
    ("formats", "settings"),
    [
        (("compressed-tensors", "awq", "gptq"), {"symmetric": False}),
        (("awq", "gptq", "compressed-tensors"), {"symmetric": True, "group_size": 32}),
        (("gptq", "compressed-tensors"), {"bits": 8, "group_size": "row"}),
        (("fp8", "compressed-tensors"), {"method": "fp8"}),
    ],
)
def test_every_format_holds_the_same_weights_and_runs(
    formats: tuple[str, ...], settings: dict[str, Any], source: Path, tmp_path: Path
) -> None:
    out = tmp_path / "q"
    notes = _quantize(source, out, _options(formats=formats, **settings))
    folders = [out, *(tmp_path / f"q-{name}" for name in formats[1:])]
    assert sorted(tmp_path.iterdir()) == sorted(folders)
    first = _weights(out)
    assert len(first) == 14
    ids = token_ids(20)
    logits = run_whole(load_model(out, REFERENCE).decoder, ids)
    for name, folder in zip(formats, folders, strict=True):
        config = json.loads((folder / "config.json").read_text())
        assert config["quantization_config"]["quant_method"] == name
        again = _weights(folder)
        assert first.keys() == again.keys()
        assert all(torch.equal(first[module], again[module]) for module in first)
        assert torch.equal(run_whole(load_model(folder, REFERENCE).decoder, ids), logits)
    asymmetric = settings.get("symmetric") is False and "gptq" in formats
    assert any("gptq_v2" in note for note in notes) == asymmetric
    assert json.loads((out / "qtool" / "report.json").read_text())["format"] == formats[0]


def test_gptq_files_are_symmetric_unless_asked(source: Path, tmp_path: Path) -> None:
    _quantize(source, tmp_path / "a", _options(formats=("gptq",)))
    block = json.loads((tmp_path / "a" / "config.json").read_text())["quantization_config"]
    assert (block["sym"], block["checkpoint_format"]) == (True, "gptq")
    assert json.loads((tmp_path / "a" / "quantize_config.json").read_text()) == block
    card = (tmp_path / "a" / "README.md").read_text()
    assert "- gptq\n" in card and "compressed-tensors" not in card and "vllm serve" in card
    _quantize(source, tmp_path / "b", _options(formats=("gptq",), symmetric=False))
    block = json.loads((tmp_path / "b" / "config.json").read_text())["quantization_config"]
    assert (block["sym"], block["checkpoint_format"]) == (False, "gptq_v2")
    assert "vllm serve" not in (tmp_path / "b" / "README.md").read_text()


@pytest.mark.parametrize("format", ["awq", "gptq"])
def test_kept_linears_and_a_quantized_head_are_found_again(
    format: str, source: Path, tmp_path: Path
) -> None:
    options = _options(formats=(format,), skip_first=1, lm_head=4)
    quantize_model(source, tmp_path / "q", options)
    loaded = load_model(tmp_path / "q", REFERENCE)
    kept = "model.layers.0.mlp.up_proj"
    assert kept not in loaded.schemes
    assert {"model.layers.1.mlp.up_proj", "lm_head"} < loaded.schemes.keys()
    block = json.loads((tmp_path / "q" / "config.json").read_text())["quantization_config"]
    named = block.get("modules_to_not_convert") or list(block["dynamic"])
    assert any(kept.replace(".", r"\.") in name or kept == name for name in named)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"formats": ("awq",), "bits": 8}, "AWQ holds weights of 4 bits alone"),
        ({"formats": ("awq",), "dtype": "fp32"}, "scales in float32 would be rounded to float16"),
        ({"formats": ("fp8",)}, "fp8 holds FP8 in blocks"),
        ({"formats": ("awq",), "layers": ("down_proj=w4-g32-sym",)}, "awq has one scheme"),
        ({"formats": ("compressed-tensors", "gptq"), "method": "fp8"}, "integer weights alone"),
        ({"formats": ("fp8",), "method": "fp8", "granularity": "channel"}, "FP8 in blocks"),
        ({"formats": ("fp8",), "method": "fp8", "weight_only": True}, "FP8 in blocks"),
    ],
)
def test_what_a_format_does_not_hold_is_refused_before_the_run(
    settings: dict[str, Any], message: str, source: Path, tmp_path: Path
) -> None:
    with pytest.raises(QuantizationError, match=message) as caught:
        quantize_model(source, tmp_path / "q", _options(**settings))
    assert "linears: model.layers.0." in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("formats", "message"),
    [
        (("gguf",), "format='gguf': choose one of"),
        ((), "at least one"),
        (("awq", "awq"), "each of them once"),
    ],
)
def test_formats_that_are_none_are_refused(formats: tuple[str, ...], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        _options(formats=formats)


def test_a_folder_in_the_way_of_any_format_stops_the_run(source: Path, tmp_path: Path) -> None:
    (tmp_path / "q-awq").mkdir()
    options = _options(formats=("compressed-tensors", "awq"))
    with pytest.raises(CheckpointError, match="q-awq exists"):
        quantize_model(source, tmp_path / "q", options)
    assert [path.name for path in tmp_path.iterdir()] == ["q-awq"]


def test_a_forecast_says_what_a_run_would(source: Path, tmp_path: Path) -> None:
    notes: list[str] = []
    options = _options(formats=("compressed-tensors", "gptq"), symmetric=False)
    estimate = estimate_run(
        source,
        tmp_path / "q",
        options,
        lambda progress: notes.append(progress.detail) if progress.phase == "format" else None,
    )
    one = estimate_run(source, tmp_path / "q", _options(symmetric=False))
    assert estimate.result_bytes == 2 * one.result_bytes
    assert any("gptq_v2" in note for note in notes)
    (tmp_path / "q-gptq").mkdir()
    with pytest.raises(CheckpointError, match="q-gptq exists"):
        estimate_run(source, tmp_path / "q", options)


def test_the_command_line_names_each_format() -> None:
    line = command_line("org/model", _options(formats=("awq", "gptq")))
    assert line.endswith("--format awq --format gptq --eval-windows 0")


@pytest.mark.filterwarnings("ignore")
def test_transformers_computes_with_our_fp8_blocks(source: Path, tmp_path: Path) -> None:
    """Without a GPU transformers holds them dequantized, in bfloat16."""
    out = tmp_path / "q"
    quantize_model(source, out, _options("fp8", formats=("fp8",)))
    stored = load_file(out / "model.safetensors")
    assert stored["model.layers.0.mlp.up_proj.weight_scale_inv"].shape == (2, 1)
    model = AutoModelForCausalLM.from_pretrained(out)
    theirs = dict(model.named_parameters())
    for module, weight in _weights(out).items():
        assert torch.equal(theirs[f"{module}.weight"].float(), weight.bfloat16().float()), module


@pytest.mark.parametrize("variant", ["phi3", "mixtral"])
@pytest.mark.parametrize("format", ["awq", "gptq"])
def test_fused_projections_and_experts_run_from_every_format(
    variant: str, format: str, model_factory: Factory, tmp_path: Path
) -> None:
    source = model_factory(dtype=torch.bfloat16, **FAMILY_VARIANTS[variant])
    options = _options(formats=(format, "compressed-tensors"), group_size=32, symmetric=True)
    quantize_model(source, tmp_path / "q", options)
    ids = token_ids(24)
    first, other = tmp_path / "q", tmp_path / "q-compressed-tensors"
    expected = run_whole(load_model(other, REFERENCE).decoder, ids)
    assert torch.equal(run_whole(load_model(first, REFERENCE).decoder, ids), expected)
