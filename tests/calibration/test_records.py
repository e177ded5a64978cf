"""Files of text and of records: what they give, and what is refused with its place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from qtool.calibration import records
from qtool.calibration.documents import Conversations, Text
from qtool.calibration.records import read_file
from qtool.errors import CalibrationError

CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "你好 🙂"}]


def _write(path: Path, rows: list[dict[str, Any]]) -> Path:
    """The same records in the format of the path's ending."""
    if path.suffix == ".jsonl":
        text = "\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    elif path.suffix == ".json":
        text = json.dumps(rows, indent=1)
    elif path.suffix == ".csv":
        quoted = [list(rows[0]), *(row.values() for row in rows)]
        text = "\r\n".join(
            ",".join('"' + str(value).replace('"', '""') + '"' for value in row) for row in quoted
        )
    else:
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
        return path
    path.write_bytes(text.encode())
    return path


@pytest.mark.parametrize("suffix", ["jsonl", "json", "csv", "parquet", "JSONL"])
def test_every_format_gives_the_same_documents(suffix: str, tmp_path: Path) -> None:
    texts = ["one", "", 'with "quotes", commas\nand lines\r\n', "e\u2028nd 中文 🙂"]
    rows = [{"id": number, "text": text} for number, text in enumerate(texts)]
    path = _write(tmp_path / f"a.{suffix.lower()}", rows).rename(tmp_path / f"b.{suffix}")
    for column in ("text", None):
        read = read_file(path, column)
        assert read == Text(f"b.{suffix}:text", tuple(f"{text}\n\n" for text in texts))


@pytest.mark.parametrize("suffix", ["jsonl", "json", "parquet"])
def test_a_list_of_messages_is_a_conversation(suffix: str, tmp_path: Path) -> None:
    path = _write(tmp_path / f"a.{suffix}", [{"messages": CHAT}, {"messages": CHAT[:1]}])
    read = read_file(path, None)
    assert isinstance(read, Conversations)
    assert [messages for _, messages in read.conversations] == [tuple(CHAT), tuple(CHAT[:1])]


def test_paragraphs_of_a_text_are_its_documents_and_lose_no_character(tmp_path: Path) -> None:
    content = "one\ntwo\n \n\nthree\n\n\n\nfour"
    (tmp_path / "a.txt").write_text(content)
    read = read_file(tmp_path / "a.txt", None)
    assert read == Text("a.txt", ("one\ntwo\n \n\n", "three\n\n\n\n", "four"))
    assert "".join(read.documents) == content


