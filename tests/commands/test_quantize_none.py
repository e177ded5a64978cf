"""``qtool quantize --method none``: a model as it is, with a smaller cache, in whoever loads it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from transformers import AutoModelForCausalLM

from qtool import LLM, SamplingParams
from qtool.cli import main
from qtool.formats.kv_plan import KV_PLAN_PATH
from qtool.formats.validation.validate import validate
from qtool.runtime.loaded_model import load_model
from qtool.runtime.options import ModelOptions
from support.batches import run_whole

CPU = ModelOptions(device="cpu", dtype="fp32")
FORMS = ("fp8", "int4", "auto")


def _quantize(model: Path, out: Path, *options: str, calibrated: bool = True) -> Result:
    words = out.parent / "words.txt"
    words.write_text("The model reads the text, then the model writes the next word.\n" * 200)
    texts = ["--eval-text", str(words), "--eval-windows", "2"]
    if calibrated:
        texts += ["--calibration", str(words), "--samples", "5", "--seq-len", "256"]
    arguments = ["--method", "none", "--out", str(out), "--device", "cpu", *texts]
    return CliRunner().invoke(main, ["quantize", str(model), *arguments, *options])


@dataclass(frozen=True, slots=True)
class Made:
    """A source, what was made of it, and what the terminal said."""

    source: Path
    out: Path
    stdout: str

    @property
    def report(self) -> dict[str, Any]:
        """``qtool/report.json``."""
        value: dict[str, Any] = json.loads((self.out / "qtool/report.json").read_text())
        return value


@pytest.fixture(scope="module", params=FORMS)
def made(
    request: pytest.FixtureRequest,
    model_factory: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Made]:
    name, folder = request.param, tmp_path_factory.mktemp("none")
    source = model_factory(layers=3, tie=False, dtype=torch.bfloat16, max_shard_size="60KB")
    asked = ["--kv-cache", name, *(["--kv-cache-loss", "0.001"] if name == "auto" else [])]
    done = _quantize(source, folder / "q", *asked, calibrated=name != "int4")
    assert done.exit_code == 0, (done.output, done.exception)
    yield Made(source, folder / "q", done.stdout)


def test_transformers_loads_it_with_the_logits_of_the_source(made: Made) -> None:
    ids = torch.arange(40, 90).unsqueeze(0)
    models = [
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        for folder in (made.source, made.out)
    ]
    with torch.no_grad():
        before, after = (model(ids).logits for model in models)
    assert torch.equal(before, after)
    names = [[name for name, _ in model.named_parameters()] for model in models]
    assert names[0] == names[1]


def test_our_runtime_computes_what_it_computes_of_the_source(made: Made) -> None:
    """Beside the cache: in wide pages both have the same bits, and the same kernels."""
    wide = replace(CPU, kv_cache_dtype="wide")
    before, after = (load_model(folder, wide).decoder for folder in (made.source, made.out))
    ids = list(range(40, 90))
    assert torch.equal(run_whole(before, ids), run_whole(after, ids))
    assert type(before) is type(after)
    kinds = [{n: type(op) for n, op in d.linears.items()} for d in (before, after)]
    assert kinds[0] == kinds[1]


def test_its_cache_is_followed_unasked(made: Made) -> None:
    loaded = load_model(made.out, CPU)
    record, used = made.report["kv_cache"], loaded.decoder.kv.schemes.layers
    if record["name"] == "fp8":
        assert loaded.decoder.kv_cache_dtype.startswith("fp8 static")
        assert not (made.out / KV_PLAN_PATH).exists()
    else:
        assert loaded.kv_reason == "the checkpoint's qtool/kv_plan.json"
        assert [scheme.name for scheme in used] == record["layers"]
        assert (len(set(record["layers"])) > 1) == (record["name"] == "auto")
    assert load_model(made.source, CPU).decoder.kv_cache_dtype == "float32"


def test_eval_finds_the_cost_that_the_result_names(made: Made) -> None:
    words = str(made.out.parent / "words.txt")
    command = ["eval", str(made.out), "--kv-cache", "plan", "--windows", "2", "--text", words]
    command += ["--seq-len", "256", "--device", "cpu", "--json", "--quiet"]
    found = CliRunner().invoke(main, command)
    assert found.exit_code == 0, (found.output, found.exception)
    rows = {r["name"]: r for r in json.loads(found.stdout.splitlines()[-1])["caches"]}
    measured = made.report["kv_cache"]["measured"]
    assert measured["seq_len"] == 256 and measured["kl"] > 0
    assert rows["plan"]["kl"] == pytest.approx(measured["kl"], rel=1e-3)


def test_the_terminal_shows_the_cache_and_no_table_of_modules(made: Made) -> None:
    name = made.report["kv_cache"]["name"]
    assert f"cache of keys and values, {name}" in made.stdout
    assert "weights as they are, 16.00 bits each" in made.stdout
    assert "tensors read back as they were written" in made.stdout.replace("\n", " ")
    for absent in ("weight error", "top-1", "original", "smaller"):
        assert absent not in made.stdout


def test_report_and_card_speak_of_the_cache_alone(made: Made) -> None:
    report, card = made.report, (made.out / "README.md").read_text()
    assert report["modules"] == [] and report["evaluation"] is None and report["scheme"] is None
    assert round(report["bits_per_weight"], 2) == round(report["bits_per_parameter"], 2) == 16.0
    name = report["kv_cache"]["name"]
    assert f", {name} cache\n" in card and "with its weights as they are, in bfloat16" in card
    assert "16.00 bits per parameter" in card and "## Cache of keys and values" in card
    assert f"--method none --kv-cache {name}" in card
    assert "## Quality" not in card and "quantized to" not in card
    tags = card.split("---")[1]
    assert ("- compressed-tensors" in tags) == (name == "fp8") and "- none" not in tags


def test_every_loader_takes_it(made: Made) -> None:
    findings = validate(made.out)
    assert {finding.check for finding in findings} <= {"tensor-parallel"}
    shown = CliRunner().invoke(main, ["inspect", str(made.out), "--json"])
    assert shown.exit_code == 0, (shown.output, shown.exception)


def test_generation_is_that_of_the_source_with_such_a_cache(
    tiny_model_folder: Path, tmp_path: Path
) -> None:
    done = _quantize(tiny_model_folder, tmp_path / "q", "--kv-cache", "int4", calibrated=False)
    assert done.exit_code == 0, (done.output, done.exception)
    tokens = []
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    for folder, more in ((tiny_model_folder, {"kv_cache_dtype": "int4"}), (tmp_path / "q", {})):
        settings = {"device": "cpu", "dtype": "fp32", "kv_cache_memory": 10**7, **more}
        with LLM(model=str(folder), **settings) as llm:  # type: ignore[arg-type]
            tokens.append(llm.generate("The quick brown fox", params)[0].outputs[0].token_ids)
    assert tokens[0] == tokens[1] and len(tokens[0]) == 100


def test_a_weight_that_was_never_rounded_is_not_converted(made: Made) -> None:
    out = made.out.parent / "converted"
    done = CliRunner().invoke(
        main, ["convert", str(made.out), "--format", "gptq", "--out", str(out)]
    )
    assert done.exit_code == 2 and "is not quantized; qtool quantize --format gptq" in done.stderr
    assert not out.exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "method='none': leaves weights as they are, so without kv_cache there is nothing"),
        (("--kv-cache", "fp8", "--bits", "8"), "bits=8: has no meaning for method none"),
        (("--kv-cache", "fp8", "--group-size", "64"), "group_size=64: has no meaning"),
        (("--kv-cache", "fp8", "--asymmetric"), "symmetric=False: has no meaning"),
        (("--kv-cache", "fp8", "--activations", "static"), "activations='static': has no meaning"),
        (("--kv-cache", "fp8", "--granularity", "block"), "granularity='block': has no meaning"),
        (("--kv-cache", "fp8", "--weight-only"), "weight_only=True: has no meaning"),
        (("--kv-cache", "fp8", "--layer", "down_proj=w8"), "layers=('down_proj=w8',): has no"),
        (("--kv-cache", "fp8", "--lm-head", "8"), "lm_head=8: has no meaning"),
        (("--kv-cache", "fp8", "--ignore", "layers.0"), "ignore=('layers.0',): has no meaning"),
        (("--kv-cache", "fp8", "--skip-first", "1"), "skip_first=1: has no meaning"),
        (("--kv-cache", "fp8", "--skip-last", "1"), "skip_last=1: has no meaning"),
        (("--kv-cache", "fp8", "--dtype", "fp16"), "dtype='fp16': has no meaning"),
        (("--kv-cache", "int4", "--format", "awq"), "are layouts of quantized weights"),
        (
            ("--kv-cache", "fp8", "--format", "compressed-tensors", "--format", "gptq"),
            "leaves weights as they are; leave format out",
        ),
        (("--kv-cache", "int4", "--kv-cache-loss", "0.01"), "has no meaning without kv_cache auto"),
        (("--kv-cache", "int4"), "--calibration: method none uses no calibration text"),
    ],
)
def test_what_has_no_meaning_is_refused_before_work(
    options: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    """The model is not even looked for."""
    done = _quantize(tmp_path / "no model", tmp_path / "q", *options)
    assert done.exit_code == 2 and message in done.output.replace("\n", " ")
    assert [path.name for path in tmp_path.iterdir()] == ["words.txt"]


def test_a_quantized_source_is_refused(tiny_model_folder: Path, tmp_path: Path) -> None:
    first = _quantize(tiny_model_folder, tmp_path / "a", "--kv-cache", "fp8")
    assert first.exit_code == 0, (first.output, first.exception)
    again = _quantize(tmp_path / "a", tmp_path / "b", "--kv-cache", "int4", calibrated=False)
    assert again.exit_code == 1 and "already quantized" in again.stderr
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("name", FORMS)
def test_a_forecast_names_what_is_done_and_writes_nothing(
    name: str, tiny_model_folder: Path, tmp_path: Path
) -> None:
    options = ("--kv-cache", name, "--dry-run", "--quiet")
    calibrated = name != "int4"
    shown = _quantize(tiny_model_folder, tmp_path / "q", *options, calibrated=calibrated)
    assert shown.exit_code == 0, (shown.output, shown.exception)
    assert "weights: as they are" in shown.stdout and f"KV cache: {name}" in shown.stdout
    assert "evaluate" not in shown.stdout and "modules" not in shown.stdout
    told = _quantize(tiny_model_folder, tmp_path / "q", *options, "--json", calibrated=calibrated)
    found = json.loads(told.stdout.splitlines()[-1])
    names = [phase["name"] for phase in found["phases"]]
    assert names == ["calibration", "quantize", "write", "verify", "kv cache"]
    assert found["phases"][-1]["seconds"] > 0
    # Hidden states twice, where samples pass; no weights.
    assert found["work_bytes"] == (2 * 5 * 256 * 64 * 4 if calibrated else 0)
    assert {module["scheme"] for module in found["modules"]} == {"as it is"}
    assert [path.name for path in tmp_path.iterdir()] == ["words.txt"]
