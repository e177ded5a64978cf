"""qtool inspect: what headers say, summed right, for folders and files of every kind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import save_file

from qtool.cli import main
from qtool.formats.kv_plan import KVPlan
from support.drafts import GROUP, HIDDEN, LAYERS, LAYOUTS, LINEARS, VOCAB, make_draft

WEIGHTS = LAYERS * sum(n * k for n, k in LINEARS.values())
TABLES = 2 * VOCAB * HIDDEN
NORMS = (2 * LAYERS + 1) * HIDDEN


def _inspect(path: Path, *options: str) -> Result:
    return CliRunner().invoke(main, ["inspect", str(path), *options])


def _facts(path: Path, *options: str) -> dict[str, Any]:
    result = _inspect(path, "--json", *options)
    assert result.exit_code == 0, (result.output, result.exception)
    facts: dict[str, Any] = json.loads(result.stdout)
    return facts


@pytest.mark.parametrize("layout", LAYOUTS)
def test_parameters_are_the_models_in_every_format(layout: str, tmp_path: Path) -> None:
    facts = _facts(make_draft(layout).write(tmp_path))
    assert facts["parameters"] == WEIGHTS + TABLES + NORMS
    assert facts["architecture"] == "LlamaForCausalLM"
    assert {kind["kind"]: kind["parameters"] for kind in facts["kinds"]} == {
        "embedding": TABLES // 2,
        "attention": LAYERS * 4 * HIDDEN * HIDDEN,
        "mlp": WEIGHTS - LAYERS * 4 * HIDDEN * HIDDEN,
        "norm": NORMS,
        "head": TABLES // 2,
    }


@pytest.mark.parametrize(
    ("layout", "scheme", "bits"),
    [
        ("plain", "bfloat16", 16),
        ("pack-quantized", f"W4 sym g{GROUP}", 4 + 16 / GROUP),
        ("pack-quantized asym", f"W4 asym g{GROUP}", 4 + 20 / GROUP),
        ("int-quantized", "W8A8 channel, dynamic", 8),
        ("float-quantized", "FP8 tensor, static", 8),
        ("awq", f"W4 asym g{GROUP}", 4 + 20 / GROUP),
        ("gptq", f"W4 sym g{GROUP}", 4 + 20 / GROUP),
        ("fp8", "FP8 block, dynamic", 8),
        ("fbgemm_fp8", "FP8 channel, dynamic", 8),
        ("modelopt", "FP8 tensor, static", 8),
    ],
)
def test_modules_have_their_scheme_and_bits(
    layout: str, scheme: str, bits: float, tmp_path: Path
) -> None:
    facts = _facts(make_draft(layout).write(tmp_path))
    (down,) = [row for row in facts["modules"] if row["name"].endswith("down_proj")]
    assert (down["count"], down["shape"], down["scheme"]) == (LAYERS, [256, 512], scheme)
    # Shapes, g_idx and scales a row are a few bits more.
    assert bits <= 8 * down["num_bytes"] / down["parameters"] <= bits + 0.26


def test_bits_per_weight_are_all_bytes_over_all_parameters(tmp_path: Path) -> None:
    draft = make_draft("pack-quantized")
    facts = _facts(draft.write(tmp_path))
    stored = sum(t.numel() * t.element_size() for t in draft.tensors.values())
    assert facts["weight_bytes"] == stored
    assert facts["bits_per_weight"] == pytest.approx(8 * stored / facts["parameters"])
    assert facts["files"] == {"model.safetensors": (tmp_path / "model.safetensors").stat().st_size}


def test_all_has_a_row_for_every_module(tmp_path: Path) -> None:
    folder = make_draft("awq").write(tmp_path)
    names = [row["name"] for row in _facts(folder, "--all")["modules"]]
    assert len(names) == len(LINEARS) * LAYERS + 2 * LAYERS + 3
    assert "model.layers.1.mlp.up_proj" in names
    assert len(_facts(folder)["modules"]) == len(LINEARS) + 5


def test_layers_that_differ_have_rows_of_their_own(tmp_path: Path) -> None:
    draft = make_draft("pack-quantized")
    name = "model.layers.1.mlp.down_proj"
    for part in ("packed", "scale", "shape"):
        del draft.tensors[f"{name}.weight_{part}"]
    draft.tensors[f"{name}.weight"] = torch.zeros(HIDDEN, 512)
    draft.block["ignore"].append(name)
    rows = _facts(draft.write(tmp_path))["modules"]
    down = [row["scheme"] for row in rows if row["name"].endswith("down_proj")]
    assert down == [f"W4 sym g{GROUP}", "float32"]


def test_reports_beside_the_weights_are_shown(tmp_path: Path) -> None:
    draft = make_draft("pack-quantized")
    draft.block["kv_cache_scheme"] = {"num_bits": 8, "type": "float", "strategy": "tensor"}
    folder = draft.write(tmp_path)
    report = {
        "base_model": "org/model",
        "command": "qtool quantize org/model --out out",
        "qtool_version": "0.1.0",
        "calibration": {"tokens": 77, "sources": [{"source": "valid.txt"}]},
        "modules": [],
        "evaluation": {"windows": 4, "quality": {"perplexity": 12.5, "kl": 0.01}},
    }
    (folder / "qtool").mkdir()
    (folder / "qtool" / "report.json").write_text(json.dumps(report))
    plan = KVPlan("auto", ("int8", "int4"), 6.4, 410, measured={"kl": 0.004, "text": "valid.txt"})
    (folder / "qtool" / "kv_plan.json").write_text(json.dumps(plan.to_dict()))
    facts = _facts(folder)
    assert facts["quality"] == report["evaluation"]
    assert facts["manifest"]["base_model"] == "org/model" and "modules" not in facts["manifest"]
    assert facts["kv_plan"] == plan.to_dict()
    assert facts["kv_cache_scheme"]["num_bits"] == 8
    text = _inspect(folder).stdout
    for words in (
        "org/model",
        "77 tokens of valid.txt",
        "perplexity 12.5",
        "1 int8, 1 int4",
        "float",
    ):
        assert words in text


def test_a_model_without_reports_says_nothing_of_them(tmp_path: Path) -> None:
    facts = _facts(make_draft("plain").write(tmp_path))
    assert facts["quality"] is facts["manifest"] is facts["kv_plan"] is None


@pytest.mark.parametrize(
    ("layout", "scheme"),
    [
        ("plain", "bfloat16"),
        ("pack-quantized asym", f"W4 asym g{GROUP}"),
        ("int-quantized", "W8 sym channel"),
        ("awq", f"W4 asym g{GROUP}"),
        ("gptq", f"W4 sym g{GROUP}"),
        ("fp8", "FP8 sym block"),
        ("modelopt", "FP8 sym tensor"),
    ],
)
def test_a_single_file_tells_its_schemes_by_its_tensors(
    layout: str, scheme: str, tmp_path: Path
) -> None:
    path = tmp_path / "shard.safetensors"
    save_file(make_draft(layout).tensors, path)
    facts = _facts(path)
    assert facts["parameters"] == WEIGHTS + TABLES + NORMS
    rows = {row["scheme"] for row in facts["modules"] if row["name"].endswith("up_proj")}
    assert rows == {scheme}


def _gguf(path: Path) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_token_list([f"word {number}" for number in range(50)])
    writer.add_token_scores([0.5] * 50)
    writer.add_tensor("token_embd.weight", np.zeros((50, 64), np.float16))
    quantized = gguf.quants.quantize(np.ones((32, 64), np.float32), gguf.GGMLQuantizationType.Q4_0)
    writer.add_tensor("blk.0.attn_q.weight", quantized, raw_dtype=gguf.GGMLQuantizationType.Q4_0)
    writer.add_tensor("blk.0.attn_norm.weight", np.ones(64, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_gguf_file_is_read_from_its_header(tmp_path: Path) -> None:
    facts = _facts(_gguf(tmp_path / "model.gguf"))
    assert facts["architecture"] == "llama"
    assert facts["parameters"] == 50 * 64 + 32 * 64 + 64
    rows = {row["name"]: (row["kind"], row["scheme"], row["shape"]) for row in facts["modules"]}
    assert rows == {
        "token_embd": ("embedding", "F16", [50, 64]),
        "blk.*.attn_q": ("attention", "Q4_0", [32, 64]),
        "blk.*.attn_norm": ("norm", "F32", [64]),
    }
    assert facts["weight_bytes"] == 50 * 64 * 2 + 32 * 64 // 32 * 18 + 64 * 4


def test_a_gguf_file_cut_anywhere_is_a_clear_error(tmp_path: Path) -> None:
    data = _gguf(tmp_path / "whole.gguf").read_bytes()
    path = tmp_path / "cut.gguf"
    for length in (0, 3, 7, 12, 30, 200, 700, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:length])
        result = _inspect(path)
        assert result.exit_code == 1, length
        assert str(path) in result.stderr and "Traceback" not in result.output


def test_counts_of_a_hostile_gguf_file_are_not_believed(tmp_path: Path) -> None:
    data = bytearray(_gguf(tmp_path / "model.gguf").read_bytes())
    for offset in (8, 16, 24):  # tensors, values, length of the first key
        hostile = bytes(data[:offset]) + b"\xff" * 7 + b"\x00" + bytes(data[offset + 8 :])
        path = tmp_path / "hostile.gguf"
        path.write_bytes(hostile)
        result = _inspect(path)
        assert result.exit_code == 1
        assert "damaged GGUF header" in result.stderr


def test_damaged_and_missing_paths_are_clear_errors(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(b"\xff" * 100)
    assert "truncated or not safetensors" in _inspect(path).stderr
    assert "does not exist" in _inspect(tmp_path / "nothing").stderr
    folder = make_draft("plain").write(tmp_path / "model")
    (folder / "qtool").mkdir()
    (folder / "qtool" / "report.json").write_text("{")
    result = _inspect(folder)
    assert result.exit_code == 1
    assert "report.json cannot be read" in result.stderr
