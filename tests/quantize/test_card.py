"""The command on a card does the same again, and says nothing of anybody's machine."""

from __future__ import annotations

import shlex
from dataclasses import fields, replace
from pathlib import Path

import click
import pytest
import yaml

from qtool.cli import main
from qtool.quantize.card import command_line, model_card, public_name
from qtool.quantize.options import QuantizeOptions
from qtool.quantize.report import Evaluation, ModuleRecord, Report


def test_only_what_differs_from_the_defaults_is_shown() -> None:
    assert command_line("org/model", QuantizeOptions()) == (
        "qtool quantize org/model --out OUT --method awq"
    )
    options = QuantizeOptions(
        method="rtn", bits=8, symmetric=True, ignore=("layers.0", "down_proj"), overwrite=True
    )
    assert command_line("smollm2-135m", options) == (
        "qtool quantize smollm2-135m --out OUT --method rtn --bits 8 --symmetric "
        "--ignore layers.0 --ignore down_proj"
    )
    assert command_line("m", QuantizeOptions(symmetric=False)).endswith("--asymmetric")


def test_paths_keep_their_last_part(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "my words.txt").write_text("x")
    options = QuantizeOptions(
        calibration=(f"{tmp_path}/my words.txt=2", "org/data@test:text", "builtin=0.5"),
        eval_text=str(tmp_path / "gone.txt"),
    )
    line = command_line(str(tmp_path / "model"), options)
    assert str(tmp_path) not in line
    assert "--calibration 'my words.txt=2' --calibration org/data@test:text" in line
    assert "--calibration builtin=0.5" in line and "--eval-text gone.txt" in line
    assert public_name(str(tmp_path / "model")) == "model"
    assert public_name("org/model") == "org/model"


@pytest.mark.parametrize(
    "options",
    [
        QuantizeOptions(),
        QuantizeOptions(
            method="gptq",
            bits=8,
            group_size="row",
            symmetric=True,
            layers=(r"re:.*layers\.(0|1)\..*=w4-g64", "down_proj=w8"),
            ignore=("layers.2", r"re:.*(gate|up)_proj$"),
            calibration=("my words.txt=2", "org/data@test:a column", "builtin=0.5"),
            eval_text="what's held out.txt",
            lm_head=8,
            skip_first=1,
            skip_last=2,
            samples=3,
            seq_len=300,
            seed=9,
            dtype="fp16",
            formats=("compressed-tensors", "gptq"),
            kv_cache="auto",
            kv_cache_loss=0.25,
            eval_windows=2,
        ),
        QuantizeOptions(method="smoothquant", activations="static"),
        QuantizeOptions(method="fp8", granularity="block", weight_only=False),
        QuantizeOptions(method="fp8", weight_only=True, kv_cache="fp8"),
        QuantizeOptions(method="none", kv_cache="k8v4"),
        QuantizeOptions(symmetric=False),
    ],
    ids=lambda options: options.method,
)
def test_the_command_asks_for_the_same_when_a_shell_has_read_it(options: QuantizeOptions) -> None:
    unseen = {"overwrite": True, "restart": True, "device": "cpu", "strict": True}
    line = command_line("my model", replace(options, **unseen))  # type: ignore[arg-type]
    name, command, *words = shlex.split(line)
    # A command keeps the first names of its --help, which come from the group.
    group = click.Context(main, info_name=name, **main.context_settings)
    context = main.commands[command].make_context(command, words, parent=group)
    assert (name, context.params["model"], context.params["out"]) == (
        "qtool",
        "my model",
        Path("OUT"),
    )
    asked = {field.name: context.params[field.name] for field in fields(QuantizeOptions)}
    assert QuantizeOptions(**asked) == options


@pytest.mark.parametrize(("name", "known"), [("org/model", True), ("model", False)])
def test_only_an_id_of_the_hub_is_a_base_model_for_the_hub(name: str, known: bool) -> None:
    report = Report(
        method="rtn",
        scheme={},
        dtype="bfloat16",
        calibration=None,
        modules=(),
        qtool_version="0",
        base_model=name,
    )
    before, header, _ = model_card(_with_a_module(report)).split("---\n", 2)
    found = yaml.safe_load(header)
    assert before == "" and found["tags"] == ["quantized", "compressed-tensors", "rtn", "qtool"]
    assert (found.get("base_model"), "base_model_relation" in found) == (
        (name, True) if known else (None, False)
    )


@pytest.mark.parametrize("sha256", ["same", "other"])
def test_a_card_does_not_call_text_unseen_that_was_calibrated_on(sha256: str) -> None:
    calibration = {
        "sources": [{"source": "words.txt", "sha256": "same"}],
        "samples": 4,
        "seq_len": 32,
    }
    evaluation = Evaluation(
        engine="e", text="words.txt", text_sha256=sha256, windows=2, seq_len=32, quality={}
    )
    report = Report(
        method="gptq",
        scheme={"symmetric": True},
        dtype="bfloat16",
        calibration=calibration,
        modules=(),
        qtool_version="0",
        evaluation=evaluation,
    )
    card = model_card(_with_a_module(report))
    assert ("which was not calibrated on" in card) == (sha256 == "other")
    assert ("which was calibrated on as well" in card) == (sha256 == "same")


def _with_a_module(report: Report) -> Report:
    record = ModuleRecord(
        name="a",
        asked="W4",
        used="W4",
        weight_error=0.1,
        bits_per_weight=4.5,
        num_weights=10,
    )
    return replace(report, modules=(record,))


def test_a_card_shows_the_pictures_that_are_there() -> None:
    report = _with_a_module(
        Report(
            method="rtn",
            scheme={"symmetric": True},
            dtype="bfloat16",
            calibration=None,
            modules=(),
            qtool_version="0",
        )
    )
    assert "By layer" not in model_card(report)
    assert "![losses by layer](qtool/losses.png)" in model_card(report, ["qtool/losses.png"])
