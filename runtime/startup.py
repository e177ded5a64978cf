"""Options -> a running engine with its tokenizer: the one way servers and ``LLM`` start."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from qtool.errors import UsageError
from qtool.formats.checkpoint import CONFIG_NAME, read_json
from qtool.formats.model_source import resolve_model
from qtool.formats.registry import quantization_block
from qtool.runtime.engine import Engine
from qtool.runtime.engine_thread import EngineThread
from qtool.runtime.loaded_model import load_model
from qtool.runtime.options import EngineOptions
from qtool.runtime.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class RunningEngine:
    """An engine thread and the tokenizer of its model."""

    engine: EngineThread
    tokenizer: Tokenizer


def start_engine(options: EngineOptions) -> RunningEngine:
    """Resolve and load the model, size the cache, start the thread.

    Raises:
        QtoolError: anything that stands in the way, before the thread starts.
    """
    folder = resolve_model(options.model)
    if options.quantization is not None:
        check_quantization(options.quantization, folder)
    tokenizer = Tokenizer.load(folder)
    model = load_model(folder, options.loading, options.max_model_len)
    return RunningEngine(EngineThread(Engine(model, tokenizer, options)), tokenizer)


def check_quantization(asked: str, folder: Path) -> None:
    """Hold what the user believes against what the checkpoint says.

    Raises:
        UsageError: they differ.
    """
    config = read_json(folder / CONFIG_NAME)
    found = (quantization_block(folder, config) or {}).get("quant_method")
    made_by = _recorded_method(folder)
    names = {name for name in (found, made_by) if name}
    if asked not in names:
        says = " / ".join(sorted(names)) or "not quantized"
        raise UsageError(
            f"quantization={asked!r}, but the checkpoint is {says}; leave the option out: it is "
            "read from the checkpoint"
        )


def _recorded_method(folder: Path) -> str | None:
    """The method qtool recorded when it wrote the checkpoint."""
    report = folder / "qtool" / "report.json"
    if not report.is_file():
        return None
    method = read_json(report).get("method")
    return method if isinstance(method, str) else None