@given(content=st.text(alphabet="ab \n\t", max_size=40).filter(str.strip))
def test_any_text_file_is_the_join_of_its_documents(
    content: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.txt"
    path.write_bytes(content.encode())
    read = read_file(path, None)
    assert isinstance(read, Text) and "".join(read.documents) == content


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    for name, content in (
        ("a.txt", "word"),
        ("a.csv", "text\nword"),
        ("a.jsonl", '{"text":"word"}'),
    ):
        (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + content.encode())
        read = read_file(tmp_path / name, None)
        assert isinstance(read, Text) and "".join(read.documents).strip() == "word"


BAD = {
    "empty text": ("a.txt", b"", "holds no text"),
    "blank text": ("a.txt", b" \n\n\t\n", "holds no text"),
    "not UTF-8": ("a.txt", b"caf\xe9", r"not UTF-8 text \(byte 3\)"),
    "not UTF-8 lines": ("a.jsonl", b'{"text": "caf\xe9"}', "not UTF-8"),
    "no lines": ("a.jsonl", b"\n \n", "holds no records"),
    "blank lines": ("a.jsonl", b'{"text": " "}\n{"text": ""}', "all 2 values of 'text' are blank"),
    "cut line": ("a.jsonl", b'{"text": "a"}\n\n{"text": "b', "a.jsonl, line 3: is no JSON"),
    "deep": ("a.jsonl", b'{"text": "a"}\n' + b"[" * 100_000, "line 2: is no JSON"),
    "not an object": ("a.jsonl", b'{"text": "a"}\n["b"]', "line 2: is list, not an object"),
    "missing key": ("a.jsonl", b'{"text": "a"}\n{"tex": 1}', "line 2: has no 'text', only tex"),
    "number": ("a.jsonl", b'{"text": "a"}\n{"text": 1}', "line 2: 'text' is int, not text"),
    "null": ("a.jsonl", b'{"text": null}', "line 1: 'text' is null"),
    "surrogate": ("a.jsonl", rb'{"text": "a\ud800"}', "line 1: .*surrogate pair at character 1"),
    "mixed": ("a.jsonl", b'{"text": "a"}\n{"text": []}', "line 2: 'text' is list, not text"),
    "text in chats": (
        "a.jsonl",
        b'{"text": [{"role": "user", "content": "a"}]}\n{"text": "a"}',
        "line 2: 'text' is no list of messages",
    ),
    "no messages": ("a.jsonl", b'{"messages": []}', "line 1: 'messages' is no list of messages"),
    "no content": (
        "a.jsonl",
        b'{"messages": [{"role": "user", "content": "a"}, {"role": "user"}]}',
        "line 1, message 2 is not",
    ),
    "null content": (
        "a.jsonl",
        b'{"messages": [{"role": "user", "content": null}]}',
        "line 1, message 1: 'content' is null",
    ),
    "no usual column": (
        "a.jsonl",
        b'{"body": "a", "id": 1}',
        r"no column is called text, content, prompt or messages; its columns are body, id: name "
        r"one of them, as .*a\.jsonl:COLUMN",
    ),
    "two usual columns": ("a.jsonl", b'{"prompt": "", "text": ""}', "text and prompt could all be"),
    "lines in .json": ("a.json", b'{"text": "a"}\n{"text": "b"}', "call a file .* .jsonl"),
    "object in .json": ("a.json", b'{"text": "a"}', "is dict, not an array"),
    "empty array": ("a.json", b"[]", "holds no records"),
    "empty csv": ("a.csv", b"", "its columns are none"),
    "no rows": ("a.csv", b"text,id\n", "holds no records"),
    "long row": ("a.csv", b"text,id\na,1\nb,c,2\n", "line 3: has 3 fields, and the header 2"),
    "open quote": ("a.csv", b'text\n"a\n', "line 2: is no CSV"),
    "long field": ("a.csv", b"text\n" + b"a" * 200_000, "field larger than.*use JSON lines"),
    "no parquet": ("a.parquet", b"PAR1 and more", "cannot be read as Parquet"),
}


@pytest.mark.parametrize("case", BAD)
def test_an_unusable_file_is_refused_with_the_place_and_the_problem(
    case: str, tmp_path: Path
) -> None:
    name, content, message = BAD[case]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CalibrationError, match=message):
        read_file(tmp_path / name, None)


@pytest.mark.parametrize("suffix", ["jsonl", "json", "csv", "parquet"])
def test_a_missing_column_is_refused_with_those_there_are(suffix: str, tmp_path: Path) -> None:
    path = _write(tmp_path / f"a.{suffix}", [{"id": "1", "text": "a"}])
    with pytest.raises(CalibrationError, match="no column 'body'; its columns are id, text"):
        read_file(path, "body")


def test_a_text_has_no_columns_and_a_folder_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("word")
    with pytest.raises(CalibrationError, match="a.md:text: only .jsonl, .json, .csv, .parquet"):
        read_file(tmp_path / "a.md", "text")
    for name in ("", "folder.parquet"):
        (tmp_path / name).mkdir(exist_ok=True)
        with pytest.raises(CalibrationError, match="cannot be read"):
            read_file(tmp_path / name, None)


@pytest.mark.parametrize("suffix", ["txt", "jsonl", "json", "csv", "parquet"])
def test_a_file_that_is_too_large_is_refused_before_it_is_parsed(
    suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [" ".join(str(i * j) for j in range(400)) for i in range(1000)]
    path = tmp_path / f"a.{suffix}"
    if suffix == "txt":
        path.write_text("\n".join(words))
    else:
        _write(path, [{"text": text, "id": "1"} for text in words])
    monkeypatch.setattr(records, "MAX_SOURCE_BYTES", 1 << 20)
    with pytest.raises(CalibrationError, match=r"has \d+ MiB of text; a source has at most 1"):
        read_file(path, None)
