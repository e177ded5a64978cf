"""Datasets of the Hugging Face hub, through its own client, from their beginning.

A dataset may be larger than any disk, so rows are streamed until :data:`MAX_SOURCE_BYTES` of text
have come; the manifest says whether that was all. Offline, the client's cache serves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from qtool.calibration.documents import Documents
from qtool.calibration.records import (
    MAX_SOURCE_BYTES,
    Column,
    choose_column,
    column_documents,
)
from qtool.calibration.sources import HubDataset
from qtool.errors import CalibrationError


def read_dataset(dataset: HubDataset, column: str | None) -> Documents:
    """The first documents of a dataset.

    Raises:
        CalibrationError: no connection and no copy, no such dataset, config, split or column, or
            what :func:`column_documents` refuses.
    """
    name, size, whole = column, 0, True
    values: list[tuple[str, object]] = []
    for number, row in enumerate(_rows(dataset), 1):
        if not values:
            name = choose_column(dataset, list(row), column)
        value = row.get(str(name))
        size += len(str(value).encode(errors="replace"))
        if size > MAX_SOURCE_BYTES:
            whole = False
            break
        values.append((f"row {number}", value))
    return column_documents(dataset, f"{dataset}:{name}", Column(str(name), values), whole=whole)


def _rows(dataset: HubDataset) -> Iterator[Mapping[str, Any]]:
    import datasets

    try:
        yield from datasets.load_dataset(
            dataset.path,
            dataset.config,
            split=dataset.split,
            streaming=not datasets.config.HF_DATASETS_OFFLINE,
        )
    # The client raises its own errors, those of its HTTP library, of Arrow and of the system.
    except Exception as error:
        why = " ".join(str(error).split())[:300] or type(error).__name__
        raise CalibrationError(
            f"{dataset} is no local file, and the hub does not give it as a dataset ({why}); check "
            "the name (ORG/NAME[/CONFIG][@SPLIT][:COLUMN]) and the connection, or give a file"
        ) from error
