"""The folder of an unfinished run, ``OUT.work``: what is done stays done.

Every finished block is committed at once: its tensors as they will be written, its records, and
what flows into the next block. A commit counts when ``block-NNNNN.json`` is in place, which comes
last and holds the digest of everything else, so a run killed at any moment has a whole number of
blocks, and damage is noticed. The folder belongs to one request, named by its fingerprint, and to
one process at a time.

    run.json                    the fingerprint
    block-00003.safetensors     tensors of block 3
    block-00003.json            records and digests: the commit
    state-00004.safetensors     what flows into block 4; earlier ones are deleted
"""

from __future__ import annotations

import fcntl
import glob
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from torch import Tensor

from qtool.calibration.walk import WalkState
from qtool.errors import CheckpointError, UsageError
from qtool.formats.reader import read_header, read_json
from qtool.formats.safetensors_file import (
    TensorSource,
    read_tensor,
    tensor_digest,
    write_safetensors,
)
from qtool.formats.writer import PARTIAL
from qtool.quantize.phases import RUN_PATH

# Grows with the layout of these files.
LAYOUT = 3

# The fingerprint, sealed: its first line is the run's digest.
FINGERPRINT = "run.json"

# All that is ever written here; a folder with anything else belongs to somebody.
_OURS = re.compile(r"(run\.json|(block|state)-\d{5}\.(json|safetensors))(\.tmp)?")

_STREAMS = ("hidden", "held_out", "originals")

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class CommittedBlock:
    """A block that is done.

    Attributes:
        path: file of its tensors.
        digests: SHA-256 of each tensor, taken when it was in memory.
        facts: what else was committed, as JSON.
    """

    path: Path
    digests: Mapping[str, str]
    facts: Mapping[str, Any]

    def sources(self) -> dict[str, TensorSource]:
        """Its tensors, to be read one by one."""
        return {
            name: TensorSource(entry.dtype, entry.shape, partial(read_tensor, self.path, name))
            for name, entry in sorted(read_header(self.path).items())
        }


def work_path(out: Path) -> Path:
    """Where the unfinished run of an output folder lies."""
    real = out.resolve()
    return real.with_name(f"{real.name}.work")


def was_published(folder: Path, out: Path) -> bool:
    """Whether the unfinished run of ``out`` has put ``folder`` into place itself.

    It has if it was stopped between that and its end, when other formats are still to be written or
    the work folder to be removed.
    """
    try:
        run = _digest_line(work_path(out) / FINGERPRINT)
        return read_json(folder / RUN_PATH).get("run") == run
    except (OSError, UnicodeDecodeError, CheckpointError):
        return False


def bytes_done(out: Path) -> int:
    """Bytes that an unfinished run has on the disk already."""
    return sum(path.stat().st_size for path in work_path(out).glob("*"))


