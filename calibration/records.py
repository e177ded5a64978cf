"""Files of text, and of records with a column of text or conversations -> documents.

A text file's documents are its paragraphs with the blank lines that follow them. A record's text
is one document, with a blank line after it. A conversation is a list of ``{"role": TEXT,
"content": TEXT}``. Every record must hold what its column asks for; errors say where one does not.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qtool.calibration.documents import Conversations, Documents, Message, Text
from qtool.errors import CalibrationError

# About 16 million tokens of English, 250 times the default's 128 x 512. They are tokenized in
# memory, where one takes some 100 bytes.
MAX_SOURCE_BYTES = 64 << 20

# Taken without being named, if a source has exactly one of them.
USUAL_COLUMNS = ("text", "content", "prompt", "messages")

_BLANK_LINES = re.compile(r"(?<=\n)(?:[^\S\n]*\n)+")


@dataclass(frozen=True, slots=True)
class Column:
    """One column of records: its name, and (where it stands, value) of each record."""

    name: str
    values: Sequence[tuple[str, object]]


def read_file(path: Path, column: str | None) -> Documents:
    """The documents of a file of any kind.

    Raises:
        CalibrationError: it cannot be read, is too large, holds no text, or something else.
    """
    reader = _READERS.get(path.suffix.lower())
    if reader is not None:
        found = reader(path, column)
        return column_documents(path, f"{path.name}:{found.name}", found)
    if column is not None:
        raise CalibrationError(
            f"{path}:{column}: only {', '.join(_READERS)} files have columns; leave ':{column}' out"
        )
    return _text_documents(path)


def choose_column(source: object, names: Sequence[str], column: str | None) -> str:
    """``column`` if it exists, else the only usual one; errors list the columns there are."""
    usual = [name for name in USUAL_COLUMNS if name in names]
    if column in names:
        return str(column)
    if column is None and len(usual) == 1:
        return usual[0]
    if column is not None:
        problem = f"there is no column {column!r}"
    elif usual:
        problem = f"{' and '.join(usual)} could all be the text"
    else:
        problem = f"no column is called {', '.join(USUAL_COLUMNS[:-1])} or {USUAL_COLUMNS[-1]}"
    raise CalibrationError(
        f"{source}: {problem}; its columns are {', '.join(map(str, names)) or 'none'}: name one "
        f"of them, as {source}:COLUMN"
    )


def column_documents(source: object, name: str, column: Column, *, whole: bool = True) -> Documents:
    """Documents of a column: texts if its first value is one, else conversations.

    Args:
        source: what errors name.
        name: of the result; holds no path.
        column: its values, in order.
        whole: see :class:`Text`.

    Raises:
        CalibrationError: there is no value, a value is of another kind, or all are blank.
    """
    if not column.values:
        raise CalibrationError(f"{source} holds no records; give a source with some")
    if isinstance(column.values[0][1], list):
        conversations = [
            (where, _messages(f"{source}, {where}", column.name, value))
            for where, value in column.values
        ]
        return Conversations(name, tuple(conversations), whole)
    texts = [_text(f"{source}, {where}", column.name, value) for where, value in column.values]
    if not any(map(str.strip, texts)):
        raise CalibrationError(
            f"{source} holds no text: all {len(texts)} values of {column.name!r} are blank; give a "
            "source with some"
        )
    return Text(name, tuple(f"{text}\n\n" for text in texts), whole=whole)


def _text(where: str, column: str, value: object) -> str:
    if not isinstance(value, str):
        kind = "null" if value is None else type(value).__name__
        raise CalibrationError(
            f"{where}: {column!r} is {kind}, not text; every record must hold text there, as the "
            "first does, or every one a list of messages"
        )
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise CalibrationError(
            f"{where}: {column!r} has half of a surrogate pair at character {error.start}; write "
            "valid Unicode"
        ) from None
    return value


def _messages(where: str, column: str, value: object) -> tuple[Message, ...]:
    if not isinstance(value, list) or not value:
        raise CalibrationError(
            f"{where}: {column!r} is no list of messages; every record must hold one there, as "
            'the first does: [{"role": ..., "content": ...}, ...]'
        )
    return tuple(_message(f"{where}, message {i}", message) for i, message in enumerate(value, 1))


def _message(where: str, message: object) -> Message:
    if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
        raise CalibrationError(f'{where} is not {{"role": TEXT, "content": TEXT}}; write it so')
    return {key: _text(where, key, message[key]) for key in ("role", "content")}


def _text_documents(path: Path) -> Text:
    text = _read_utf8(path)
    if not text.strip():
        raise CalibrationError(f"{path} holds no text; give a file with some")
    ends = [match.end() for match in _BLANK_LINES.finditer(text)] + [len(text)]
    starts = [0, *ends[:-1]]
    documents = [text[start:end] for start, end in zip(starts, ends, strict=True)]
    return Text(path.name, tuple(document for document in documents if document))


def _read_utf8(path: Path) -> str:
    try:
        _require_size(path, path.stat().st_size)
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise CalibrationError(
            f"{path} is not UTF-8 text (byte {error.start}); convert it to UTF-8 first"
        ) from None
    except OSError as error:
        raise CalibrationError(
            f"{path} cannot be read: {error.strerror}; give a file with text"
        ) from None


def _require_size(path: Path, num_bytes: int) -> None:
    if num_bytes > MAX_SOURCE_BYTES:
        raise CalibrationError(
            f"{path} has {num_bytes / 2**20:.0f} MiB of text; a source has at most "
            f"{MAX_SOURCE_BYTES / 2**20:g}: give a part of it"
        )


def _json_lines(path: Path, column: str | None) -> Column:
    # Not splitlines: a JSON string may hold U+2028 and other line ends of Unicode as they are.
    lines = enumerate(_read_utf8(path).split("\n"), 1)
    records = (
        (f"line {number}", _parse_json(f"{path}, line {number}", line, "write one object a line"))
        for number, line in lines
        if line.strip()
    )
    return _column_of(path, records, column)


def _json_array(path: Path, column: str | None) -> Column:
    remedy = "write [{...}, ...], or call a file with one object a line .jsonl"
    value = _parse_json(path, _read_utf8(path), remedy)
    if not isinstance(value, list):
        raise CalibrationError(f"{path}: is {type(value).__name__}, not an array; {remedy}")
    return _column_of(path, ((f"record {n}", item) for n, item in enumerate(value, 1)), column)


def _parse_json(where: object, text: str, remedy: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CalibrationError(
            f"{where}: is no JSON that can be read ({error}); {remedy}"
        ) from None


def _column_of(path: Path, records: Iterable[tuple[str, Any]], column: str | None) -> Column:
    """The chosen column of JSON objects, each with where it stands."""
    name = column
    values: list[tuple[str, object]] = []
    for where, record in records:
        if not isinstance(record, dict):
            raise CalibrationError(
                f"{path}, {where}: is {type(record).__name__}, not an object; write {{...}}"
            )
        if not values:
            name = choose_column(path, list(record), column)
        if name not in record:
            raise CalibrationError(
                f"{path}, {where}: has no {name!r}, only {', '.join(record) or 'nothing'}; every "
                "record must have it"
            )
        values.append((where, record[name]))
    return Column(str(name), values)


def _csv_rows(path: Path, column: str | None) -> Column:
    rows = csv.reader(io.StringIO(_read_utf8(path), newline=""), strict=True)
    values = []
    try:
        header = next(rows, [])
        index = header.index(choose_column(path, header, column))
        for row in filter(None, rows):
            if len(row) != len(header):
                raise CalibrationError(
                    f"{path}, line {rows.line_num}: has {len(row)} fields, and the header "
                    f"{len(header)}; quote texts with commas or line ends"
                )
            values.append((f"line {rows.line_num}", row[index]))
    except csv.Error as error:
        raise CalibrationError(
            f"{path}, line {rows.line_num}: is no CSV ({error}); repair it, or use JSON lines"
        ) from None
    return Column(header[index], values)


def _parquet_rows(path: Path, column: str | None) -> Column:
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            name = choose_column(path, file.schema_arrow.names, column)
            _require_size(path, _column_bytes(file.metadata, name))
            values = file.read(columns=[name]).column(name).to_pylist()
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise CalibrationError(
            f"{path} cannot be read as Parquet ({error}); write it again, or give another file"
        ) from None
    return Column(name, [(f"row {n}", value) for n, value in enumerate(values, 1)])


def _column_bytes(metadata: Any, name: str) -> int:
    """Uncompressed bytes of a column, over all row groups and the parts of a nested one."""
    groups = (metadata.row_group(index) for index in range(metadata.num_row_groups))
    chunks = (group.column(index) for group in groups for index in range(group.num_columns))
    return sum(
        chunk.total_uncompressed_size
        for chunk in chunks
        if f"{chunk.path_in_schema}.".startswith(f"{name}.")
    )


_READERS: Mapping[str, Callable[[Path, str | None], Column]] = {
    ".jsonl": _json_lines,
    ".json": _json_array,
    ".csv": _csv_rows,
    ".parquet": _parquet_rows,
}
