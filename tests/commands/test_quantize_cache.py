"""``qtool quantize --kv-cache``: what the result declares of its cache, and our engine follows."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from qtool.calibration.mix import mixed_blocks, read_mix
from qtool.cli import main
from qtool.errors import ModelError
from qtool.formats.kv_plan import KV_PLAN_PATH, read_kv_plan
from qtool.formats.validation.validate import validate
from qtool.formats.writer import dump_json
from qtool.runtime.cache_quality import compare_caches
from qtool.runtime.kv_schemes import LayerSchemes
from qtool.runtime.loaded_model import load_model
from qtool.runtime.options import ModelOptions
from support.batches import run_whole
from support.smoothing import large_bias
from support.variants import relative_error

CPU = ModelOptions(device="cpu", dtype="fp32")


def _quantize(model: Path, out: Path, *options: str) -> Result:
    words = out.parent / "words.txt"
    words.write_text("The model reads the text, then the model writes the next word.\n" * 200)
    texts = ["--eval-text", str(words), "--eval-windows", "2"]
    if "rtn" not in options or {"fp8", "int8", "k8v4", "auto"} & set(options):
        texts += ["--calibration", str(words), "--samples", "5", "--seq-len", "256"]
    arguments = ["--out", str(out), "--device", "cpu", *texts]
    return CliRunner().invoke(main, ["quantize", str(model), *arguments, *options])


def _json(path: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return value


@pytest.fixture(scope="module")
def fp8(tiny_model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("fp8") / "q"
    done = _quantize(tiny_model_folder, out, "--method", "gptq", "--symmetric", "--kv-cache", "fp8")
    assert done.exit_code == 0, (done.output, done.exception)
    assert "cache of keys and values, fp8" in done.stdout
    return out


class TestFp8:
    """Scales in compressed-tensors' own names: every loader takes them."""

    def test_scales_are_the_largest_key_and_value_over_448(self, fp8: Path) -> None:
        """Held against transformers' own cache of the result, on the calibration text."""
        model = AutoModelForCausalLM.from_pretrained(fp8, dtype=torch.float32)
        words = read_mix((str(fp8.parent / "words.txt"),))
        ids = mixed_blocks(words, fp8, num_samples=5, seq_len=256, seed=0).ids
        with torch.no_grad():
            output = model(ids, use_cache=True)
        cache = output.cache if "cache" in output else output.past_key_values
        tensors = load_file(fp8 / "model.safetensors")
        for index, layer in enumerate(cache.layers):
            for name, stored in (("k_scale", layer.keys), ("v_scale", layer.values)):
                scale = tensors[f"model.layers.{index}.self_attn.{name}"]
                assert scale.shape == (1,)
                # Transformers may store keys in FP8 itself, which leaves the largest as it is.
                assert float(scale) == pytest.approx(float(stored.abs().max()) / 448, rel=0.02)

    def test_transformers_takes_the_weights_and_leaves_the_scales_as_those_of_other_tools(
        self, fp8: Path
    ) -> None:
        ids = torch.arange(40, 80).unsqueeze(0)
        model = AutoModelForCausalLM.from_pretrained(fp8, dtype=torch.float32)
        with torch.no_grad():
            theirs = model(ids).logits[0]
        wide = replace(CPU, kv_cache_dtype="wide", backend="reference")
        ours = run_whole(load_model(fp8, wide).decoder, ids[0].tolist())
        assert relative_error(ours, theirs) < 1e-4

    def test_the_config_declares_them_as_the_reference_package_reads_it(self, fp8: Path) -> None:
        from compressed_tensors.quantization import QuantizationConfig

        block = _json(fp8 / "config.json")["quantization_config"]
        scheme = QuantizationConfig.model_validate(block).kv_cache_scheme
        assert scheme is not None and (scheme.num_bits, scheme.type) == (8, "float")
        assert (scheme.strategy, scheme.symmetric, scheme.dynamic) == ("tensor", True, False)
        assert not [f for f in validate(fp8) if f.check.startswith("cache")]

    def test_our_engine_follows_them_unless_told_otherwise(self, fp8: Path) -> None:
        loaded = load_model(fp8, CPU)
        assert loaded.decoder.kv_cache_dtype.startswith("fp8 static")
        assert not (fp8 / KV_PLAN_PATH).exists()
        wide = load_model(fp8, ModelOptions(device="cpu", dtype="fp32", kv_cache_dtype="wide"))
        assert wide.decoder.kv_cache_dtype == "float32"

    def test_the_report_has_bits_bytes_and_the_cost(self, fp8: Path) -> None:
        record = _json(fp8 / "qtool/report.json")["kv_cache"]
        assert record["layers"] == ["fp8"] * 2 and record["bits"] == 8.0
        assert record["bytes_per_token"] == 2 * 2 * 2 * 16
        assert 0 < record["measured"]["kl"] < 0.01
        card = (fp8 / "README.md").read_text()
        assert "## Cache of keys and values" in card and "--kv-cache fp8" in card

    @pytest.mark.parametrize("method", ["rtn", "smoothquant"])
    def test_every_method_can_have_them(
        self, method: str, tiny_model_folder: Path, tmp_path: Path
    ) -> None:
        done = _quantize(tiny_model_folder, tmp_path / "q", "--method", method, "--kv-cache", "fp8")
        assert done.exit_code == 0, (done.output, done.exception)
        assert load_model(tmp_path / "q", CPU).decoder.kv_cache_dtype.startswith("fp8 static")

    def test_a_format_without_a_place_for_them_is_refused_before_work(
        self, tiny_model_folder: Path, tmp_path: Path
    ) -> None:
        options = ["--method", "rtn", "--kv-cache", "fp8", "--dtype", "fp16"]
        formats = ["--format", "compressed-tensors", "--format", "gptq"]
        done = _quantize(tiny_model_folder, tmp_path / "q", *options, *formats)
        assert done.exit_code == 1 and "'gptq' has no place for the FP8 scales" in done.stderr
        assert [path.name for path in tmp_path.iterdir()] == ["words.txt"]


