"""What a checkpoint consists of, module by module, from headers alone.

Parameters are those of the model: a quantized matrix counts its weights, not its words, and
scales count as bytes only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

from qtool.formats.gguf_header import GgufHeader, read_gguf_header
from qtool.formats.reader import CheckpointReader, TensorEntry, read_header
from qtool.formats.safetensors_file import read_tensor
from qtool.formats.validation.claim import Claim
from qtool.formats.validation.facts import Facts, by_module, gather_facts
from qtool.formats.validation.inferred import inferred_claim
from qtool.formats.validation.layouts import CACHE_PARTS, QUANTIZED_PARTS, linear_size

KINDS = ("embedding", "attention", "mlp", "norm", "head", "other")

# Parts of names in the hub's, GGUF's and older spellings; the first kind that fits holds.
_WORDS: Mapping[str, tuple[str, ...]] = {
    "norm": ("norm", "ln_", "layernorm"),
    "embedding": ("embed", "token_embd", "wte", "wpe"),
    "mlp": ("mlp", "ffn", "feed_forward", "experts", "block_sparse_moe"),
    "attention": ("attn", "attention"),
    "head": ("lm_head", "output."),
}


@dataclass(frozen=True, slots=True)
class Module:
    """One module with tensors of its own.

    Attributes:
        kind: one of :data:`KINDS`.
        shape: of its weight, unpacked; empty if it has none.
        scheme: how the weight is stored: a dtype, a scheme, or a GGML type.
        parameters: its share of the model's.
        num_bytes: on disk, scales and zeros included.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    scheme: str
    parameters: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Inventory:
    """A checkpoint: who it is, what it holds, and the files that hold it (bytes by name)."""

    format: str
    architecture: str
    modules: tuple[Module, ...]
    files: Mapping[str, int]
    config: Mapping[str, Any]

    @property
    def parameters(self) -> int:
        """Of the whole model; a tied head is the embedding and counts once."""
        return sum(module.parameters for module in self.modules)

    @property
    def num_bytes(self) -> int:
        """Of all tensors."""
        return sum(module.num_bytes for module in self.modules)


def take_inventory(path: Path) -> Inventory:
    """Look at a model folder, a safetensors file or a GGUF file.

    Raises:
        CheckpointError: headers are damaged, or contradict each other or the files' sizes.
    """
    if path.is_dir():
        with CheckpointReader(path) as reader:
            return _folder_inventory(gather_facts(reader))
    if path.suffix.lower() == ".gguf":
        return _gguf_inventory(path, read_gguf_header(path))
    return _file_inventory(path)


def kind_of(module: str) -> str:
    """What a module is for, by its name."""
    name = f"{module}.".lower()
    last = name.rpartition(".")[0].rpartition(".")[2]
    for kind, words in _WORDS.items():
        # Norms lie inside of everything, so only the last part makes one.
        if any(word in (last if kind == "norm" else name) for word in words):
            return kind
    return "other"


def _folder_inventory(facts: Facts) -> Inventory:
    known = {linear.name: linear for linear in facts.linears if linear.stored}
    sizes = {name: linear.size for name, linear in known.items()}
    claims = {name: linear.claim for name, linear in known.items()}
    modules = by_module(facts.reader.entries)
    names = facts.config.get("architectures")
    architecture = names[0] if isinstance(names, list) and names else facts.config.get("model_type")
    return Inventory(
        format=_format(facts),
        architecture=str(architecture),
        modules=tuple(
            _module(name, tensors, claims.get(name), sizes.get(name))
            for name, tensors in modules.items()
        ),
        files=_weight_files(facts),
        config=facts.config,
    )


def _format(facts: Facts) -> str:
    if facts.block is None:
        return "plain safetensors"
    detail = facts.block.get("format") or facts.block.get("checkpoint_format")
    return f"{facts.method} {detail}" if isinstance(detail, str) else str(facts.method)


def _weight_files(facts: Facts) -> dict[str, int]:
    shards = sorted({entry.shard for entry in facts.reader.entries.values()})
    return {name: (facts.reader.folder / name).stat().st_size for name in shards}


def _file_inventory(path: Path) -> Inventory:
    modules = []
    for name, tensors in by_module(read_header(path)).items():
        quantized = not QUANTIZED_PARTS.isdisjoint(tensors)
        claim = inferred_claim(tensors, partial(_numbers, path, name)) if quantized else None
        size = None if claim is None else linear_size(tensors, claim)
        modules.append(_module(name, tensors, claim, size))
    files = {path.name: path.stat().st_size}
    return Inventory("safetensors file", "unknown", tuple(modules), files, {})


def _numbers(path: Path, module: str, local: str) -> list[int]:
    """A small tensor of whole numbers."""
    numbers: list[int] = read_tensor(path, f"{module}.{local}").tolist()
    return numbers


def _module(
    name: str,
    tensors: Mapping[str, TensorEntry],
    claim: Claim | None,
    size: tuple[int, int] | None,
) -> Module:
    num_bytes = sum(entry.num_bytes for entry in tensors.values())
    if claim is not None and size is not None:
        bias = tensors.get("bias")
        parameters = prod(size) + (prod(bias.shape) if bias is not None else 0)
        return Module(name, kind_of(name), size, claim.describe(), parameters, num_bytes)
    own = [e for local, e in tensors.items() if local not in CACHE_PARTS | QUANTIZED_PARTS]
    weight = tensors.get("weight")
    shape = weight.shape if weight is not None else ()
    parameters = sum(prod(entry.shape) for entry in own)
    dtypes = sorted({str(entry.dtype).removeprefix("torch.") for entry in own})
    scheme = ", ".join(dtypes) or ("scales" if CACHE_PARTS.issuperset(tensors) else "unknown")
    return Module(name, kind_of(name), shape, scheme, parameters, num_bytes)


def _gguf_inventory(path: Path, header: GgufHeader) -> Inventory:
    return Inventory(
        format=f"GGUF, {path.name}",
        architecture=str(header.metadata.get("general.architecture", "unknown")),
        modules=tuple(_gguf_modules(header)),
        files={path.name: path.stat().st_size},
        config=header.metadata,
    )


def _gguf_modules(header: GgufHeader) -> Iterator[Module]:
    for name, tensor in header.tensors.items():
        module = name.removesuffix(".weight")
        count = prod(tensor.shape)
        yield Module(module, kind_of(module), tensor.shape, tensor.type, count, tensor.num_bytes)
