"""Where questions come from: a JSON-lines file, or any English prose.

A line of a file is an object of one of these forms, all lines of a file of one kind:

    {"context": TEXT, "target": TEXT}                              cloze
    {"context": TEXT, "choices": [TEXT, ...], "answer": ANSWER}    multiple choice
    {"question": TEXT, "choices": [TEXT, ...], "answer": ANSWER}   multiple choice

ANSWER is the right choice or its index, from 0. A question's context is
``Question: TEXT\\nAnswer:``. A choice or target follows its context after one space, or after
what the optional key ``delimiter`` says (``""`` for languages written without spaces). The
optional key ``id`` may hold anything. Blank lines are skipped.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from qtool.errors import CalibrationError
from qtool.runtime.tasks import Question, Task

BUILTIN_CLOZE = "builtin-cloze"

# Characters before a cloze target. The lower bound gives the passage a topic; most passages end
# within a sentence of it.
MIN_CONTEXT, MAX_CONTEXT = 150, 1200
WANTED_CONTEXT = 400

_FORMS = (
    {"context", "target"},
    {"context", "choices", "answer"},
    {"question", "choices", "answer"},
)
_OPTIONAL = {"delimiter", "id"}

_BLANK_LINES = re.compile(r"\n\s*\n")
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z])")
_LAST_WORD = re.compile(r"(.*) ([a-z]{4,})\.")
# Code, grammars, tables and headings: no prose.
_NO_PROSE = re.compile(r"\s{5,}|[*=+-]{3}|.*(::=|>>>)", re.DOTALL)


def read_task(path: Path) -> Task:
    """The questions of a JSON-lines file.

    Raises:
        CalibrationError: the file cannot be read or a line has none of the forms above.
    """
    try:
        data = path.read_bytes()
        # Not splitlines: a JSON string may hold U+2028 as it is.
        lines = data.decode("utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise CalibrationError(
            f"{path}: is not UTF-8 text (byte {error.start}); convert it to UTF-8 first"
        ) from None
    except OSError as error:
        raise CalibrationError(
            f"{path}: cannot be read ({error.strerror}); give a JSON-lines file of questions"
        ) from None
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise CalibrationError(f"{path}: has no questions; give one JSON object a line")
    questions = tuple(_Line(path, number).question(line) for number, line in numbered)
    for question in questions:
        if (len(question.choices) == 1) != (len(questions[0].choices) == 1):
            raise CalibrationError(
                f"{path}, {question.origin}: multiple choice and cloze questions are scored "
                "differently; put each kind into a file of its own"
            )
    return Task(path.name, questions, hashlib.sha256(data).hexdigest())


class _Line:
    """One line of a file; its errors say which."""

    def __init__(self, path: Path, number: int) -> None:
        self._path, self._number = path, number

    def question(self, line: str) -> Question:
        record = self._record(line)
        context = self._context(record)
        origin, delimiter = f"line {self._number}", " "
        if "delimiter" in record:
            delimiter = self._text(record["delimiter"], "delimiter", may_be_empty=True)
        if "target" in record:
            target = self._text(record["target"], "target")
            return Question(context, (target,), 0, origin, delimiter)
        choices = self._choices(record["choices"])
        return Question(
            context, choices, self._answer(record["answer"], choices), origin, delimiter
        )

    def _record(self, line: str) -> dict[str, Any]:
        try:
            record = json.loads(line)
        except ValueError as error:
            raise self._error(f"is no JSON ({error}); write one object a line") from None
        except RecursionError:
            raise self._error("is nested too deeply; write one flat object a line") from None
        if not isinstance(record, dict):
            raise self._error(f"is {type(record).__name__}, not an object; write {{...}}")
        if set(record) - _OPTIONAL not in _FORMS:
            forms = "; ".join(" + ".join(sorted(form)) for form in _FORMS)
            optional = " and ".join(sorted(_OPTIONAL))
            raise self._error(
                f"has the keys {sorted(record)}; use one of: {forms} ({optional} may be added)"
            )
        return record

    def _context(self, record: dict[str, Any]) -> str:
        if "question" in record:
            return f"Question: {self._text(record['question'], 'question')}\nAnswer:"
        return self._text(record["context"], "context")

    def _text(self, value: object, name: str, *, may_be_empty: bool = False) -> str:
        if not isinstance(value, str):
            raise self._error(f"{name} is {json.dumps(value)[:40]}; must be a text")
        if not may_be_empty and not value.strip():
            raise self._error(f"{name} is empty; must have text")
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise self._error(
                f"{name} has half of a surrogate pair at character {error.start}; "
                "write valid Unicode"
            ) from None
        return value

    def _choices(self, value: object) -> tuple[str, ...]:
        if not isinstance(value, list) or len(value) < 2:
            raise self._error(f"choices is {json.dumps(value)[:40]}; must be a list of 2 or more")
        choices = tuple(self._text(choice, f"choices[{i}]") for i, choice in enumerate(value))
        if len(set(choices)) < len(choices):
            raise self._error("has the same choice twice; each must differ from the others")
        return choices

    def _answer(self, value: object, choices: Sequence[str]) -> int:
        if isinstance(value, str) and value in choices:
            return choices.index(value)
        # A bool is an int to Python.
        if type(value) is int and 0 <= value < len(choices):
            return value
        raise self._error(
            f"answer is {json.dumps(value)[:40]}; must be one of the choices, or its index from 0 "
            f"to {len(choices) - 1}"
        )

    def _error(self, problem: str) -> CalibrationError:
        return CalibrationError(f"{self._path}, line {self._number}: {problem}")


def cloze_task(name: str, documents: Sequence[str], fingerprint: str) -> Task:
    """Passages of prose whose last word is to be guessed, as LAMBADA does (Paperno et al. 2016).

    A target is a word of four letters or more that ends a sentence and stands in the passage
    already, so it can be inferred from it. The same documents always give the same questions.

    Raises:
        CalibrationError: no passage of the documents is fit.
    """
    passages = dict.fromkeys(p for document in documents for p in _passages(document))
    if not passages:
        raise CalibrationError(
            f"{name}: no sentence of the text ends in a word that stands before it; "
            "give a longer text"
        )
    questions = tuple(
        Question(context, (target,), 0, f"passage {number}")
        for number, (context, target) in enumerate(passages, 1)
    )
    return Task(name, questions, fingerprint)


def _passages(document: str) -> list[tuple[str, str]]:
    """(context, target) of every fit sentence of a document, in order."""
    paragraphs = (p for p in _BLANK_LINES.split(document) if not _NO_PROSE.match(p))
    sentences = _SENTENCE_END.split(" ".join(" ".join(p.split()) for p in paragraphs))
    found = []
    for end, sentence in enumerate(sentences):
        if (match := _LAST_WORD.fullmatch(sentence)) is None:
            continue
        context, target = match[1], match[2]
        before = end
        while before > 0 and len(context) < WANTED_CONTEXT:
            before -= 1
            context = f"{sentences[before]} {context}"
        known = re.search(rf"\b{target}\b", context) is not None
        if known and MIN_CONTEXT <= len(context) <= MAX_CONTEXT:
            found.append((context, target))
    return found