class TestPlans:
    """``qtool/kv_plan.json``."""

    @pytest.mark.parametrize(("name", "bits"), [("int4", 5.25), ("k8v4", 7.5), ("int8", 9.0)])
    def test_a_uniform_plan_is_written_and_followed(
        self, name: str, bits: float, tiny_model_folder: Path, tmp_path: Path
    ) -> None:
        done = _quantize(tiny_model_folder, tmp_path / "q", "--method", "rtn", "--kv-cache", name)
        assert done.exit_code == 0, (done.output, done.exception)
        plan = read_kv_plan(tmp_path / "q")
        assert plan is not None and plan.layers == (name, name)
        assert plan.bits == bits and plan.bytes_per_token == 128 * bits / 8
        loaded = load_model(tmp_path / "q", CPU)
        assert loaded.decoder.kv_cache_dtype.startswith(name)
        assert loaded.kv_reason == "the checkpoint's qtool/kv_plan.json"
        assert plan.measured is not None and plan.measured["kl"] > 0
        assert (
            _json(tmp_path / "q" / "config.json")["quantization_config"]["kv_cache_scheme"] is None
        )

    @pytest.mark.parametrize("name", ["int8", "auto"])
    def test_keys_of_coarse_layers_have_factors_from_calibration(
        self, name: str, model_factory: Callable[..., Path], tmp_path: Path
    ) -> None:
        source = large_bias(model_factory(model_type="qwen2", layers=4, max_positions=512))
        loss = ["--kv-cache-loss", "0.0003"] if name == "auto" else []
        done = _quantize(source, tmp_path / "q", "--method", "rtn", "--kv-cache", name, *loss)
        assert done.exit_code == 0, (done.output, done.exception)
        plan = read_kv_plan(tmp_path / "q")
        assert plan is not None and plan.measured is not None and plan.key_exponents is not None
        smoothed = [index for index, heads in enumerate(plan.key_exponents) if heads is not None]
        assert smoothed == [i for i, n in enumerate(plan.layers) if n in ("int8", "k8v4")]
        assert all(heads[0][7] >= 4 for heads in plan.key_exponents if heads is not None)
        record = _json(tmp_path / "q/qtool/report.json")["kv_cache"]
        assert record["smoothed_layers"] == len(smoothed) and "key_exponents" not in record
        assert f"{len(smoothed)} of 4" in done.stdout
        loaded = load_model(tmp_path / "q", replace(CPU, strict=True))
        assert loaded.smoothed.by_plan == tuple(smoothed)
        # What it says it costs is what the engine says, and less than without factors.
        words = tmp_path / "words.txt"
        text = mixed_blocks(
            read_mix((str(words),)), tmp_path / "q", num_samples=2, seq_len=300, seed=1
        )
        form = LayerSchemes.of(plan.layers)
        dump_json(tmp_path / "q" / KV_PLAN_PATH, plan.to_dict() | {"key_exponents": None})
        plain = load_model(tmp_path / "q", CPU)
        losses = [compare_caches(m, ["wide", form], text.ids)[1].kl for m in (loaded, plain)]
        assert losses[0] < losses[1] / 2

    def test_the_plan_goes_along_into_other_formats(
        self, tiny_model_folder: Path, tmp_path: Path
    ) -> None:
        formats = ["--format", "compressed-tensors", "--format", "gptq", "--dtype", "fp16"]
        options = ["--method", "rtn", "--kv-cache", "int8", *formats]
        done = _quantize(tiny_model_folder, tmp_path / "q", *options)
        assert done.exit_code == 0, (done.output, done.exception)
        assert read_kv_plan(tmp_path / "q-gptq") == read_kv_plan(tmp_path / "q")

    def test_auto_stays_within_its_budget_and_differs_by_layer(
        self, model_factory: Callable[..., Path], tmp_path: Path
    ) -> None:
        source = model_factory(layers=4, max_positions=512)
        budget = ["--kv-cache", "auto", "--kv-cache-loss", "0.0005"]
        done = _quantize(source, tmp_path / "q", "--method", "rtn", *budget)
        assert done.exit_code == 0, (done.output, done.exception)
        plan = read_kv_plan(tmp_path / "q")
        assert plan is not None and plan.chosen_from is not None and plan.measured is not None
        chosen = plan.chosen_from
        assert 0 < chosen["kl"] <= 0.0005 and chosen["text"] == "words.txt"
        assert len(chosen["layer_losses"]) == 4 and chosen["windows"] == 4
        assert len(set(plan.layers)) > 1
        # What it says it costs is what the engine says.
        loaded = load_model(tmp_path / "q", CPU)
        assert loaded.decoder.kv_cache_dtype.startswith("plan (layers: ")
        command = ["eval", str(tmp_path / "q"), "--kv-cache", "plan,int4", "--windows", "2"]
        text = ["--text", str(tmp_path / "words.txt"), "--seq-len", "512", "--device", "cpu"]
        found = CliRunner().invoke(main, [*command, *text, "--json", "--quiet"])
        rows = {r["name"]: r for r in json.loads(found.stdout.splitlines()[-1])["caches"]}
        assert rows["plan"]["kl"] == pytest.approx(plan.measured["kl"], rel=1e-3)

    def test_the_same_command_writes_the_same_plan(
        self, tiny_model_folder: Path, tmp_path: Path
    ) -> None:
        for name in ("a", "b"):
            done = _quantize(
                tiny_model_folder, tmp_path / name, "--method", "rtn", "--kv-cache", "auto"
            )
            assert done.exit_code == 0, (done.output, done.exception)
        for file in (KV_PLAN_PATH, "qtool/report.json", "README.md"):
            assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()

    def test_a_family_that_our_runtime_lacks_is_refused_before_work(
        self, tiny_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from qtool.commands import cache_plan

        def refuse(_: object) -> None:
            raise ModelError("not this one")

        monkeypatch.setattr(cache_plan, "parse_decoder_config", refuse)
        for name in ("auto", "int4"):
            done = _quantize(tiny_model_folder, tmp_path / "q", "--kv-cache", name)
            assert done.exit_code == 1 and "does not run this model (not this one)" in done.stderr
        assert [path.name for path in tmp_path.iterdir()] == ["words.txt"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--kv-cache-loss", "0.01"), "has no meaning without kv_cache auto"),
        (("--kv-cache", "int4", "--kv-cache-loss", "0.01"), "has no meaning without kv_cache auto"),
        (("--kv-cache", "auto", "--kv-cache-loss", "0"), "above 0"),
        (("--kv-cache", "auto", "--seq-len", "128"), "at least 256 tokens"),
    ],
)
def test_what_does_not_go_together_is_refused(
    options: tuple[str, ...], message: str, tiny_model_folder: Path, tmp_path: Path
) -> None:
    done = _quantize(tiny_model_folder, tmp_path / "q", *options)
    assert done.exit_code == 2 and message in done.output.replace("\n", " ")
