"""Read a Hugging Face folder of safetensors: one tensor at a time, everything checked first.

Opening a folder reads only the shards' headers. They are held against the index and against
the files' sizes, so a missing, truncated, renamed or stale shard is an error that names it
before any work begins. Tensors are memory-mapped: the whole model is never in memory.

The safetensors header is parsed here, because the checks need offsets and the library opens a
file only whole. Pickle files are refused by name.
"""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from qtool.errors import CheckpointError

CONFIG_NAME = "config.json"
SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"

# The format's own limit; a longer length field is garbage, not a header.
MAX_HEADER_BYTES = 100_000_000

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where a tensor lies and what it is, from a shard's header."""

    shard: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor's data."""
        return math.prod(self.shape) * self.dtype.itemsize


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        CheckpointError: the file is missing, not JSON, or not an object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing: a model folder has a {path.name}") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a {type(value).__name__}, not a JSON object")
    return value


def read_header(path: Path) -> dict[str, TensorEntry]:
    """Entries of one safetensors file, checked against the file's size.

    Raises:
        CheckpointError: the file is truncated, or is no safetensors file.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
            raise CheckpointError(
                f"{path}: {size} bytes cannot hold a header of {length}; the file is truncated or "
                "not safetensors: copy it again"
            )
        raw = file.read(length)
    try:
        header = json.loads(raw, object_pairs_hook=_without_duplicates)
        header.pop("__metadata__", None)
        entries = {name: _entry(path.name, value) for name, value in header.items()}
        end = max((value["data_offsets"][1] for value in header.values()), default=0)
    except (LookupError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path}: damaged safetensors header ({error})") from None
    if 8 + length + end != size:
        raise CheckpointError(
            f"{path}: the header promises {8 + length + end} bytes, the file has {size}; it is "
            "truncated or damaged: copy it again"
        )
    return entries


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; ValueError if a name stands there twice, of which json would drop one."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in found if names.count(name) > 1)
        raise ValueError(f"{twice} is there twice")
    return found


def _entry(shard: str, value: dict[str, Any]) -> TensorEntry:
    dtype = DTYPES.get(value["dtype"])
    if dtype is None:
        raise ValueError(f"dtype {value['dtype']!r}; known are {', '.join(DTYPES)}")
    begin, end = value["data_offsets"]
    entry = TensorEntry(shard, dtype, tuple(int(size) for size in value["shape"]))
    if end - begin != entry.num_bytes or min(begin, *entry.shape, 0) < 0:
        raise ValueError(f"{end - begin} bytes for {entry.shape} of {value['dtype']}")
    return entry


def _index_shards(folder: Path) -> dict[str, str] | None:
    """The index's weight map, or ``None`` for a folder with a single file."""
    if not (folder / INDEX_NAME).exists():
        return None
    weight_map = read_json(folder / INDEX_NAME).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{folder / INDEX_NAME} has no weight_map; copy the model again")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise CheckpointError(
                f"{folder / INDEX_NAME}: {name} lies in {shard!r}; a shard is a file name in the "
                "model's own folder, never a path"
            )
    return weight_map


def _refuse_unlisted_shards(folder: Path, weight_map: dict[str, str]) -> None:
    """Numbered shards belong to the index; files of other names may lie beside a model."""
    unlisted = {p.name for p in folder.glob("model-*-of-*.safetensors")} - set(weight_map.values())
    if unlisted:
        raise CheckpointError(
            f"{folder}: {', '.join(sorted(unlisted)[:3])} is not in {INDEX_NAME}; the shards and "
            "the index are of different exports: copy the model again into a new folder"
        )


def _refuse_without_safetensors(folder: Path) -> None:
    pickles = sorted(p.name for p in folder.glob("*") if p.suffix in (".bin", ".pt", ".pth"))
    if pickles:
        raise CheckpointError(
            f"{folder} holds pickle files ({', '.join(pickles[:3])}), which can run code when "
            "read; convert the model to safetensors first (save_pretrained does)"
        )
    shards = sorted(p.name for p in folder.glob("*.safetensors"))
    found = f"found {', '.join(shards[:3])}" if shards else "found no *.safetensors"
    raise CheckpointError(
        f"{folder}: {found}; a model is {SINGLE_NAME}, or shards and {INDEX_NAME}"
    )


def _all_entries(folder: Path) -> dict[str, TensorEntry]:
    weight_map = _index_shards(folder)
    if weight_map is None:
        if not (folder / SINGLE_NAME).is_file():
            _refuse_without_safetensors(folder)
        return read_header(folder / SINGLE_NAME)
    _refuse_unlisted_shards(folder, weight_map)
    entries: dict[str, TensorEntry] = {}
    for shard in sorted(set(weight_map.values())):
        if not (folder / shard).is_file():
            raise CheckpointError(f"{folder / shard} is missing, but {INDEX_NAME} names it")
        header = read_header(folder / shard)
        promised = {name for name, value in weight_map.items() if value == shard}
        for name in sorted(promised ^ set(header)):
            where = "is not in" if name in promised else "lies unlisted in"
            raise CheckpointError(
                f"{folder}: tensor {name} {where} {shard} while {INDEX_NAME} says otherwise; the "
                "shards and the index are of different exports"
            )
        entries.update(header)
    return entries


class CheckpointReader:
    """Tensors and config of a model folder.

    Attributes:
        folder: the folder.
        config: ``config.json`` as a dict.
        entries: name -> :class:`TensorEntry`, for every tensor of the model.

    Raises:
        CheckpointError: on opening, when files are missing, damaged or contradict each other.
    """

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise CheckpointError(f"{folder} is not a folder; a model is a Hugging Face folder")
        self.folder = folder
        self.config = read_json(folder / CONFIG_NAME)
        self.entries = _all_entries(folder)
        self._open: dict[str, Any] = {}

    def names(self) -> list[str]:
        """All tensor names, sorted."""
        return sorted(self.entries)

    def __contains__(self, name: str) -> bool:
        return name in self.entries

    def entry(self, name: str) -> TensorEntry:
        """Header entry of a tensor; CheckpointError when there is none."""
        if name not in self.entries:
            raise CheckpointError(
                f"{self.folder} has no tensor {name}; the checkpoint is incomplete"
            )
        return self.entries[name]

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape without reading data."""
        return self.entry(name).shape

    def dtype(self, name: str) -> torch.dtype:
        """Dtype without reading data."""
        return self.entry(name).dtype

    def get(self, name: str) -> Tensor:
        """The tensor, memory-mapped: clone it before changing it or deleting the file."""
        shard = self.entry(name).shard
        try:
            if shard not in self._open:
                self._open[shard] = safe_open(self.folder / shard, framework="pt")
            tensor: Tensor = self._open[shard].get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{self.folder / shard}: cannot read {name} ({error})") from None
        return tensor

    def close(self) -> None:
        """Drop the memory maps; tensors already handed out stay valid."""
        self._open.clear()

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
