"""All formats of quantized checkpoints in one table: a format is a file, and a row here.

| format             | file                    | written by           |
|--------------------|-------------------------|----------------------|
| compressed-tensors | compressed_tensors.py   | llm-compressor, us   |
| awq                | awq.py                  | AutoAWQ, AutoRound, us |
| gptq               | gptq.py                 | AutoGPTQ, GPTQModel, us |
| fp8                | fp8.py                  | DeepSeek, transformers, us |
| fbgemm_fp8         | fbgemm_fp8.py           | FBGEMM (Llama 3.1 405B) |
| modelopt           | modelopt.py             | NVIDIA ModelOpt      |
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qtool.errors import CheckpointError, UsageError
from qtool.formats import awq, compressed_tensors, fbgemm_fp8, fp8, gptq, modelopt
from qtool.formats.linears import ReadableFormat, StoredLinears, WritableFormat
from qtool.formats.reader import CONFIG_NAME, CheckpointReader, read_json

_READABLE: tuple[ReadableFormat, ...] = (
    compressed_tensors,
    awq,
    gptq,
    fp8,
    fbgemm_fp8,
    modelopt,
)
_WRITABLE: tuple[WritableFormat, ...] = (compressed_tensors, awq, gptq, fp8)

# By the name config.json has for them, and by the name --format has.
READERS: Mapping[str, ReadableFormat] = {module.QUANT_METHOD: module for module in _READABLE}
WRITERS: Mapping[str, WritableFormat] = {module.NAME: module for module in _WRITABLE}
DEFAULT_FORMAT = compressed_tensors.NAME

# Keys of config.json that hold it; the second one is older.
CONFIG_KEYS = ("quantization_config", "compression_config")

# Where old exports have what config.json says today, and the format they are of.
_SIDE_FILES = {
    "hf_quant_config.json": modelopt.QUANT_METHOD,
    "quant_config.json": awq.QUANT_METHOD,
    "quantize_config.json": gptq.QUANT_METHOD,
}


def quantization_block(folder: Path, config: Mapping[str, Any]) -> dict[str, Any] | None:
    """What a model folder says about its quantization, with ``quant_method``; ``None`` if nothing.

    Args:
        folder: the model's; old exports have a file of their own there.
        config: its ``config.json``.

    Raises:
        CheckpointError: it cannot be read.
    """
    return quantization_source(folder, config)[0]


def quantizes_weights(folder: Path, config: Mapping[str, Any]) -> bool:
    """Whether a model folder has quantized weights, and not scales of its cache alone.

    Raises:
        CheckpointError: what it says cannot be read.
    """
    block = quantization_block(folder, config)
    if block is None:
        return False
    return block.get("quant_method") != compressed_tensors.NAME or bool(block.get("config_groups"))


def quantization_source(
    folder: Path, config: Mapping[str, Any]
) -> tuple[dict[str, Any] | None, str]:
    """The same, and the name of the file that says so.

    Raises:
        CheckpointError: it cannot be read.
    """
    inner = config.get("text_config")
    for holder in (config, inner if isinstance(inner, dict) else {}):
        for key in CONFIG_KEYS:
            if block := holder.get(key):
                if not isinstance(block, dict):
                    raise CheckpointError(f"{key} is {block!r}; it is a JSON object")
                return block, CONFIG_NAME
    for name, method in _SIDE_FILES.items():
        if (folder / name).is_file():
            return {"quant_method": method} | read_json(folder / name), name
    return None, CONFIG_NAME


def stored_linears(reader: CheckpointReader) -> StoredLinears | None:
    """The quantized linears of an opened checkpoint; ``None`` for a plain one.

    Raises:
        CheckpointError: a format or a variant of one that cannot be read, by name.
    """
    block = quantization_block(reader.folder, reader.config)
    if block is None:
        return None
    method = str(block.get("quant_method"))
    if method not in READERS:
        raise CheckpointError(
            f"{reader.folder}: quantization {method!r}; this version reads "
            f"{', '.join(READERS)}: quantize the original model with qtool"
        )
    try:
        return READERS[method].open_linears(block, reader.entries)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{reader.folder}: its quantization_config is damaged ({error!r}); copy it again"
        ) from None


def writer_of(name: str) -> WritableFormat:
    """The format called ``name``.

    Raises:
        UsageError: there is none.
    """
    if name not in WRITERS:
        raise UsageError(f"format={name!r}: choose one of {', '.join(WRITERS)}")
    return WRITERS[name]