class WorkFolder:
    """The blocks that are done, and where the walk goes on; use as a context manager.

    Leaving it closes the folder and keeps it, unless no block is in it; :meth:`discard` removes it.

    Args:
        out: the output folder of the run.
        fingerprint: everything that decides the result, as JSON.
        restart: delete what is there.

    Attributes:
        blocks: the committed blocks, in order.
        state: where the walk goes on, or ``None`` at the beginning.
        notes: what was lost of an earlier run, one sentence each.

    Raises:
        UsageError: it holds a run with another fingerprint.
        CheckpointError: another process works in it, or it cannot be written.
    """

    def __init__(self, out: Path, fingerprint: Mapping[str, Any], *, restart: bool = False) -> None:
        self.folder = work_path(out)
        self.blocks: list[CommittedBlock] = []
        self.state: WalkState | None = None
        self.notes: list[str] = []
        with self._errors():
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.folder, os.O_RDONLY)
        try:
            self._refuse_company()
            self._refuse_foreign_files()
            if restart:
                self._clear()
            self._claim(json.loads(json.dumps(fingerprint)))
            self._restore()
            self._remove_partial_results(out.resolve())
        except BaseException:
            os.close(self._lock)
            raise

    def commit(
        self,
        tensors: Mapping[str, Tensor],
        facts: Mapping[str, Any],
        state: WalkState | None,
    ) -> None:
        """Save the next block for good.

        Args:
            tensors: the block's tensors as the result will hold them.
            facts: records and figures, as JSON.
            state: what flows into the block after it, if anything does.
        """
        index = len(self.blocks)
        with self._errors():
            path = self._path(index, "safetensors")
            digests = self._write_tensors(path, tensors)
            streams = _streams(state)
            states = self._write_tensors(self._state_path(index + 1), streams) if streams else {}
            body = {"digests": digests, "state": states, "facts": facts}
            self._write_json(self._path(index, "json"), _sealed(body))
            self._state_path(index).unlink(missing_ok=True)
        self.blocks.append(CommittedBlock(path, digests, json.loads(json.dumps(facts))))
        self.state = state

    @property
    def run(self) -> str:
        """Digest of the fingerprint: what :func:`was_published` knows the run by."""
        return _digest_line(self.folder / FINGERPRINT)

    def discard(self) -> None:
        """Delete the folder with all that is in it; killed meanwhile, none of it is a run."""
        name = self.folder.name.removesuffix(".work")
        gone = self.folder.with_name(f"{name}{PARTIAL}work")
        with suppress(OSError):
            os.rename(self.folder, gone)
        for folder in (gone, self.folder):
            shutil.rmtree(folder, ignore_errors=True)

    def __enter__(self) -> WorkFolder:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self.blocks:
            self.discard()
        os.close(self._lock)

    def _path(self, index: int, suffix: str) -> Path:
        return self.folder / f"block-{index:05d}.{suffix}"

    def _state_path(self, index: int) -> Path:
        return self.folder / f"state-{index:05d}.safetensors"

    def _refuse_company(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise CheckpointError(
                f"{self.folder} is in use by another qtool; wait for it, or choose another output "
                "folder"
            ) from None

    def _refuse_foreign_files(self) -> None:
        foreign = sorted(p.name for p in self.folder.iterdir() if not _OURS.fullmatch(p.name))
        if foreign:
            raise CheckpointError(
                f"{self.folder} holds {foreign[0]}, which no run of qtool wrote; the name is "
                "that of this output's work folder: move it away, or choose another output folder"
            )

    def _clear(self) -> None:
        with self._errors():
            for path in self.folder.iterdir():
                path.unlink()

    def _claim(self, fingerprint: dict[str, Any]) -> None:
        """Hold the fingerprint against that of an earlier run, or write it."""
        path = self.folder / FINGERPRINT
        wanted = {"layout": LAYOUT, **fingerprint}
        found = _read_sealed(path)
        if found is None:
            if any(self.folder.iterdir()):
                self.notes.append(f"{path} is damaged or gone; all blocks are done again")
            self._clear()
            with self._errors():
                self._write_json(path, _sealed(wanted))
            return
        names = sorted(n for n in wanted.keys() | found.keys() if wanted.get(n) != found.get(n))
        if names:
            changes = "; ".join(
                f"{name}: {_shown(found.get(name))} there, {_shown(wanted.get(name))} now"
                for name in names
            )
            raise UsageError(
                f"{self.folder} holds an unfinished run of something else ({changes}); run what it "
                "was begun with to go on, or pass --restart to discard it and begin again"
            )

    def _restore(self) -> None:
        """Take over the committed blocks that are whole, and the walk's state after them."""
        states: Mapping[str, str] = {}
        while (body := _read_sealed(self._path(len(self.blocks), "json"))) is not None:
            path = self._path(len(self.blocks), "safetensors")
            if _read_checked(path, body["digests"], keep=False) is None:
                self.notes.append(f"{path.name} is damaged; its block is done again")
                break
            self.blocks.append(CommittedBlock(path, body["digests"], body["facts"]))
            states = body["state"]
        if states:
            self._restore_state(states)
        self._delete_stale()

    def _restore_state(self, digests: Mapping[str, str]) -> None:
        path = self._state_path(len(self.blocks))
        tensors = _read_checked(path, digests, keep=True)
        if tensors is None:
            self.notes.append(f"{path.name} is damaged or gone; all blocks are done again")
            self.blocks.clear()
            return
        self.state = WalkState(
            len(self.blocks), **{stream: tensors.get(stream) for stream in _STREAMS}
        )

    def _delete_stale(self) -> None:
        """Remove what no commit counts: later blocks, other states, files half written."""
        keep = {FINGERPRINT, self._state_path(len(self.blocks)).name}
        for index in range(len(self.blocks)):
            keep |= {self._path(index, suffix).name for suffix in ("json", "safetensors")}
        with self._errors():
            for path in self.folder.iterdir():
                if path.name not in keep:
                    path.unlink()

    def _remove_partial_results(self, out: Path) -> None:
        """What killed runs have half written; nobody else writes this output now."""
        for path in out.parent.glob(f"{glob.escape(out.name)}{PARTIAL}*"):
            shutil.rmtree(path, ignore_errors=True)

    def _write_tensors(self, path: Path, tensors: Mapping[str, Tensor]) -> dict[str, str]:
        def write(temporary: Path) -> dict[str, str]:
            return write_safetensors(temporary, {n: _source(t) for n, t in tensors.items()})

        return self._write(path, write)

    def _write_json(self, path: Path, text: str) -> None:
        self._write(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))

    def _write(self, path: Path, write: Callable[[Path], Result]) -> Result:
        """A file that is there whole or not at all, also after a power cut."""
        temporary = path.with_name(f"{path.name}.tmp")
        result = write(temporary)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
        os.fsync(self._lock)
        return result

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise CheckpointError(
                f"{self.folder} cannot be written ({error}); make room or choose another output "
                "folder; the same command goes on from the last finished block"
            ) from None


