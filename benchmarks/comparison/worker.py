"""One engine in a process of its own, told what to do by JSON lines.

    python -m comparison.worker ENGINE MODEL --threads N --sequences N

Requests come on standard input, one JSON object a line; each gets one line back:

    {"do": "run", "prompts": [[ids]], "new_tokens": n}      -> {"times": [[seconds]]}
    {"do": "quality", "windows": [[ids]], "reference": dir} -> {"perplexity": …, "kl": …, …}

The first line out is the engine's :class:`About`; an error is ``{"error": text}``. Whatever an
engine prints goes to standard error. End of input ends the process.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, Protocol

# Imported when chosen: no environment holds more than one of them.
ENGINES = {
    "qtool": "comparison.qtool_engine",
    "llama.cpp": "comparison.llama_cpp_engine",
    "openvino": "comparison.openvino_engine",
}


@dataclass(frozen=True, slots=True)
class About:
    """What an engine says of itself.

    Attributes:
        version: of the engine.
        form: of weights and cache, for people.
        weight_bytes: read at every decode step.
        kv_bytes_per_token: read at every decode step for each token of context.
    """

    version: str
    form: str
    weight_bytes: int
    kv_bytes_per_token: int


class Engine(Protocol):
    """What a worker drives. Its module has ``load(model, threads, sequences) -> Engine``."""

    @property
    def about(self) -> About:
        """Versions and sizes."""

    def run(self, prompts: list[list[int]], new_tokens: int) -> list[list[float]]:
        """Greedy, end of sequence ignored; when each token of each sequence was there, in seconds
        from submission."""

    def logits(self, window: list[int]) -> Any:
        """Float32 logits [n, vocab] of one sequence from an empty cache."""


def main() -> None:
    """Serve until the input ends."""
    replies = _take_standard_output()
    arguments = _parser().parse_args()
    # Every engine sees the same cores, whatever it makes of its thread options.
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[: arguments.threads])
    try:
        module = importlib.import_module(ENGINES[arguments.engine])
        engine = module.load(arguments.model, arguments.threads, arguments.sequences)
        _reply(replies, asdict(engine.about))
    except Exception as error:
        _reply(replies, {"error": f"{type(error).__name__}: {error}"})
        raise
    serve(engine, sys.stdin, replies)


def serve(engine: Engine, requests: Iterable[str], replies: IO[str]) -> None:
    """Answer every request; one that fails does not end the worker."""
    for line in requests:
        try:
            _reply(replies, answer(engine, json.loads(line)))
        except Exception as error:
            _reply(replies, {"error": f"{type(error).__name__}: {error}"})


def answer(engine: Engine, request: dict[str, Any]) -> dict[str, Any]:
    """Do what one request says.

    Raises:
        ValueError: it says something unknown.
    """
    if request["do"] == "run":
        return {"times": engine.run(request["prompts"], request["new_tokens"])}
    if request["do"] == "quality":
        return _quality(engine, request["windows"], Path(request["reference"]))
    raise ValueError(f"do={request['do']!r}: use run or quality")


def reference_file(folder: Path, index: int) -> Path:
    """Where the reference's log-probabilities of a window lie."""
    return folder / f"{index}.npy"


def _quality(engine: Engine, windows: list[list[int]], reference: Path) -> dict[str, float]:
    import numpy as np

    from comparison.quality import Sums, score

    sums = Sums()
    for index, window in enumerate(windows):
        sums += score(engine.logits(window), np.load(reference_file(reference, index)), window)
    return sums.means()


def _take_standard_output() -> IO[str]:
    """Keep it for replies, and send everybody else's prints to standard error."""
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return replies


def _reply(replies: IO[str], message: dict[str, Any]) -> None:
    replies.write(json.dumps(message) + "\n")
    replies.flush()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="comparison.worker", description=__doc__)
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("model", type=Path)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--sequences", type=int, required=True, help="most at a time")
    return parser


if __name__ == "__main__":
    main()
