"""Files of questions: every form is read, whatever is malformed is named by its line."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from qtool.calibration.data import held_out_builtin
from qtool.errors import CalibrationError
from qtool.runtime.task_files import MAX_CONTEXT, MIN_CONTEXT, cloze_task, read_task
from qtool.runtime.tasks import Question

CLOZE = {"context": "The quick brown", "target": "fox"}
CHOICE = {"question": "Which?", "choices": ["this", "that"], "answer": 1}


def _write(folder: Path, *lines: Any) -> Path:
    path = folder / "tasks.jsonl"
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_bytes("\n".join(texts).encode("utf-8", "surrogatepass"))
    return path


def test_cloze_questions_have_one_choice(tmp_path: Path) -> None:
    path = _write(tmp_path, CLOZE, "", "  ", {**CLOZE, "delimiter": "", "id": [1]})
    task = read_task(path)
    assert task.is_cloze and task.name == "tasks.jsonl"
    assert task.fingerprint == hashlib.sha256(path.read_bytes()).hexdigest()
    assert task.questions == (
        Question("The quick brown", ("fox",), 0, "line 1"),
        Question("The quick brown", ("fox",), 0, "line 4", ""),
    )


def test_an_answer_is_an_index_or_a_choice(tmp_path: Path) -> None:
    path = _write(tmp_path, CHOICE, {**CHOICE, "answer": "this"})
    assert [question.answer for question in read_task(path).questions] == [1, 0]


def test_a_question_gets_a_frame_and_a_context_does_not(tmp_path: Path) -> None:
    context = {"context": "It is", "choices": ["this", "that"], "answer": 0}
    task = read_task(_write(tmp_path, CHOICE, context))
    assert [q.context for q in task.questions] == ["Question: Which?\nAnswer:", "It is"]
    assert not task.is_cloze


def test_a_mark_of_byte_order_and_windows_line_ends_are_fine(tmp_path: Path) -> None:
    path = tmp_path / "w.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(CLOZE).encode() + b"\r\n")
    assert len(read_task(path).questions) == 1


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "is no JSON"),
        ("[" * 100_000, "nested too deeply|is no JSON"),
        ("[1]", "is list, not an object"),
        ({}, r"has the keys \[\]; use one of: context \+ target"),
        ({"context": "a"}, "has the keys"),
        ({**CLOZE, "choices": ["a", "b"]}, "has the keys"),
        ({**CHOICE, "context": "a"}, "has the keys"),
        ({**CLOZE, "delimeter": ""}, "delimeter"),
        ({**CLOZE, "target": 3}, "target is 3; must be a text"),
        ({**CLOZE, "target": " "}, "target is empty"),
        ({**CLOZE, "context": ""}, "context is empty"),
        ({**CLOZE, "context": None}, "context is null"),
        ({**CLOZE, "delimiter": 0}, "delimiter is 0"),
        ({**CHOICE, "question": []}, r"question is \[\]"),
        ({**CHOICE, "choices": "ab"}, 'choices is "ab"; must be a list of 2 or more'),
        ({**CHOICE, "choices": ["a"]}, "2 or more"),
        ({**CHOICE, "choices": ["a", ""]}, r"choices\[1\] is empty"),
        ({**CHOICE, "choices": ["a", 2]}, r"choices\[1\] is 2"),
        ({**CHOICE, "choices": ["a", "a"]}, "the same choice twice"),
        ({**CHOICE, "answer": 2}, "answer is 2; .* from 0 to 1"),
        ({**CHOICE, "answer": -1}, "answer is -1"),
        ({**CHOICE, "answer": True}, "answer is true"),
        ({**CHOICE, "answer": 1.0}, "answer is 1.0"),
        ({**CHOICE, "answer": "other"}, 'answer is "other"'),
        ({**CHOICE, "answer": None}, "answer is null"),
        ('{"context": "\\ud83d", "target": "a"}', "half of a surrogate pair at character 0"),
    ],
)
def test_a_malformed_line_is_named(line: Any, message: str, tmp_path: Path) -> None:
    good = CHOICE if isinstance(line, dict) and "choices" in line else CLOZE
    with pytest.raises(CalibrationError, match=message) as caught:
        read_task(_write(tmp_path, good, "", line))
    assert "tasks.jsonl, line 3: " in str(caught.value)


def test_a_file_holds_one_kind_of_question(tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match="line 2: multiple choice and cloze"):
        read_task(_write(tmp_path, CLOZE, CHOICE))


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "has no questions"), (b" \n\n", "has no questions"), (b"\xff{", "not UTF-8.*byte 0")],
)
def test_a_file_without_questions_is_refused(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_bytes(content)
    with pytest.raises(CalibrationError, match=message):
        read_task(path)


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none.jsonl"):
        with pytest.raises(CalibrationError, match=f"{path}: cannot be read"):
            read_task(path)


class TestBuiltinCloze:
    def test_targets_end_their_sentence_and_can_be_inferred(self) -> None:
        documents = held_out_builtin().documents
        task = cloze_task("builtin-cloze", documents, "")
        prose = " ".join(" ".join(documents).split())
        assert task.is_cloze and len(task.questions) > 100
        assert len(set(task.questions)) == len(task.questions)
        for question in task.questions:
            (target,) = question.choices
            assert (
                target in question.context.replace("(", " ").split() or target in question.context
            )
            assert MIN_CONTEXT <= len(question.context) <= MAX_CONTEXT
            assert question.context[-40:] + f" {target}." in prose

    def test_the_same_text_gives_the_same_questions(self) -> None:
        documents = held_out_builtin().documents
        assert cloze_task("a", documents, "x") == cloze_task("a", list(documents), "x")

    def test_a_text_without_a_fit_sentence_is_refused(self) -> None:
        with pytest.raises(CalibrationError, match="give a longer text"):
            cloze_task("mine", ["Too short.", ""], "")
