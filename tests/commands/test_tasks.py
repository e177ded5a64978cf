"""``qtool eval --tasks``: one model or two, as a table or JSON, with everything checked first."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from qtool.cli import main
from qtool.commands import tasks

CHOICE = [
    {"question": "Who jumps?", "choices": ["the fox", "the lazy dog", "the text"], "answer": index}
    for index in (0, 1, 2, 0, 1)
]
CLOZE = [{"context": "The quick brown", "target": "fox"}, {"context": "The", "target": "text"}]


def _invoke(*arguments: object) -> Any:
    return CliRunner().invoke(main, ["eval", *map(str, arguments), "--device", "cpu"])


def _write(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


@pytest.fixture
def choice_file(tmp_path: Path) -> Path:
    return _write(tmp_path / "choice.jsonl", CHOICE)


def test_two_models_are_compared_side_by_side(
    tiny_model_folder: Path, model_factory: Callable[..., Path], choice_file: Path
) -> None:
    other = model_factory(seed=5)
    cloze_file = _write(choice_file.with_name("cloze.jsonl"), CLOZE)
    files = ("--tasks-file", choice_file, "--tasks-file", cloze_file)
    result = _invoke(tiny_model_folder, *files, "--reference", other, "--json", "--quiet")
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    assert (facts["event"], facts["dtype"], facts["batch_size"]) == ("result", "float32", 8)
    choice, cloze = facts["tasks"]
    assert (choice["task"], choice["kind"], choice["questions"]) == (
        "choice.jsonl",
        "multiple_choice",
        5,
    )
    # The same question five times, with right answers 0 1 2 0 1.
    assert choice["accuracy"] in (0.2, 0.4) and choice["acc_norm"] in (0.2, 0.4)
    assert choice["accuracy_stderr"] > 0 and choice["perplexity"] is None
    assert choice["reference"]["accuracy"] in (0.2, 0.4)
    assert choice["agreement"] in (0.0, 1.0)
    assert cloze["kind"] == "cloze" and cloze["acc_norm"] is None and cloze["perplexity"] > 1


def test_a_context_too_long_for_the_model_is_named_before_it_is_loaded(
    tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks, "open_llm", lambda *_: pytest.fail("loaded too early"))
    result = _invoke(tiny_model_folder, "--tasks", "builtin-cloze")
    assert result.exit_code == 1
    assert "builtin-cloze, passage 1: has" in result.stderr and "score 255" in result.stderr


@pytest.mark.parametrize("batch_size", [1, 2, 16])
def test_a_models_own_agreement_is_whole_at_any_batch_size(
    tiny_model_folder: Path, choice_file: Path, batch_size: int
) -> None:
    fixed = ("--backend", "reference", "--json", "--quiet", "--batch-size", batch_size)
    reference = ("--reference", tiny_model_folder)
    result = _invoke(tiny_model_folder, "--tasks-file", choice_file, *reference, *fixed)
    (task,) = json.loads(result.stdout)["tasks"]
    assert task["agreement"] == 1.0
    assert {key: task[key] for key in task["reference"]} == task["reference"]


def test_builtin_cloze_scores_the_same_at_any_batch_size(
    model_factory: Callable[..., Path],
) -> None:
    model = model_factory(max_positions=2048)
    results = [
        _invoke(
            model,
            "--tasks",
            "builtin-cloze",
            "--limit",
            4,
            "--backend",
            "reference",
            "--json",
            "--quiet",
            "--batch-size",
            size,
        )  # fmt: skip
        for size in (1, 4)
    ]
    one, four = (json.loads(result.stdout)["tasks"] for result in results)
    assert one == four
    assert (one[0]["task"], one[0]["questions"]) == ("builtin-cloze", 4)


def test_the_table_has_a_row_a_model(tiny_model_folder: Path, choice_file: Path) -> None:
    reference = ("--reference", tiny_model_folder)
    result = _invoke(tiny_model_folder, "--tasks-file", choice_file, *reference, "--limit", 1)
    assert result.exit_code == 0, result.output
    assert "choice.jsonl, 1 questions" in result.stdout
    rows = [line for line in result.stdout.splitlines() if line.startswith("│")]
    assert len(rows) >= 2 and "acc_norm" in result.stdout and "perplexity" not in result.stdout
    assert "agreement" in result.stdout and "100.0%" in result.stdout


def test_a_malformed_file_is_an_error_before_the_model_is_loaded(
    tmp_path: Path, choice_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks, "open_llm", lambda *_: pytest.fail("loaded too early"))
    _write(choice_file, [*CHOICE, {"context": "a"}])
    result = _invoke("no-such-model", "--tasks-file", choice_file)
    assert (result.exit_code, result.stdout) == (1, "")
    assert "choice.jsonl, line 6: has the keys ['context']" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--limit", 3), "--limit has no meaning with perplexity"),
        (("--batch-size", 3), "--batch-size has no meaning with perplexity"),
        (("--tasks", "builtin-cloze", "--text", "a"), "--text has no meaning with --tasks"),
        (("--tasks", "builtin-cloze", "--limit", 0), "0 is not in the range x>=1"),
        (("--tasks", "lambada"), "'lambada' is not 'builtin-cloze'"),
    ],
)
def test_options_that_mean_nothing_are_refused(arguments: tuple[object, ...], message: str) -> None:
    result = _invoke("any", *arguments)
    assert result.exit_code == 2 and message in result.stderr
