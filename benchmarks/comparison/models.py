"""The models of a comparison in the form each engine reads, made once and kept.

``smollm2-135m`` is the packaged model; ``random-1b`` has the shape of a Llama of a billion
weights, random, with the packaged model's tokenizer: overheads hide in a small model.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from comparison.gguf_file import write_gguf
from qtool.errors import EngineError
from qtool.formats.model_source import cache_folder, resolve_model
from qtool.formats.packaged import PACKAGED as MODELS_IN_PACKAGES
from qtool.formats.packaged import packaged_file
from qtool.quantize.options import QuantizeOptions
from qtool.quantize.pipeline import quantize_model

PACKAGED = "smollm2-135m"
RANDOM = "random-1b"
MODELS = (PACKAGED, RANDOM)
GGUF_NAME = "model.gguf"

# Round to nearest, as the peers' own formats do: the comparison is of speed, and no side gets a
# better method.
QUANTIZE = QuantizeOptions(method="rtn", bits=4, group_size=64, device="cpu")

RANDOM_SHAPE = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
}
# Spread of random weights; small enough for activations to stay finite.
RANDOM_STD = 0.02

# What OpenVINO's own guide says: symmetric INT4 in groups for every layer, and an INT8 head,
# which the exporter chooses itself.
EXPORT = (
    "export openvino --task text-generation-with-past "
    "--weight-format int4 --group-size 32 --sym --ratio 1.0"
)

# Part of the cache key: raise it when what is made here changes.
VERSION = 1


@dataclass(frozen=True, slots=True)
class Prepared:
    """One model.

    Attributes:
        source: bfloat16 Hugging Face folder.
        forms: what each engine loads: qtool's checkpoint, INT4 in groups of 64; for llama.cpp a
            GGUF file, Q4_0 with a Q8_0 head; for OpenVINO an exported folder, INT4 in groups of
            32 with an INT8 head.
    """

    name: str
    source: Path
    forms: dict[str, Path]


def prepare(name: str, pythons: Mapping[str, Path], say: Callable[[str], None]) -> Prepared:
    """Make what is not in the cache yet.

    Args:
        pythons: interpreters of the peers to prepare for, by engine.

    Raises:
        QtoolError: something cannot be made.
    """
    packaged = resolve_model(PACKAGED)
    template = packaged_file(MODELS_IN_PACKAGES[PACKAGED], cache_folder() / "packaged")
    recipe = f"{VERSION}:{packaged.name}:{QUANTIZE}:{RANDOM_SHAPE}"
    digest = hashlib.sha256(recipe.encode()).hexdigest()[:12]
    folder = cache_folder() / "benchmarks" / f"{name}-{digest}"
    source = packaged
    if name == RANDOM:
        source = folder / "bf16"
        _once(source, lambda out: _write_random(packaged, out), say)
    makers: dict[str, Callable[[Path], None]] = {
        "qtool": lambda out: _quantize(source, out),
        "llama.cpp": lambda out: _write_gguf(source, template, out),
        "openvino": lambda out: _export(source, pythons["openvino"], out),
    }
    for engine in ("qtool", *pythons):
        _once(folder / engine, makers[engine], say)
    forms = {engine: folder / engine for engine in ("qtool", *pythons)}
    if "llama.cpp" in forms:
        forms["llama.cpp"] /= GGUF_NAME
    return Prepared(name, source, forms)


def _once(folder: Path, make: Callable[[Path], None], say: Callable[[str], None]) -> None:
    """``make(folder)`` if it is missing; renamed into place, so that no half of one stays."""
    if folder.exists():
        return
    say(f"making {folder.parent.name}/{folder.name}")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{folder.name}.", dir=folder.parent) as temporary:
        target = Path(temporary) / folder.name
        make(target)
        os.rename(target, folder)


def _quantize(source: Path, out: Path) -> None:
    quantize_model(source, out, QUANTIZE)


def _write_gguf(source: Path, template: Path, out: Path) -> None:
    out.mkdir()
    write_gguf(source, template, out / GGUF_NAME)


def _export(source: Path, python: Path, out: Path) -> None:
    """OpenVINO's exporter, in OpenVINO's environment."""
    command = [str(python.with_name("optimum-cli")), *EXPORT.split()]
    command += ["--model", str(source), str(out)]
    offline = {**os.environ, "HF_HUB_OFFLINE": "1"}
    result = subprocess.run(command, capture_output=True, text=True, env=offline)
    if result.returncode != 0:
        raise EngineError(f"{' '.join(command)} failed: {result.stderr[-2000:]}")


def _write_random(like: Path, out: Path) -> None:
    """A Llama of :data:`RANDOM_SHAPE` with the tokenizer of ``like``, seeded."""
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig.from_pretrained(like)
    config.update({**RANDOM_SHAPE, "tie_word_embeddings": True})
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.ones(p.shape, dtype=torch.bfloat16)
        if p.ndim == 1
        else torch.randn(p.shape, generator=generator).mul_(RANDOM_STD).bfloat16()
        for name, p in model.named_parameters()
    }
    out.mkdir()
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(out)
    for file in like.iterdir():
        if file.suffix in {".json", ".jinja"} and not (out / file.name).exists():
            shutil.copyfile(file, out / file.name)
