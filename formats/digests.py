"""``qtool/digests.json``: SHA-256 of every tensor as it was written, so that damage has a name.

A probe sees what changes a model's answers; a flipped bit in one weight of a million does not.
``qtool validate`` holds every byte against this file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from qtool.errors import CheckpointError
from qtool.formats.reader import CheckpointReader, read_json
from qtool.formats.safetensors_file import tensor_digest

DIGESTS_PATH = "qtool/digests.json"

# Grows with the layout of the file.
VERSION = 1

# A memory map counts as memory as far as it was read; it is renewed after so many bytes.
MAPPED_BYTES = 64 * 1024**2


def digests_json(digests: Mapping[str, str]) -> dict[str, Any]:
    """The file's JSON form: hexadecimal digests by tensor name."""
    return {"version": VERSION, "sha256": dict(sorted(digests.items()))}


def read_digests(folder: Path) -> Mapping[str, str] | None:
    """Digests by tensor name, or ``None`` if a folder has none of a kind we know.

    Raises:
        CheckpointError: it has some that cannot be read.
    """
    path = folder / DIGESTS_PATH
    if not path.is_file():
        return None
    values = read_json(path)
    if values.get("version") != VERSION:
        return None
    found = values.get("sha256")
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} has no digests; copy the checkpoint again")
    return found


def changed_tensors(reader: CheckpointReader, digests: Mapping[str, str]) -> Iterator[str]:
    """Names of tensors with other bytes than a digest has, in the reader's order.

    Tensors are read one by one; those that are on one side only are not looked at.
    """
    mapped = 0
    for name in reader.names():
        if name not in digests:
            continue
        if tensor_digest(reader.get(name)) != digests[name]:
            yield name
        mapped += reader.entry(name).num_bytes
        if mapped > MAPPED_BYTES:
            reader.close()
            mapped = 0
