"""qtool validate: exit codes, the JSON a script reads, and the end of a quantization."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from qtool.cli import main
from qtool.formats.validation.finding import Finding
from qtool.formats.validation.validate import is_valid, validate
from support.drafts import make_draft

ModelFactory = Callable[..., Path]


def _validate(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["validate", *map(str, arguments)])


@pytest.fixture
def refused_by_vllm(tmp_path: Path) -> Path:
    """Activation order, which qtool and transformers read."""
    draft = make_draft("gptq")
    draft.block["desc_act"] = True
    return draft.write(tmp_path / "model")


def test_a_whole_checkpoint_exits_with_0(tmp_path: Path) -> None:
    result = _validate(make_draft("pack-quantized").write(tmp_path))
    assert result.exit_code == 0, result.output
    assert "loads in vllm, transformers, qtool" in result.stdout


def test_an_error_exits_with_1_and_says_what_to_do(refused_by_vllm: Path) -> None:
    result = _validate(refused_by_vllm)
    assert result.exit_code == 1
    assert "error activation-order for vllm" in result.stdout
    assert "quantize with static activation order" in result.stdout
    assert "1 errors and 0 warnings for vllm, transformers, qtool" in result.stderr


def test_only_the_targets_asked_for_count(refused_by_vllm: Path) -> None:
    assert _validate(refused_by_vllm, "--for", "qtool", "--for", "transformers").exit_code == 0
    assert _validate(refused_by_vllm, "--for", "vllm").exit_code == 1


def test_a_target_that_is_none_is_a_usage_error(tmp_path: Path) -> None:
    assert _validate(tmp_path, "--for", "llama.cpp").exit_code == 2


def test_warnings_alone_exit_with_0(tmp_path: Path) -> None:
    draft = make_draft("pack-quantized")
    del draft.files["chat_template.jinja"]
    result = _validate(draft.write(tmp_path))
    assert result.exit_code == 0
    assert "warning chat-template for all" in result.stdout


def test_json_is_one_object_with_every_finding(refused_by_vllm: Path) -> None:
    result = _validate(refused_by_vllm, "--json", "--for", "vllm")
    assert result.exit_code == 1
    (line,) = result.stdout.splitlines()
    found = json.loads(line)
    assert found["event"] == "result" and found["folder"] == str(refused_by_vllm)
    assert (found["valid"], found["errors"], found["warnings"]) == (False, 1, 0)
    assert found["targets"] == ["vllm"]
    (finding,) = found["findings"]
    assert set(finding) == {field.name for field in fields(Finding)}
    assert (finding["check"], finding["level"]) == ("activation-order", "error")


def test_a_folder_that_is_none_is_an_error(tmp_path: Path) -> None:
    result = _validate(tmp_path / "nowhere")
    assert result.exit_code == 1
    assert "is not a folder" in result.stderr


@pytest.mark.parametrize("options", [[], ["--bits", "8"], ["--asymmetric", "--lm-head", "8"]])
def test_what_quantize_writes_is_valid(
    options: list[str], model_factory: ModelFactory, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    arguments = ["quantize", str(model_factory()), "--out", str(out), "--method", "rtn"]
    arguments += ["--eval-windows", "0", "--quiet", *options]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    assert is_valid(validate(out))


def test_quantize_publishes_nothing_that_a_loader_refuses(
    model_factory: ModelFactory, tmp_path: Path
) -> None:
    source = model_factory(tmp_path / "model")
    (source / "generation_config.json").write_text('{"eos_token_id": 100000}')
    out = tmp_path / "out"
    arguments = ["quantize", str(source), "--out", str(out), "--method", "rtn"]
    result = CliRunner().invoke(main, [*arguments, "--eval-windows", "0"])
    assert result.exit_code == 1
    assert "eos_token_id" in result.stderr and "not published" in result.stderr
    assert not out.exists()
