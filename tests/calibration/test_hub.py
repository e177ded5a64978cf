"""Datasets of the hub, with its client mocked: nothing here reaches a network."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import datasets
import pytest

from qtool.calibration import hub
from qtool.calibration.documents import Conversations, Text
from qtool.calibration.hub import read_dataset
from qtool.calibration.sources import HubDataset
from qtool.errors import CalibrationError

DATASET = HubDataset("org/name", "v1", "test")


def _serve(monkeypatch: pytest.MonkeyPatch, rows: Any) -> list[tuple[Any, ...]]:
    calls: list[tuple[Any, ...]] = []

    def load_dataset(*args: Any, **kwargs: Any) -> Any:
        calls.append((*args, kwargs))
        return rows

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return calls


def test_rows_of_a_split_are_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_OFFLINE", False)
    calls = _serve(monkeypatch, [{"text": "one", "id": 1}, {"text": "", "id": 2}])
    read = read_dataset(DATASET, None)
    assert read == Text("org/name/v1@test:text", ("one\n\n", "\n\n"))
    assert calls == [("org/name", "v1", {"split": "test", "streaming": True})]


def test_offline_the_cache_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_OFFLINE", True)
    calls = _serve(monkeypatch, [{"text": "one"}])
    read_dataset(DATASET, "text")
    assert calls[0][-1]["streaming"] is False


def test_messages_are_conversations(monkeypatch: pytest.MonkeyPatch) -> None:
    _serve(monkeypatch, [{"messages": [{"role": "user", "content": "Hi"}]}])
    assert isinstance(read_dataset(DATASET, None), Conversations)


def test_an_endless_dataset_is_read_to_the_limit_and_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def endless() -> Iterator[dict[str, str]]:
        while True:
            yield {"text": "0123456789"}

    monkeypatch.setattr(hub, "MAX_SOURCE_BYTES", 1000)
    _serve(monkeypatch, endless())
    read = read_dataset(DATASET, None)
    assert isinstance(read, Text) and len(read.documents) == 100
    assert not read.whole


def test_an_error_of_the_client_is_ours_on_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def rows() -> Iterator[dict[str, str]]:
        yield {"text": "one"}
        raise ConnectionResetError("peer\n  is gone")

    _serve(monkeypatch, rows())
    with pytest.raises(CalibrationError, match=r"org/name/v1@test .*\(peer is gone\); check"):
        read_dataset(DATASET, None)


@pytest.mark.parametrize(
    ("rows", "column", "message"),
    [
        ([], None, "holds no records"),
        ([{"body": "a"}], None, "its columns are body: name one of them, as org/name/v1@test:"),
        ([{"body": "a"}], "text", "no column 'text'"),
        ([{"text": "a"}, {"text": 3}], None, "row 2: 'text' is int"),
        ([{"text": " "}], None, "all 1 values of 'text' are blank"),
    ],
)
def test_unusable_rows_are_refused(
    rows: list[dict[str, Any]], column: str | None, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _serve(monkeypatch, rows)
    with pytest.raises(CalibrationError, match=message):
        read_dataset(DATASET, column)


def test_without_a_network_the_error_says_what_to_do() -> None:
    with pytest.raises(CalibrationError, match=r"no local file.*Offline.*or give a file"):
        read_dataset(HubDataset("org/name", None, "train"), None)
