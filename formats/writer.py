"""Write a model folder: tensors stream out one by one, and appear all at once or not at all.

Everything is written into a temporary sibling of the target, synced, and renamed at the end.
A run killed at any moment leaves at most a folder named ``OUT.partial-…``, which nothing takes
for a model.

A shard begins with a header that holds every tensor's place, so places come first and data
after: :meth:`CheckpointWriter.add_source` takes a tensor's shape and a function that reads it,
and only one tensor is in memory when a shard is written.
"""

from __future__ import annotations

import glob
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import Tensor

from qtool.errors import CheckpointError
from qtool.formats.reader import CONFIG_NAME, INDEX_NAME, SINGLE_NAME
from qtool.formats.safetensors_file import TensorSource, write_safetensors

# 4 GiB: what the hub suggests.
MAX_SHARD_BYTES = 4 * 1024**3


# Follows the output's name in that of the folder where it grows.
PARTIAL = ".partial-"

# Likewise of the folder that a model goes to while another takes its place.
OLD = ".old-"

# Copied unchanged: tokenizer, chat template, generation defaults, custom code, licence.
SIDE_FILE_PATTERNS = (
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "*.model",
    "*.py",
    "LICENSE*",
)

# Keys in which libraries record where a model was loaded from: a path of somebody's machine.
PATH_KEYS = ("_name_or_path", "name_or_path")


def check_target(out: Path, source: Path | None, overwrite: bool) -> None:
    """Refuse an output folder that cannot be written or would harm something.

    Raises:
        CheckpointError: it is the source or holds it, exists without ``overwrite``, is a file,
            or cannot be created.
    """
    real = out.resolve()
    if source is not None and (real == source.resolve() or real in source.resolve().parents):
        raise CheckpointError(f"{out} is or holds the source model; choose another output folder")
    if out.is_symlink() or (real.exists() and not real.is_dir()):
        raise CheckpointError(f"{out} is a file or a link; choose the name of a new folder")
    if real.exists() and not overwrite:
        raise CheckpointError(f"{out} exists; choose another folder, or pass --overwrite")
    if overwrite and real.is_dir() and any(real.iterdir()) and not (real / CONFIG_NAME).exists():
        raise CheckpointError(
            f"{out} is a folder without {CONFIG_NAME}: it is no model, so --overwrite will not "
            "delete it; choose another folder"
        )
    parent = existing_parent(out)
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise CheckpointError(
            f"{out} cannot be created: {parent} is not a writable folder; choose another one"
        )


def check_free_space(out: Path, num_bytes: int) -> None:
    """Refuse a model of about ``num_bytes`` where the disk of ``out`` has no room for it.

    A folder that is replaced needs its room as well: it is deleted last.

    Raises:
        CheckpointError: naming what is needed and what is free.
    """
    parent = existing_parent(out)
    free = shutil.disk_usage(parent).free
    if free < num_bytes:
        raise CheckpointError(
            f"{out} needs about {num_bytes / 1e9:.3g} GB, {parent} has {free / 1e9:.3g} GB free; "
            "free space, or choose a folder on another disk"
        )


def existing_parent(out: Path) -> Path:
    """The nearest folder above ``out`` that is there."""
    return next(path for path in out.resolve().parents if path.exists())


