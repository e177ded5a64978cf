"""SOURCE at the command line: mixes, the model's own text, errors before a model is touched."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

from qtool.calibration.data import load_tokenizer
from qtool.calibration.mix import SampleRequest
from qtool.cli import main
from qtool.commands.self_text import sample_blocks

SENTENCE = "The quick brown fox jumps over the lazy dog. "


def _quantize(model: object, out: Path, *options: object) -> Result:
    sizes = ["--samples", "4", "--seq-len", "32", "--device", "cpu", "--quiet", "--json"]
    sizes += ["--eval-windows", "0"]
    return CliRunner().invoke(
        main, ["quantize", str(model), "--out", str(out), *sizes, *map(str, options)]
    )


def _evaluate(model: object, source: object) -> Result:
    sizes = ["--seq-len", "16", "--windows", "4", "--device", "cpu", "--quiet", "--json"]
    return CliRunner().invoke(main, ["eval", str(model), "--text", str(source), *sizes])


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    texts = [{"body": SENTENCE * 5, "text": SENTENCE * 3}] * 20
    chats = [{"messages": [{"role": "user", "content": SENTENCE}]}] * 40
    contents = {
        "words.txt": SENTENCE * 50,
        "lines.jsonl": "\n".join(map(json.dumps, texts)),
        "chats.json": json.dumps(chats),
        "empty.txt": "\n",
        "bad.jsonl": '{"text": "a"}\n{"text"',
    }
    for name, content in contents.items():
        (tmp_path / name).write_text(content)
    return {name: tmp_path / name for name in contents}


def test_a_mix_is_in_the_report_of_the_checkpoint(
    tiny_model_folder: Path, files: dict[str, Path], tmp_path: Path
) -> None:
    sources = (f"{files['lines.jsonl']}:body=2", files["chats.json"], "self")
    options = [part for source in sources for part in ("--calibration", source)]
    result = _quantize(tiny_model_folder, tmp_path / "q", *options)
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "q" / "qtool" / "report.json").read_text())
    found = [
        (s["source"], s["samples"], s["chat_template"]) for s in report["calibration"]["sources"]
    ]
    assert found == [
        ("lines.jsonl:body", 2, False),
        ("chats.json:messages", 1, True),
        ("self", 1, False),
    ]
    assert all(record["tokens"] == 4 * 32 for record in report["modules"])


@pytest.mark.parametrize("source", ["words.txt", "lines.jsonl:body", "lines.jsonl", "chats.json"])
def test_evaluation_reads_the_same_sources(
    source: str, tiny_model_folder: Path, files: dict[str, Path]
) -> None:
    name, colon, column = source.partition(":")
    result = _evaluate(tiny_model_folder, f"{files[name]}{colon}{column}")
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    assert facts["text"].startswith(source) and facts["windows"] == 4


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere.txt", "nowhere.txt does not exist"),
        ("empty.txt", "holds no text"),
        ("bad.jsonl", "line 2: is no JSON"),
        ("lines.jsonl:title", "its columns are body, text"),
    ],
)
def test_an_unusable_source_is_an_error_before_the_model_is_looked_for(
    name: str, message: str, files: dict[str, Path], tmp_path: Path
) -> None:
    source = f"{tmp_path / name}"
    before = sorted(tmp_path.iterdir())
    for result in (
        _quantize(
            "no-such-model", tmp_path / "q", "--calibration", "self", "--calibration", source
        ),
        _evaluate("no-such-model", source),
    ):
        assert (result.exit_code, result.stdout) == (1, "")
        assert message in result.stderr and result.stderr.startswith("error: ")
    assert sorted(tmp_path.iterdir()) == before


def test_ignored_linears_are_chosen_at_the_command_line(
    tiny_model_folder: Path, tmp_path: Path
) -> None:
    options = ("--method", "rtn", "--ignore", "layers.0", "--ignore", "down_proj")
    assert _quantize(tiny_model_folder, tmp_path / "q", *options).exit_code == 0
    config = json.loads((tmp_path / "q" / "config.json").read_text())
    assert len(config["quantization_config"]["ignore"]) == 1 + 7 + 1
    result = _quantize(tiny_model_folder, tmp_path / "other", "--ignore", "layers.9")
    assert result.exit_code == 1 and "near are layers.1, layers.0" in result.stderr
    assert not (tmp_path / "other").exists()


class TestSelfText:
    @staticmethod
    def _sample(folder: Path, **values: Any) -> torch.Tensor:
        request = {"first_token": 0, "num_samples": 3, "seq_len": 24, "seed": 5}
        return sample_blocks(SampleRequest(folder, **{**request, **values}), "cpu")

    def test_the_seed_alone_decides_the_blocks(self, tiny_model_folder: Path) -> None:
        first, again, other = (self._sample(tiny_model_folder, seed=seed) for seed in (5, 5, 6))
        assert first.shape == (3, 24) and first.dtype == torch.int64
        assert torch.equal(first, again) and not torch.equal(first, other)
        assert first.unique(dim=0).shape[0] == 3

    def test_a_block_is_full_however_soon_the_model_would_end(
        self, model_factory: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("qtool.commands.self_text.BATCH", 2)
        folder = model_factory(max_positions=32)
        eos = load_tokenizer(folder).eos_token_id
        blocks = self._sample(folder, seq_len=32, num_samples=5)
        assert blocks.shape == (5, 32) and (blocks[:, 0] == 0).all()
        assert not (blocks == eos).any()
