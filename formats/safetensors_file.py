"""One safetensors file, tensor by tensor: a header with every place first, then the data.

The library's own writer wants all tensors in memory; here one is. What is written is the same to
the byte.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from qtool.errors import CheckpointError
from qtool.formats.reader import DTYPES

# Headers end on a multiple of this, so that the data is aligned.
ALIGNMENT = 8

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class TensorSource:
    """A tensor that is still to be written.

    Attributes:
        dtype, shape: what it will be.
        read: gives the tensor, when its turn has come.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[], Tensor]

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor's data."""
        return math.prod(self.shape) * self.dtype.itemsize


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a tensor as a file holds them; no copy of a contiguous one in host memory."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    data: memoryview = flat.view(torch.uint8).numpy().data
    return data


def tensor_digest(tensor: Tensor) -> str:
    """SHA-256 of a tensor's bytes, in hexadecimal."""
    return hashlib.sha256(tensor_bytes(tensor)).hexdigest()


def read_tensor(path: Path, name: str) -> Tensor:
    """One tensor of a file, in memory of its own.

    Raises:
        CheckpointError: the file cannot be read.
    """
    try:
        with safe_open(path, framework="pt") as file:
            # A clone: the library's tensor is the mapped file.
            tensor: Tensor = file.get_tensor(name).clone()
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: cannot read {name} ({error})") from None
    return tensor


def write_safetensors(path: Path, sources: Mapping[str, TensorSource]) -> dict[str, str]:
    """Write one safetensors file, tensor by tensor; returns the digest of each.

    Wide types come first, so that every tensor is aligned to its type.

    Raises:
        OSError: the file cannot be written.
    """
    order = sorted(sources, key=lambda name: (-sources[name].dtype.itemsize, name))
    with path.open("wb") as file:
        file.write(_header({name: sources[name] for name in order}))
        return {name: _write(file, name, sources[name]) for name in order}


def _write(file: BinaryIO, name: str, source: TensorSource) -> str:
    """Write one tensor's data; returns its digest. The tensor is gone before the next is read."""
    tensor = source.read()
    assert (tensor.dtype, tuple(tensor.shape)) == (source.dtype, source.shape), name
    data = tensor_bytes(tensor)
    file.write(data)
    return hashlib.sha256(data).hexdigest()


def _header(sources: Mapping[str, TensorSource]) -> bytes:
    """Length and JSON of a safetensors header; the data lies in the order of ``sources``."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for name, source in sources.items():
        end = begin + source.num_bytes
        header[name] = {
            "dtype": _NAMES[source.dtype],
            "shape": list(source.shape),
            "data_offsets": [begin, end],
        }
        begin = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return struct.pack("<Q", len(text)) + text
