"""``qtool convert``: what it says, and what it leaves behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from qtool.cli import main
from qtool.formats.checkpoint import CheckpointReader
from support.peers import FIXTURES


def _convert(name: str, out: Path, *options: str) -> Result:
    return CliRunner().invoke(main, ["convert", str(FIXTURES / name), "--out", str(out), *options])


def test_the_result_is_one_line_and_warnings_are_notes(tmp_path: Path) -> None:
    done = _convert("awq-gemm-asym", tmp_path / "out", "--format", "gptq")
    assert done.exit_code == 0, done.output
    assert "14 linears from awq to gptq, all dequantize to the same bits" in done.stdout
    assert "note:" in done.stderr and "vLLM and SGLang's fast kernels take symmetric" in done.stderr
    assert all(f"{phase}: 14 to do" in done.stderr for phase in ("check", "write", "verify"))
    with CheckpointReader(tmp_path / "out") as reader:
        assert reader.config["quantization_config"]["quant_method"] == "gptq"


def test_json_has_progress_notes_and_the_result_last(tmp_path: Path) -> None:
    done = _convert("awq-gemm-asym", tmp_path / "out", "--format", "gptq", "--json")
    events = [json.loads(line) for line in done.stdout.splitlines()]
    assert [event["event"] for event in events] == ["progress"] * 42 + ["note", "result"]
    result = events[-1]
    assert (result["source_format"], result["format"], result["linears"]) == ("awq", "gptq", 14)
    assert result["out"] == str(tmp_path / "out") and result["total_bytes"] > 300_000


@pytest.mark.parametrize(
    ("name", "options", "code", "words"),
    [
        ("fp8-dynamic", ["--format", "awq"], 1, "cannot be awq without loss: FP8 channel, dynamic"),
        ("fp8-dynamic", ["--format", "gguf"], 2, "'gguf' is not one of"),
        ("fp8-dynamic", [], 2, "--format"),
    ],
)
def test_what_cannot_be_done_is_one_message_and_no_folder(
    name: str, options: list[str], code: int, words: str, tmp_path: Path
) -> None:
    done = _convert(name, tmp_path / "out", *options)
    assert done.exit_code == code and words in done.stderr
    assert "Traceback" not in done.output
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_exists_is_replaced_only_when_asked(tmp_path: Path) -> None:
    for _ in range(2):
        done = _convert("awq-gemm-asym", tmp_path / "out", "--format", "awq", "--overwrite")
        assert done.exit_code == 0, done.output
    assert _convert("awq-gemm-asym", tmp_path / "out", "--format", "awq").exit_code == 1