def _streams(state: WalkState | None) -> dict[str, Tensor]:
    """The hidden states of a walk, by name."""
    found = {} if state is None else {name: getattr(state, name) for name in _STREAMS}
    return {name: tensor for name, tensor in found.items() if tensor is not None}


def _shown(value: object) -> object:
    """An option's value for people."""
    return "not given" if value is None else value


def _source(tensor: Tensor) -> TensorSource:
    return TensorSource(tensor.dtype, tuple(tensor.shape), lambda: tensor)


def _sealed(body: Mapping[str, Any]) -> str:
    """JSON with its own digest, so that a damaged file is not taken for another value."""
    text = json.dumps(body, indent=1)
    return f"{hashlib.sha256(text.encode()).hexdigest()}\n{text}"


def _digest_line(path: Path) -> str:
    """Digest of a sealed file, as the file says."""
    return path.read_text(encoding="utf-8").partition("\n")[0]


def _read_sealed(path: Path) -> dict[str, Any] | None:
    """Inverse of :func:`_sealed`; ``None`` if the file is not there or not whole."""
    try:
        digest, _, text = path.read_text(encoding="utf-8").partition("\n")
    except (OSError, UnicodeDecodeError):
        return None
    if hashlib.sha256(text.encode()).hexdigest() != digest:
        return None
    body: dict[str, Any] = json.loads(text)
    return body


def _read_checked(
    path: Path, digests: Mapping[str, str], *, keep: bool
) -> dict[str, Tensor] | None:
    """Tensors of a file (none of them, without ``keep``), or ``None`` if one is not as it was."""
    tensors = {}
    try:
        if read_header(path).keys() != digests.keys():
            return None
        for name, digest in digests.items():
            tensor = read_tensor(path, name)
            if tensor_digest(tensor) != digest:
                return None
            if keep:
                tensors[name] = tensor
    except (OSError, CheckpointError):
        return None
    return tensors
