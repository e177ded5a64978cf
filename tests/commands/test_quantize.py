"""The whole command: a checkpoint, and everything that is said about it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file, save_file

from qtool.cli import main
from qtool.commands import quality
from qtool.errors import CheckpointError, ModelError
from qtool.quantize import blocks
from qtool.quantize.job import QuantizedBlock
from qtool.runtime.loaded_model import load_model
from qtool.runtime.options import ModelOptions

CPU = ModelOptions(device="cpu", dtype="fp32")


def _quantize(model: Path, out: Path, *options: str) -> Result:
    words = out.parent / "held-out.txt"
    words.write_text("The model reads the text, then the model writes the next word.\n" * 60)
    texts = ["--eval-text", str(words), "--seq-len", "32"]
    if "rtn" not in options:
        texts += ["--calibration", str(words)]
    arguments = ["--out", str(out), "--samples", "4", "--eval-windows", "2", "--device", "cpu"]
    return CliRunner().invoke(main, ["quantize", str(model), *texts, *arguments, *options])


def _json(path: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return value


@pytest.fixture(scope="module")
def result(tiny_model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("result") / "q"
    done = _quantize(tiny_model_folder, out)
    assert done.exit_code == 0, (done.output, done.exception)
    assert "KL from original" in done.stdout and "tensors read back" in done.stdout
    # The worst module of each kind, in full on 80 columns.
    rows = [line for line in done.stdout.splitlines() if "_proj" in line]
    assert len(rows) == 7 and all("layer 0 " in row or "layer 1 " in row for row in rows)
    return out


def test_the_report_holds_quality_bits_peaks_and_what_was_verified(result: Path) -> None:
    report = _json(result / "qtool" / "report.json")
    evaluation = report["evaluation"]
    assert evaluation["text"] == "held-out.txt" and evaluation["windows"] == 2
    quality = evaluation["quality"]
    assert 0 < quality["kl"] < 0.2 and 0.7 < quality["top1_agreement"] <= 1
    assert abs(quality["nll"] - quality["reference_nll"]) < 0.1
    assert report["verified_tensors"] == len(load_file(result / "model.safetensors"))
    assert len(report["activation_peaks"]) == 14 and report["float16_risks"] == []
    assert 4 < report["bits_per_weight"] < report["bits_per_parameter"] < 16
    phases = [phase["name"] for phase in _json(result / "qtool" / "run.json")["phases"]]
    assert phases == ["calibration", "quantize", "write", "verify", "evaluate"]


def test_the_figures_are_those_of_qtool_eval(result: Path, tiny_model_folder: Path) -> None:
    text = ["--text", str(result.parent / "held-out.txt"), "--seq-len", "256", "--windows", "2"]
    arguments = [str(result), "--reference", str(tiny_model_folder), *text, "--device", "cpu"]
    done = CliRunner().invoke(main, ["eval", *arguments, "--json", "--quiet"])
    found = json.loads(done.stdout.splitlines()[-1])
    for key, value in _json(result / "qtool" / "report.json")["evaluation"]["quality"].items():
        assert found[key] == pytest.approx(value, rel=1e-4, abs=1e-6), key


def test_the_card_gives_the_command_and_no_path(result: Path, tiny_model_folder: Path) -> None:
    card = (result / "README.md").read_text()
    assert f"qtool quantize {tiny_model_folder.name} --out OUT --method awq" in card
    assert "--eval-text held-out.txt" in card and "--seq-len 32" in card
    assert "| perplexity |" in card
    for path in (p for p in result.rglob("*") if p.suffix in (".json", ".md")):
        text = path.read_text()
        assert str(result.parent) not in text and str(tiny_model_folder) not in text, path


def test_plots_are_pictures(result: Path) -> None:
    for name in ("errors.png", "losses.png", "activations.png"):
        assert (result / "qtool" / name).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "fp32"},
        {"dtype": "fp32", "backend": "reference"},
        {"dtype": "bf16"},
        {"dtype": "bf16", "backend": "reference"},
        {"dtype": "bf16", "kv_cache_dtype": "int8"},
        {"dtype": "fp16", "backend": "reference"},
    ],
)
def test_the_probe_passes_in_every_way_of_loading(result: Path, options: dict[str, Any]) -> None:
    if options.get("kv_cache_dtype") and torch.backends.cpu.get_cpu_capability() == "DEFAULT":
        pytest.skip("needs native kernels")
    load_model(result, ModelOptions(device="cpu", **options))


@pytest.mark.parametrize(
    "name", ["model.layers.1.mlp.down_proj.weight_packed", "model.norm.weight"]
)
def test_a_damaged_tensor_is_noticed_at_load_and_can_be_loaded_on_request(
    name: str, result: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(result, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors[name] = tensors[name].flip(0).contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"self-check: .* then, .* now.*--no-self-check"):
        load_model(folder, CPU)
    load_model(folder, replace(CPU, self_check=False))


def test_a_flipped_bit_that_no_answer_tells_of_is_found_by_validate(
    result: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(result, folder)
    assert CliRunner().invoke(main, ["validate", str(folder)]).exit_code == 0
    name = "model.layers.1.mlp.down_proj.weight_packed"
    tensors = load_file(folder / "model.safetensors")
    tensors[name][3, 5] ^= 1
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    load_model(folder, CPU)  # one code, one step off: the probe cannot know
    done = CliRunner().invoke(main, ["validate", str(folder)])
    assert done.exit_code == 1 and f"error digests for all: {name}: has other bytes" in done.stdout


def test_a_result_in_two_formats_has_the_digests_of_each(
    tiny_model_folder: Path, tmp_path: Path
) -> None:
    formats = ["--format", "compressed-tensors", "--format", "awq", "--dtype", "fp16"]
    done = _quantize(tiny_model_folder, tmp_path / "q", "--method", "rtn", *formats)
    assert done.exit_code == 0, (done.output, done.exception)
    for folder in (tmp_path / "q", tmp_path / "q-awq"):
        assert CliRunner().invoke(main, ["validate", str(folder)]).exit_code == 0
    names = {
        frozenset(_json(folder / "qtool" / "digests.json")["sha256"])
        for folder in (tmp_path / "q", tmp_path / "q-awq")
    }
    assert len(names) == 2


def test_a_family_that_our_engine_lacks_is_run_by_transformers_and_the_report_says_so(
    tiny_model_folder: Path, result: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quality, "parse_decoder_config", _not_this_one)
    done = _quantize(tiny_model_folder, tmp_path / "q")
    assert done.exit_code == 0, (done.output, done.exception)
    ours, theirs = (
        _json(folder / "qtool" / "report.json")["evaluation"] for folder in (result, tmp_path / "q")
    )
    assert theirs["engine"].startswith("transformers with dequantized weights")
    assert ours["engine"].startswith("qtool ")
    for key, value in ours["quality"].items():
        assert theirs["quality"][key] == pytest.approx(value, rel=1e-3, abs=1e-5), key
    load_model(tmp_path / "q", CPU)  # its probe is right for our engine too


@pytest.mark.parametrize(
    "options",
    [
        ("--method", "smoothquant", "--activations", "static"),
        ("--method", "fp8", "--granularity", "tensor"),
        ("--method", "gptq", "--layer", "down_proj=fp8", "--layer", "o_proj=w8a8"),
    ],
    ids=" ".join,
)
def test_transformers_rounds_inputs_as_our_engine_does(
    options: tuple[str, ...],
    model_factory: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder, found = model_factory(intermediate_size=256), {}
    for engine in ("qtool ", "transformers with dequantized weights and rounded inputs"):
        out = tmp_path / engine[:5]
        assert _quantize(folder, out, *options).exit_code == 0
        evaluation = _json(out / "qtool" / "report.json")["evaluation"]
        assert evaluation["engine"].startswith(engine)
        found[engine] = evaluation["quality"]["kl"], evaluation["quality"]["nll"]
        monkeypatch.setattr(quality, "parse_decoder_config", _not_this_one)
    ours, theirs = found.values()
    # A value between two codes falls to either side: of 8-bit inputs, a matter of a few percent.
    assert theirs == pytest.approx(ours, rel=0.1) and ours[0] > 0


def _not_this_one(_: object) -> None:
    raise ModelError("not this one")


def test_without_windows_nothing_is_compared(tiny_model_folder: Path, tmp_path: Path) -> None:
    done = _quantize(tiny_model_folder, tmp_path / "q", "--eval-windows", "0", "--method", "rtn")
    assert done.exit_code == 0, (done.output, done.exception)
    assert _json(tmp_path / "q" / "qtool" / "report.json")["evaluation"] is None
    assert not (tmp_path / "q" / "qtool" / "probe.json").exists()


def _fall_back(monkeypatch: pytest.MonkeyPatch) -> None:
    method = blocks.METHODS["awq"]

    def run(job: Any) -> Any:
        for block in method.run(job):
            first, *rest = block.records
            fallen = replace(first, used="W4 asym g64 rtn", fallback="singular")
            yield QuantizedBlock(block.weights, (fallen, *rest), block.changed)

    monkeypatch.setattr(blocks, "METHODS", {"awq": SimpleNamespace(run=run, recipe=method.recipe)})


def test_a_fallback_is_named_everywhere_and_ends_a_strict_run(
    tiny_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _fall_back(monkeypatch)
    name = "model.layers.0.self_attn.q_proj"
    done = _quantize(tiny_model_folder, tmp_path / "q", "--strict")
    assert done.exit_code == 1 and f"{name}: W4 asym g64 rtn (singular)" in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["held-out.txt"]
    done = _quantize(tiny_model_folder, tmp_path / "q")
    assert done.exit_code == 0 and f"{name}: W4 asym g64 rtn instead of" in done.stderr
    assert name in _json(tmp_path / "q" / "qtool" / "report.json")["fallbacks"]
    assert f"`{name}` (singular)" in (tmp_path / "q" / "README.md").read_text()


def test_a_strict_run_takes_no_fallback_over_from_one_that_was_not(
    tiny_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise CheckpointError("the disk is gone")

    _fall_back(monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(quality, "compare", fail)
        assert _quantize(tiny_model_folder, tmp_path / "q").exit_code == 1
    done = _quantize(tiny_model_folder, tmp_path / "q", "--strict")
    assert done.exit_code != 0 and "self_attn.q_proj: W4 asym g64 rtn (singular)" in done.stderr
    assert (tmp_path / "q.work" / "block-00001.json").exists(), "without --strict it goes on"
    assert _quantize(tiny_model_folder, tmp_path / "q").exit_code == 0


def test_activations_beyond_a_quarter_of_float16_are_warned_of(
    model_factory: Callable[..., Path], tmp_path: Path
) -> None:
    folder = model_factory()
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.input_layernorm.weight"][5] = 3e4
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    done = _quantize(folder, tmp_path / "q", "--method", "rtn")
    assert done.exit_code == 0, (done.output, done.exception)
    assert "model.layers.1.self_attn.q_proj: activations reach" in done.stderr
    risks = _json(tmp_path / "q" / "qtool" / "report.json")["float16_risks"]
    assert set(risks) >= {f"model.layers.1.self_attn.{letter}_proj" for letter in "kqv"}
    assert all(name.startswith("model.layers.1.") for name in risks)
    assert "bfloat16 only" in (tmp_path / "q" / "README.md").read_text()
