"""The grammar of a SOURCE: what a user writes -> where the text lies. Nothing is read here.

    builtin                               English that every Python installation carries
    self                                  text sampled from the model
    FILE[:COLUMN]                         .jsonl .json .csv .parquet; any other file is plain text
    ORG/NAME[/CONFIG][@SPLIT][:COLUMN]    a dataset of the Hugging Face hub; SPLIT is train

What lies on disk wins over every other meaning of a name. In a mix, ``=WEIGHT`` may follow.
docs/calibration.md has examples.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from qtool.errors import CalibrationError

BUILTIN = "builtin"
SELF = "self"

# Files of records, of which one column is the text.
RECORD_SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")
# A name that ends like this is a file even where there is none: a mistyped one never asks the hub.
FILE_SUFFIXES = (*RECORD_SUFFIXES, ".txt")

FORMS = (
    f"{BUILTIN!r}, {SELF!r}, a UTF-8 text file, a {', '.join(RECORD_SUFFIXES)} file, or a dataset "
    "of the hub as ORG/NAME"
)

_PART = r"[A-Za-z0-9_][A-Za-z0-9._-]*"
_HUB_ID = re.compile(rf"({_PART}/{_PART})(?:/({_PART}))?(?:@({_PART}))?")


@dataclass(frozen=True, slots=True)
class HubDataset:
    """A split of a dataset of the hub; ``config`` may be needed where a dataset has several."""

    path: str
    config: str | None
    split: str

    def __str__(self) -> str:
        config = f"/{self.config}" if self.config else ""
        return f"{self.path}{config}@{self.split}"


@dataclass(frozen=True, slots=True)
class Source:
    """One source.

    Attributes:
        place: ``builtin``, ``self``, a file, or a dataset.
        column: the column of records that holds the text, if the user named it.
        weight: its share of a mix, relative to the others' weights.
    """

    place: str | Path | HubDataset
    column: str | None = None
    weight: float = 1.0


def parse_source(spec: str) -> Source:
    """A single source.

    Raises:
        CalibrationError: it has none of the forms above, or names a file that does not exist.
    """
    if spec in (BUILTIN, SELF):
        return Source(spec)
    if spec and _path(spec).exists():
        return Source(_path(spec))
    start, colon, end = spec.rpartition(":")
    place, column = (start, end or None) if colon else (spec, None)
    if place in (BUILTIN, SELF):
        raise CalibrationError(f"{spec}: {place} has no columns; leave ':{column}' out")
    if place and (_path(place).exists() or place.lower().endswith(FILE_SUFFIXES)):
        return Source(_existing(place), column)
    if match := _HUB_ID.fullmatch(place):
        return Source(HubDataset(match[1], match[2], match[3] or "train"), column)
    raise CalibrationError(f"{spec or 'an empty name'} does not exist; a text source is {FORMS}")


def parse_mix(specs: Sequence[str]) -> tuple[Source, ...]:
    """Sources of a mix, each with its weight.

    Raises:
        CalibrationError: see :func:`parse_source`; there is none, one comes twice, or a weight is
            no positive number.
    """
    if not specs:
        raise CalibrationError(f"no text source is given; a text source is {FORMS}")
    sources = tuple(_parse_weighted(spec) for spec in specs)
    places = [replace(source, weight=1.0) for source in sources]
    for index, spec in enumerate(specs):
        if places[index] in places[:index]:
            raise CalibrationError(
                f"{spec} comes twice; name each source once, with a weight: {spec}=2"
            )
    return sources


def _parse_weighted(spec: str) -> Source:
    start, sign, end = spec.rpartition("=")
    if not sign or _path(spec).exists():
        return parse_source(spec)
    try:
        weight = float(end)
    except ValueError:
        return parse_source(spec)
    if not (math.isfinite(weight) and weight > 0):
        raise CalibrationError(f"{spec}: the weight must be a positive number, such as 0.5 or 3")
    return replace(parse_source(start), weight=weight)


def _path(name: str) -> Path:
    return Path(name).expanduser()


def _existing(name: str) -> Path:
    if not _path(name).exists():
        raise CalibrationError(f"{name} does not exist; a text source is {FORMS}")
    return _path(name)
