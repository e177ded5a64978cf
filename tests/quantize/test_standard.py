"""Decoders that no row describes: quantized by what needs no smoothing, measured, and loaded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

from qtool.cli import main
from qtool.errors import UsageError
from qtool.formats.checkpoint import CheckpointReader
from qtool.formats.dequantized import DequantizedReader
from qtool.quantize.options import QuantizeOptions
from qtool.quantize.prepare import plan_job
from support.variants import relative_error, token_ids

# Sandwiched norms, attention and MLP side by side, and names of its own with fused projections.
STANDARD = {
    "olmo2": {},
    "cohere": {},
    "stablelm": {"tie": False, "use_qkv_bias": True},
    "gpt_neox": {"tie": False},
}


def _quantize(model: Path, out: Path, *options: str) -> Result:
    arguments = ["--eval-text", __file__, "--eval-windows", "1", "--device", "cpu", *options]
    if "gptq" in options:
        arguments += ["--calibration", __file__, "--samples", "2", "--seq-len", "32"]
    return CliRunner().invoke(main, ["quantize", str(model), "--out", str(out), *arguments])


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`:UserWarning")
@pytest.mark.parametrize("model_type", STANDARD)
@pytest.mark.parametrize(
    "options",
    [
        ("--method", "gptq", "--symmetric", "--group-size", "32", "--strict"),
        ("--method", "rtn", "--bits", "8", "--group-size", "row"),
        ("--method", "fp8", "--granularity", "channel", "--skip-first", "1"),
    ],
    ids=lambda options: options[1],
)
def test_every_linear_is_quantized_and_transformers_runs_what_was_measured(
    model_type: str, options: tuple[str, ...], model_factory: Callable[..., Path], tmp_path: Path
) -> None:
    folder = model_factory(
        model_type=model_type, pad_token_id=0, intermediate_size=256, **STANDARD[model_type]
    )
    done = _quantize(folder, tmp_path / "q", *options)
    assert done.exit_code == 0, (done.output, done.exception)
    assert f"model_type='{model_type}' is no family that qtool knows" in done.stderr
    report = json.loads((tmp_path / "q" / "qtool" / "report.json").read_text())
    inputs = " and rounded inputs" if "fp8" in options else ""
    engine = report["evaluation"]["engine"]
    assert engine == f"transformers with dequantized weights{inputs}, float32"
    assert 0 < report["evaluation"]["quality"]["kl"] < 1
    with CheckpointReader(folder) as reader:
        entries = reader.entries.items()
        matrices = {n.removesuffix(".weight") for n, entry in entries if len(entry.shape) == 2}
    ignored = _ignored(tmp_path / "q")
    assert "lm_head" in ignored and ("embed_out" in ignored) == (model_type == "gpt_neox")
    inside = {name for name in matrices if ".layers.1." in name}
    assert inside == {r["name"] for r in report["modules"] if ".layers.1." in r["name"]}
    _assert_loads_as_written(tmp_path / "q", folder)


def _ignored(folder: Path) -> list[str]:
    with CheckpointReader(folder) as reader:
        names: list[str] = reader.config["quantization_config"]["ignore"]
    return names


def _assert_loads_as_written(result: Path, original: Path) -> None:
    """Transformers' loader of compressed tensors, against the original with our weights."""
    ids = torch.tensor([token_ids(24)])
    loaded = AutoModelForCausalLM.from_pretrained(
        result, dtype=torch.float32, quantization_config=CompressedTensorsConfig(dequantize=True)
    )
    plain = AutoModelForCausalLM.from_pretrained(original, dtype=torch.float32)
    with DequantizedReader(result) as reader, torch.no_grad():
        for module in reader.linears.modules():
            plain.get_submodule(module).weight.copy_(reader.get(f"{module}.weight"))
        assert relative_error(loaded(ids).logits, plain(ids).logits) < 1e-4


@pytest.mark.parametrize("method", ["awq", "awq+gptq", "smoothquant", "smoothquant+gptq"])
def test_methods_that_smooth_are_refused_and_others_named(
    method: str, model_factory: Callable[..., Path]
) -> None:
    folder = model_factory(model_type="stablelm", pad_token_id=0)
    with (
        CheckpointReader(folder) as reader,
        pytest.raises(UsageError, match=rf"'{method.replace('+', '.')}': smooths.*use .*gptq"),
    ):
        plan_job(reader, QuantizeOptions(method=method, seq_len=64))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_cache": "fp8"}, "kv_cache='fp8': of model_type='gpt_neox' it is not known where"),
        ({"lm_head": 8}, "lm_head=8: the head of model_type='gpt_neox' is embed_out on disk"),
    ],
)
def test_what_nobody_would_read_is_refused(
    options: dict[str, Any], message: str, model_factory: Callable[..., Path]
) -> None:
    with (
        CheckpointReader(model_factory(model_type="gpt_neox", tie=False)) as reader,
        pytest.raises(UsageError, match=message),
    ):
        plan_job(reader, QuantizeOptions(method="rtn", seq_len=64, **options))


@pytest.mark.parametrize("tie", [True, False])
def test_a_head_is_quantized_from_the_tensor_that_holds_it(
    tie: bool, model_factory: Callable[..., Path], tmp_path: Path
) -> None:
    folder = model_factory(model_type="opt", tie=tie, pad_token_id=0, word_embed_proj_dim=64)
    options = ("--method", "rtn", "--group-size", "32", "--lm-head", "8")
    done = _quantize(folder, tmp_path / "q", *options)
    assert done.exit_code == 0, (done.output, done.exception)
    name = "model.decoder.embed_tokens.weight" if tie else "lm_head.weight"
    with CheckpointReader(folder) as source, DequantizedReader(tmp_path / "q") as result:
        assert result.config["tie_word_embeddings"] is False
        assert relative_error(result.get("lm_head.weight"), source.get(name)) < 0.01


def test_a_dry_run_says_the_same(model_factory: Callable[..., Path], tmp_path: Path) -> None:
    folder = model_factory(model_type="gpt_neox")
    done = _quantize(folder, tmp_path / "q", "--method", "gptq", "--dry-run", "--json", "--quiet")
    assert done.exit_code == 0, (done.output, done.exception)
    plans: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])["modules"]
    assert {plan["name"].rpartition(".")[2] for plan in plans} == {
        *("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h")
    }