def dump_json(path: Path, value: Any) -> None:
    """Write JSON, readable and ending in a newline."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


class CheckpointWriter:
    """Collects tensors into shards; use as a context manager and call :meth:`finish`.

    Attributes:
        folder: where files lie until the model is finished.
        digests: SHA-256 of the tensors in the shards written so far, by name.
        total_bytes: of all tensors added so far.

    Leaving the block without :meth:`finish` (an error, Ctrl-C) removes what was written.

    Raises:
        CheckpointError: the target cannot be used (:func:`check_target`), or writing fails.
    """

    def __init__(
        self, out: Path, *, overwrite: bool = False, max_shard_bytes: int = MAX_SHARD_BYTES
    ) -> None:
        check_target(out, None, overwrite)
        self._out = out.resolve()
        self._overwrite = overwrite
        self._max_shard_bytes = max_shard_bytes
        self._pending: dict[str, TensorSource] = {}
        self._pending_bytes = 0
        self._shards: list[list[str]] = []
        self.digests: dict[str, str] = {}
        self.total_bytes = 0
        with _write_errors(self._out):
            self._out.parent.mkdir(parents=True, exist_ok=True)
            prefix = f"{self._out.name}{PARTIAL}"
            self.folder = Path(tempfile.mkdtemp(prefix=prefix, dir=self._out.parent))

    def add(self, name: str, tensor: Tensor) -> None:
        """Queue a tensor that is in memory, where it stays until its shard is full."""
        source = TensorSource(tensor.dtype, tuple(tensor.shape), lambda: tensor)
        self.add_source(name, source)

    def add_source(self, name: str, source: TensorSource) -> None:
        """Queue a tensor that is read when its shard is full."""
        if name in self._pending or name in self.digests:
            raise CheckpointError(f"tensor {name} is written twice")
        if self._pending and self._pending_bytes + source.num_bytes > self._max_shard_bytes:
            self._flush()
        self._pending[name] = source
        self._pending_bytes += source.num_bytes
        self.total_bytes += source.num_bytes

    def add_json(self, relative: str, value: Any) -> None:
        """Write a JSON file at a path relative to the folder."""
        with _write_errors(self._out):
            dump_json(self.folder / relative, value)

    def add_text(self, relative: str, text: str) -> None:
        """Write a text file at a path relative to the folder."""
        self.add_bytes(relative, text.encode())

    def add_bytes(self, relative: str, data: bytes) -> None:
        """Write a file at a path relative to the folder."""
        path = self.folder / relative
        with _write_errors(self._out):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)

    def copy_side_files(self, source: Path) -> None:
        """Copy tokenizer, chat template and generation config byte for byte."""
        files = [path for pattern in SIDE_FILE_PATTERNS for path in sorted(source.glob(pattern))]
        with _write_errors(self._out):
            for path in files:
                if path.is_file():
                    shutil.copyfile(path, self.folder / path.name)

    def finish_tensors(self, config: dict[str, Any]) -> Path:
        """Write the last shard, index and config: the folder can be read, but is not in place."""
        self._flush()
        clean = {key: value for key, value in config.items() if key not in PATH_KEYS}
        with _write_errors(self._out):
            self._name_shards()
            self.add_json(CONFIG_NAME, clean)
        return self.folder

    def finish(self, config: dict[str, Any] | None = None) -> Path:
        """Rename the folder into place; with a config, :meth:`finish_tensors` first."""
        if config is not None:
            self.finish_tensors(config)
        with _write_errors(self._out):
            os.chmod(self.folder, 0o777 & ~_umask())
            _sync(self.folder)
            if self._out.exists():
                self._replace()
            else:
                os.rename(self.folder, self._out)
        self._remove_replaced()
        return self._out

    def _remove_replaced(self) -> None:
        """What runs that were killed while they swapped have left of models that were replaced."""
        for path in self._out.parent.glob(f"{glob.escape(self._out.name)}{OLD}*"):
            if [inside.name for inside in path.glob("*")] in ([], ["model"]):
                shutil.rmtree(path, ignore_errors=True)

    def _replace(self) -> None:
        """Swap with an existing folder, which comes back if that fails; nothing of it stays."""
        old = Path(tempfile.mkdtemp(prefix=f"{self._out.name}{OLD}", dir=self._out.parent))
        try:
            os.rename(self._out, old / "model")
            os.rename(self.folder, self._out)
        except BaseException:
            if (old / "model").exists():
                os.rename(old / "model", self._out)
            old.rmdir()
            raise
        shutil.rmtree(old)

    def _flush(self) -> None:
        if not self._pending:
            return
        path = self.folder / f"shard-{len(self._shards):05d}"
        with _write_errors(self._out):
            self.digests |= write_safetensors(path, self._pending)
        self._shards.append(list(self._pending))
        self._pending, self._pending_bytes = {}, 0

    def _name_shards(self) -> None:
        """Give the shards their final names, which hold their number, and write the index."""
        count = len(self._shards)
        if count == 1:
            os.rename(self.folder / "shard-00000", self.folder / SINGLE_NAME)
            return
        weight_map = {}
        for index, names in enumerate(self._shards):
            final = f"model-{index + 1:05d}-of-{count:05d}.safetensors"
            os.rename(self.folder / f"shard-{index:05d}", self.folder / final)
            weight_map.update(dict.fromkeys(names, final))
        index_json = {
            "metadata": {"total_size": self.total_bytes},
            "weight_map": dict(sorted(weight_map.items())),
        }
        self.add_json(INDEX_NAME, index_json)

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


@contextmanager
def _write_errors(out: Path) -> Iterator[None]:
    """What the system says while a model is written, as the user's error."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"{out} cannot be written ({error}) and is as it was before; free space or choose "
            "another folder, and run again"
        ) from None


def _umask() -> int:
    """The process's umask: mkdtemp creates a private folder, a model is none."""
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _sync(folder: Path) -> None:
    """Flush every file to disk, so that a rename never precedes the data it promises."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
