"""What the rules look at: config, index, headers, and what the config says of each linear."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from qtool.errors import CheckpointError
from qtool.formats.reader import INDEX_NAME, CheckpointReader, TensorEntry, read_json
from qtool.formats.registry import quantization_source
from qtool.formats.validation.claim import Claim
from qtool.formats.validation.claims import Claims, claims_of
from qtool.formats.validation.layouts import (
    FLOATS,
    QUANTIZED_PARTS,
    Tensors,
    linear_size,
    words,
)


@dataclass(frozen=True, slots=True)
class Linear:
    """A module with a matrix that is no embedding.

    Attributes:
        name: full module name.
        tensors: its tensors by local name.
        claim: what the config says of it.
        stored: whether the disk holds quantized tensors for it.
        size: outputs and inputs, or ``None`` where the headers do not tell.
    """

    name: str
    tensors: Tensors
    claim: Claim | None
    stored: bool
    size: tuple[int, int] | None

    @property
    def kind(self) -> str:
        """The last part of the name: ``q_proj``."""
        return self.name.rpartition(".")[2]


@dataclass(frozen=True, slots=True, eq=False)
class Facts:
    """A checkpoint as the rules see it.

    Attributes:
        reader: the open checkpoint; rules read only small tensors.
        files: names at the top of the folder.
        index: the index as JSON, or ``None`` for a single file.
        block: how it is quantized, in the config's words; ``None`` for a plain model.
        block_file: the file that says so.
        claims: what the block says of a module.
        problem: why the block cannot be understood.
        linears: sorted by name.
    """

    reader: CheckpointReader
    files: frozenset[str]
    index: Mapping[str, Any] | None
    block: Mapping[str, Any] | None
    block_file: str
    claims: Claims
    problem: str | None
    linears: tuple[Linear, ...]

    @property
    def config(self) -> Mapping[str, Any]:
        """``config.json``."""
        return self.reader.config

    @property
    def decoder(self) -> Mapping[str, Any]:
        """The part of the config that describes the language model."""
        inner = self.config.get("text_config")
        return inner if isinstance(inner, dict) else self.config

    @property
    def method(self) -> str | None:
        """Name of the quantization method."""
        return None if self.block is None else self.block.get("quant_method")

    def stored(self) -> Iterator[tuple[Linear, Claim, tuple[int, int]]]:
        """Quantized linears of known size, with what the config says of them."""
        for linear in self.linears:
            if linear.stored and linear.claim is not None and linear.size is not None:
                yield linear, linear.claim, linear.size

    def small(self, name: str) -> Tensor:
        """A small tensor, in memory of its own."""
        return self.reader.get(name).clone()

    def json_file(self, name: str) -> dict[str, Any] | None:
        """A JSON object at the top of the folder; ``None`` if it is missing or none."""
        path = self.reader.folder / name
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return None
        return value if isinstance(value, dict) else None


def gather_facts(reader: CheckpointReader) -> Facts:
    """Look at an open checkpoint.

    Raises:
        CheckpointError: a file that is there cannot be read.
    """
    _open_shards(reader)
    block, block_file = quantization_source(reader.folder, reader.config)
    claims, problem = _understood(block)
    index_path = reader.folder / INDEX_NAME
    return Facts(
        reader=reader,
        files=frozenset(path.name for path in reader.folder.iterdir()),
        index=read_json(index_path) if index_path.exists() else None,
        block=block,
        block_file=block_file,
        claims=claims,
        problem=problem,
        linears=tuple(_linears(reader, claims)),
    )


def _open_shards(reader: CheckpointReader) -> None:
    """The safetensors library, which every loader uses, has checks that our reader has not."""
    for shard in sorted({entry.shard for entry in reader.entries.values()}):
        path = reader.folder / shard
        try:
            with safe_open(path, framework="pt"):
                pass
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{path}: the safetensors library refuses it ({error}); write the file again"
            ) from None


def _understood(block: Mapping[str, Any] | None) -> tuple[Claims, str | None]:
    """What a block says of modules, or why that cannot be known."""
    if block is not None:
        try:
            return claims_of(block), None
        except CheckpointError as error:
            return _no_claim, str(error)
    return _no_claim, None


def _no_claim(_: str) -> None:
    return None


def by_module(entries: Mapping[str, TensorEntry]) -> dict[str, dict[str, TensorEntry]]:
    """Tensors by module, then by local name."""
    modules: dict[str, dict[str, TensorEntry]] = {}
    for name, entry in sorted(entries.items()):
        module, _, local = name.rpartition(".")
        modules.setdefault(module, {})[local] = entry
    return modules


def is_embedding(module: str) -> bool:
    """Whether a module's matrix is a table of embeddings, by its name."""
    last = module.rpartition(".")[2]
    return "embed" in last or last in ("wte", "wpe")


def _linears(reader: CheckpointReader, claims: Claims) -> Iterator[Linear]:
    for name, tensors in by_module(reader.entries).items():
        weight = tensors.get("weight")
        coded = weight is not None and weight.dtype not in FLOATS
        stored = coded or not QUANTIZED_PARTS.isdisjoint(tensors)
        matrix = weight is not None and len(weight.shape) == 2 and not is_embedding(name)
        if stored or matrix:
            claim = claims(name)
            size = None if claim is None else _size(reader, name, tensors, claim)
            yield Linear(name, tensors, claim, stored, size)


def _size(
    reader: CheckpointReader, name: str, tensors: Tensors, claim: Claim
) -> tuple[int, int] | None:
    """N and K; packed words round K up, so a stored shape that fits them wins."""
    size = linear_size(tensors, claim)
    shape = tensors.get("weight_shape")
    if size is None or shape is None or shape.shape != (2,) or shape.dtype in FLOATS:
        return size
    rows, columns = reader.get(f"{name}.weight_shape").tolist()
    packed = tensors["weight_packed"].shape[1] if "weight_packed" in tensors else None
    fits = rows == size[0] and columns > 0 and words(columns, claim.bits) == packed
    return (rows, columns) if fits else size
