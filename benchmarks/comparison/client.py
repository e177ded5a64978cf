"""The driver's end of a worker: start it, ask it, end it."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from comparison.worker import About
from qtool.errors import EngineError, UsageError

BENCHMARKS = Path(__file__).resolve().parents[1]
ROOT = BENCHMARKS.parent
# How much of a dead worker's last words an error repeats.
LAST_WORDS = 2000

# Folder of each peer's environment below the folder of peers.
PEERS = {"llama.cpp": "llama-cpp", "openvino": "openvino"}


def peer_python(engine: str, peers: Path) -> Path:
    """The interpreter of a peer's environment.

    Raises:
        UsageError: it is not installed.
    """
    python = peers / PEERS[engine] / "bin" / "python"
    if not python.exists():
        raise UsageError(
            f"{python} does not exist: {engine} is compared with, and not installed; run: "
            "make peers"
        )
    return python


class Worker:
    """One engine, loaded, in its own process. Close it, or use it as a context manager.

    Raises:
        EngineError: it did not load.
    """

    def __init__(
        self, engine: str, python: Path, model: Path, threads: int, sequences: int
    ) -> None:
        self._engine = engine
        # A file, since nobody empties a pipe while the worker works.
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed in close()
        self._process = subprocess.Popen(
            [
                *(str(python), "-m", "comparison.worker", engine, str(model)),
                *("--threads", str(threads), "--sequences", str(sequences)),
            ],
            env=_environment(engine, threads),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        try:
            self.about = About(**self._read())
        except BaseException:
            self.close()
            raise

    def run(self, prompts: list[list[int]], new_tokens: int) -> list[list[float]]:
        """Times of tokens, see :class:`comparison.worker.Engine`. Raises EngineError."""
        request = {"do": "run", "prompts": prompts, "new_tokens": new_tokens}
        times: list[list[float]] = self._ask(request)["times"]
        return times

    def quality(self, windows: list[list[int]], reference: Path) -> dict[str, float]:
        """Perplexity, KL and agreement on the windows. Raises EngineError."""
        return self._ask({"do": "quality", "windows": windows, "reference": str(reference)})

    def close(self) -> None:
        """End the process; may be called twice."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            if stream is not None and not stream.closed:
                stream.close()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise EngineError(self._obituary()) from None
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise EngineError(self._obituary())
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise EngineError(f"{self._engine}: {reply['error']}")
        return reply

    def _obituary(self) -> str:
        self._process.wait()
        self._errors.seek(0)
        words = self._errors.read().decode(errors="replace").strip()[-LAST_WORDS:]
        return (
            f"{self._engine} ended with status {self._process.returncode}: {words or 'silently'}; "
            "if its environment is damaged, remove its folder and run: make peers"
        )


def _environment(engine: str, threads: int) -> dict[str, str]:
    """A worker finds this folder's modules; ours also this checkout as ``qtool``."""
    paths = [str(BENCHMARKS)]
    if engine not in PEERS:
        paths.append(str(ROOT / ".typecheck"))
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
    }
