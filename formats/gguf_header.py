"""What a GGUF file says before its data: metadata and tensors, in the time it takes to skip them.

The gguf package's reader builds an array for every token of the vocabulary (13 s for Gemma 3's
262144 tokens); here strings of arrays are skipped. Counts and lengths are held against the file's
size before they are believed.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from qtool.errors import CheckpointError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32

# Value types of the format by number; 8 is a string, 9 an array.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q"}
_SCALARS[12] = "d"
_STRING, _ARRAY = 8, 9

# An array of arrays is allowed and unheard of; deeper ones are an attack.
_MAX_DEPTH = 4

Scalar = int | float | bool | str


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor: its shape in torch's order, its GGML type by name, and its bytes."""

    shape: tuple[int, ...]
    type: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """Scalars and strings of the metadata (arrays are left out), and tensors by name."""

    metadata: Mapping[str, Scalar]
    tensors: Mapping[str, GgufTensor]


def read_gguf_header(path: Path) -> GgufHeader:
    """Read metadata and tensor entries, checked against the file's size.

    Raises:
        CheckpointError: the file is no GGUF file of a known version, or is damaged.
    """
    with path.open("rb") as file:
        if file.read(4) != MAGIC:
            raise CheckpointError(f"{path} does not begin with GGUF; give a .gguf file")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                return _parse(_Cursor(data))
            except (struct.error, ValueError, KeyError) as error:
                raise CheckpointError(
                    f"{path}: damaged GGUF header ({error}); copy the file again"
                ) from None


def _parse(cursor: _Cursor) -> GgufHeader:
    version = cursor.number("I")
    if version not in VERSIONS:
        raise ValueError(f"version {version}; known are {VERSIONS}")
    num_tensors, num_values = cursor.count(24), cursor.count(12)
    metadata: dict[str, Scalar] = {}
    for _ in range(num_values):
        key = cursor.string()
        value = cursor.value(cursor.number("I"))
        if value is not None:
            metadata[key] = value
    tensors: dict[str, GgufTensor] = {}
    end = 0
    for _ in range(num_tensors):
        name = cursor.string()
        tensors[name], offset = _tensor(cursor)
        end = max(end, offset + tensors[name].num_bytes)
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise ValueError(f"alignment {alignment}")
    begin = -(-cursor.position // alignment) * alignment
    if tensors and begin + end > cursor.size:
        raise ValueError(f"tensors end at byte {begin + end}, the file at {cursor.size}")
    return GgufHeader(metadata, tensors)


def _tensor(cursor: _Cursor) -> tuple[GgufTensor, int]:
    """One tensor's entry, and where its data begins."""
    dimensions = cursor.number("I")
    if dimensions > 8:
        raise ValueError(f"a tensor of {dimensions} dimensions")
    shape = tuple(cursor.number("Q") for _ in range(dimensions))[::-1]
    kind = GGMLQuantizationType(cursor.number("I"))
    block, block_bytes = GGML_QUANT_SIZES[kind]
    return GgufTensor(shape, kind.name, prod(shape) // block * block_bytes), cursor.number("Q")


class _Cursor:
    """Reads little-endian values of a mapped file one after the other."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self.size = len(data)
        self.position = len(MAGIC)

    def number(self, code: str) -> int:
        """The next whole number."""
        return int(self._scalar(code))

    def count(self, smallest: int) -> int:
        """A count of things of at least ``smallest`` bytes each."""
        count = self.number("Q")
        if count * smallest > self.size - self.position:
            raise ValueError(f"{count} entries in {self.size - self.position} bytes")
        return count

    def string(self) -> str:
        """The next string; bytes that are no text are replaced."""
        length = self.count(1)
        self._skip(length)
        return self._data[self.position - length : self.position].decode("utf-8", "replace")

    def value(self, kind: int, depth: int = 0) -> Scalar | None:
        """The next value of a type; an array is skipped and gives ``None``."""
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            self._skip_array(depth)
            return None
        return self._scalar(_SCALARS[kind])

    def _scalar(self, code: str) -> int | float | bool:
        (value,) = struct.unpack_from(f"<{code}", self._data, self.position)
        self.position += struct.calcsize(f"<{code}")
        found: int | float | bool = value
        return found

    def _skip(self, num_bytes: int) -> None:
        self.position += num_bytes

    def _skip_array(self, depth: int) -> None:
        kind = self.number("I")
        if kind in _SCALARS:
            width = struct.calcsize(f"<{_SCALARS[kind]}")
            self._skip(self.count(width) * width)
            return
        if depth == _MAX_DEPTH:
            raise ValueError("arrays in arrays in arrays")
        for _ in range(self.count(8)):
            if kind == _STRING:
                self._skip(self.count(1))
            else:
                self.value(kind, depth + 1)
