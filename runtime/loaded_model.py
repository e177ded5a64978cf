"""A MODEL and options -> a decoder ready to run, and what was not as asked."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from qtool.errors import EngineError, UsageError
from qtool.formats.checkpoint import CheckpointReader
from qtool.formats.scheme import WeightScheme
from qtool.runtime.config import parse_decoder_config
from qtool.runtime.kernels import select_backend
from qtool.runtime.loader import load_decoder
from qtool.runtime.model import Decoder
from qtool.runtime.options import ModelOptions

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
CONFIG_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A decoder with its origin.

    Attributes:
        schemes: scheme of every quantized linear by name; empty for a plain model.
        max_model_len: longest sequence it was loaded for.
        notes: what was not as asked or expected, one sentence each.
    """

    folder: Path
    decoder: Decoder
    schemes: dict[str, WeightScheme]
    max_model_len: int
    notes: tuple[str, ...]

    @property
    def quantization(self) -> str:
        """Schemes in use, for people: ``W4 asym g64``, or ``none``."""
        names = sorted({scheme.describe() for scheme in self.schemes.values()})
        return " + ".join(names) or "none"


def load_model(
    folder: Path, options: ModelOptions, max_model_len: int | None = None
) -> LoadedModel:
    """Load a model folder.

    Raises:
        UsageError: a device that is not there, or a length the model cannot have.
        ModelError, CheckpointError: see :func:`qtool.runtime.loader.load_decoder`.
        EngineError: under ``strict``, when something is not as asked.
    """
    with CheckpointReader(folder) as reader:
        limit = parse_decoder_config(reader.config).max_position
        if max_model_len is not None and max_model_len > limit:
            raise UsageError(
                f"max_model_len={max_model_len}: the model was made for at most {limit} tokens"
            )
        device = resolve_device(options.device)
        dtype, notes = resolve_dtype(options.dtype, reader.config, device)
        selection = select_backend(options.backend, device, dtype)
        notes += selection.notes
        if options.strict:
            refuse_notes(notes)
        length = max_model_len or limit
        decoder, schemes = load_decoder(reader, selection.backend, length)
    if not schemes:
        notes = tuple(note for note in notes if "4-bit weights" not in note)
    return LoadedModel(folder, decoder, schemes, length, notes)


def refuse_notes(notes: Iterable[str]) -> None:
    """Under ``--strict`` a note is an error."""
    if text := "; ".join(notes):
        raise EngineError(f"--strict: {text}")


def resolve_device(name: str) -> torch.device:
    """``auto`` is a GPU if torch sees one.

    Raises:
        UsageError: ``cuda`` without a GPU.
    """
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise UsageError(
            "device cuda: torch sees no GPU; use --device cpu, or install torch for CUDA"
        )
    if name == "auto":
        name = "cuda" if available else "cpu"
    return torch.device(name)


def resolve_dtype(
    name: str, config: dict[str, object], device: torch.device
) -> tuple[torch.dtype, tuple[str, ...]]:
    """Compute dtype, and a note when it is not the checkpoint's."""
    stored = CONFIG_DTYPES.get(
        str(config.get("dtype") or config.get("torch_dtype")), torch.bfloat16
    )
    if name != "auto":
        return DTYPES[name], ()
    if device.type == "cpu" and stored == torch.float16:
        note = "the checkpoint is float16, which CPUs compute slowly: running in bfloat16"
        return torch.bfloat16, (f"{note} (--dtype fp32 keeps every bit)",)
    return stored, ()
