"""A quantized checkpoint in another format, with the same weights to the bit, or not at all.

Three passes over the weights, which hold one linear in memory, the second a shard: what would be
lost, then the new folder, then the folder read back. Weights of both are dequantized to float32 and
compared by digest. The folder appears when all of this is done.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from qtool.errors import CheckpointError, UsageError
from qtool.formats.digests import DIGESTS_PATH, digests_json
from qtool.formats.kv_scales import kv_cache_scheme, kv_scale_names, read_kv_scales
from qtool.formats.linears import StoredLinears, WritableFormat
from qtool.formats.losses import LinearPlan, describe, is_exact, losses, scale_loss
from qtool.formats.reader import CheckpointReader
from qtool.formats.registry import CONFIG_KEYS, quantization_block, stored_linears, writer_of
from qtool.formats.safetensors_file import TensorSource, tensor_digest
from qtool.formats.scheme import WeightScheme
from qtool.formats.writer import CheckpointWriter, check_free_space, check_target

# Packed tensors stay in memory until their shard is full.
SHARD_BYTES = 1024**3

# What lies in a checkpoint of ours beside the weights and holds in every format.
OUR_FOLDER = "qtool"

HEAD = "lm_head"

# Phase, what is done of it, how much there is, and what was done.
Listener = Callable[[str, int, int, str], None]


@dataclass(frozen=True, slots=True)
class Conversion:
    """A conversion that is done.

    Attributes:
        source_format, format: names of both.
        linears: quantized linears, all compared with the source's bit for bit.
        total_bytes: of the new tensors.
        notes: what a user should know, one sentence each.
    """

    source_format: str
    format: str
    linears: int
    total_bytes: int
    notes: tuple[str, ...]


def convert_checkpoint(
    source: Path,
    out: Path,
    format: str,
    *,
    overwrite: bool = False,
    progress: Listener = lambda *_: None,
) -> Conversion:
    """Write the quantized model in the folder ``source`` to the new folder ``out``.

    Args:
        source, out: model folders.
        format: one of :data:`~qtool.formats.registry.WRITERS`.
        overwrite: replace a model at ``out``.
        progress: told of every linear, in each pass.

    Raises:
        UsageError: no such format.
        CheckpointError: a folder cannot be used, the source is not quantized, or something would
            be lost; ``out`` is then as it was.
    """
    writer = writer_of(format)
    check_target(out, source, overwrite)
    with CheckpointReader(source) as reader:
        linears = stored_linears(reader)
        if linears is None or not linears.modules():
            raise UsageError(
                f"{source} is not quantized; qtool quantize --format {format} makes it so"
            )
        plan = _Conversion(reader, linears, writer)
        plan.survey(progress)
        check_free_space(out, sum(entry.num_bytes for entry in reader.entries.values()))
        with CheckpointWriter(out, overwrite=overwrite, max_shard_bytes=SHARD_BYTES) as target:
            plan.write(target, progress)
            plan.verify(target, progress)
            target.copy_side_files(source)
            _copy_our_folder(source, target)
            target.add_json(DIGESTS_PATH, digests_json(target.digests))
            target.finish()
        return Conversion(
            source_format=_format_name(reader),
            format=format,
            linears=len(plan.digests),
            total_bytes=target.total_bytes,
            notes=plan.notes(),
        )


def _format_name(reader: CheckpointReader) -> str:
    return str((quantization_block(reader.folder, reader.config) or {}).get("quant_method"))


class _Conversion:
    """One conversion: what is read, and what becomes of it.

    Attributes:
        digests: of each linear's weight in float32, by name.
    """

    def __init__(
        self, reader: CheckpointReader, linears: StoredLinears, writer: WritableFormat
    ) -> None:
        self._reader, self._linears, self._writer = reader, linears, writer
        self._modules = linears.modules()
        self._plans: dict[str, LinearPlan] = {}
        self._kv_scales = read_kv_scales(reader)
        self._centred, self._bounded = True, False
        # What scales are written in, where a format lets them choose: the model's dtype, if it
        # holds all of them.
        self._model_dtype = model_dtype(reader.config)
        self.digests: dict[str, str] = {}

    def survey(self, progress: Listener) -> None:
        """Read every weight; raise CheckpointError if something would be lost."""
        for index, module in enumerate(self._modules):
            tensor = self._linears.read(module, self._reader.get)
            self._plans[module] = LinearPlan(
                tensor.scheme,
                tensor.shape,
                scale_loss(self._writer, tensor.scales),
                tensor.order is not None,
            )
            self._centred &= bool((tensor.zeros == tensor.scheme.levels // 2).all())
            if self._model_dtype and not is_exact(tensor.scales, self._model_dtype):
                self._model_dtype = None
            self.digests[module] = tensor_digest(tensor.dequantize())
            self._reader.close()  # a memory map counts as memory as far as it was read
            progress("check", index + 1, len(self._modules), module)
        self._plans = {
            name: replace(plan, scheme=self._target(plan.scheme))
            for name, plan in self._plans.items()
        }
        self._refuse_losses()

    def _refuse_losses(self) -> None:
        found = losses(self._writer, self._plans)
        if self._kv_scales and not self._writer.HOLDS_KV_SCALES:
            reason = f"FP8 scales of the cache: {self._writer.NAME} has no place for them"
            found[reason] = list(self._kv_scales)
        if found:
            raise CheckpointError(
                f"{self._reader.folder} cannot be {self._writer.NAME} without loss: "
                f"{describe(found)}; choose another format, or quantize the original model"
            )

    def _target(self, scheme: WeightScheme) -> WeightScheme:
        """The scheme under which weights are written: what they are, whatever they were called."""
        inputs = scheme.activations
        if inputs is not None and inputs.bound is not None:
            self._bounded = True
            scheme = replace(scheme, activations=replace(inputs, bound=None))
        if scheme.type == "int" and self._centred:
            scheme = replace(scheme, symmetric=True)
        return scheme

    def write(self, target: CheckpointWriter, progress: Listener) -> None:
        """All tensors and the config, in the reader's order."""
        owner = {
            full: module
            for module in self._modules
            for full in self._linears.parts(module).values()
        }
        cache = set(kv_scale_names(self._reader.names()))
        done: set[str] = set()
        for name in self._reader.names():
            if name in owner and owner[name] not in done:
                done.add(owner[name])
                self._write_linear(target, owner[name])
                progress("write", len(done), len(self._modules), owner[name])
            elif name not in owner and name not in cache:
                entry = self._reader.entry(name)
                read = partial(self._reader.get, name)
                target.add_source(name, TensorSource(entry.dtype, entry.shape, read))
        for attention, scales in self._kv_scales.items():
            for local, tensor in scales.tensors().items():
                target.add(f"{attention}.{local}", tensor.clone())
        self._write_config(target)

    def _write_linear(self, target: CheckpointWriter, module: str) -> None:
        tensor = self._linears.read(module, self._reader.get)
        scales = tensor.scales if self._model_dtype is None else tensor.scales.to(self._model_dtype)
        tensor = replace(tensor, scheme=self._plans[module].scheme, scales=scales)
        for local, packed in self._writer.pack(tensor).items():
            # A clone: what was not packed anew is the mapped file.
            target.add(f"{module}.{local}", packed.clone())
        self._reader.close()

    def _write_config(self, target: CheckpointWriter) -> None:
        schemes = {name: plan.scheme for name, plan in self._plans.items()}
        config = {k: v for k, v in self._reader.config.items() if k not in CONFIG_KEYS}
        kept = plain_linears(self._reader, schemes)
        block = self._writer.quantization_config(schemes, kept)
        if self._kv_scales:
            block["kv_cache_scheme"] = kv_cache_scheme(self._kv_scales)
        target.finish_tensors(config | {"quantization_config": block})
        if self._writer.SIDE_FILE is not None:
            target.add_json(self._writer.SIDE_FILE, block)

    def verify(self, target: CheckpointWriter, progress: Listener) -> None:
        """Read the new folder; raise CheckpointError unless it holds the same model."""
        with CheckpointReader(target.folder) as reader:
            linears = stored_linears(reader)
            assert linears is not None
            if linears.modules() != self._modules:
                raise _damaged("the list of quantized linears")
            for name in reader.names():
                if tensor_digest(reader.get(name)) != target.digests[name]:
                    raise _damaged(name)
            for index, module in enumerate(self._modules):
                weight = linears.read(module, reader.get).dequantize()
                if tensor_digest(weight) != self.digests[module]:
                    raise _damaged(module)
                reader.close()
                progress("verify", index + 1, len(self._modules), module)

    def notes(self) -> tuple[str, ...]:
        """What was noticed on both sides."""
        weights = [(plan.scheme, plan.shape) for plan in self._plans.values()]
        return (*self._linears.notes(), *self._changes(), *self._writer.warnings(weights))

    def _changes(self) -> Iterator[str]:
        """What is not weights and will be otherwise."""
        if self._bounded:
            yield (
                "inputs beyond the source's activation_scale_ub are no longer cut off: no format "
                "written here has such a bound"
            )
        stored = model_dtype(self._reader.config)
        if self._writer.SCALE_DTYPE is None and self._model_dtype is None and stored is not None:
            name = str(stored).removeprefix("torch.")
            yield (
                f"scales keep their dtype, as {name} would round them: an engine that holds scales "
                f"in the model's dtype computes with slightly other weights; vLLM with --dtype "
                "float16 keeps float16 scales"
            )


def plain_linears(reader: CheckpointReader, quantized: Mapping[str, Any]) -> list[str]:
    """Modules with a matrix that is not quantized, embeddings among them; the head always."""
    matrices = (name for name, entry in reader.entries.items() if len(entry.shape) == 2)
    plain = {name.removesuffix(".weight") for name in matrices if name.endswith(".weight")}
    return sorted((plain | {HEAD}) - set(quantized))


def model_dtype(config: Mapping[str, Any]) -> torch.dtype | None:
    """The dtype a config names, if torch has it."""
    found = getattr(torch, str(config.get("dtype") or config.get("torch_dtype")), None)
    return found if isinstance(found, torch.dtype) else None


def _copy_our_folder(source: Path, target: CheckpointWriter) -> None:
    """All of it but the digests: the same weights have other bytes here."""
    if not (source / OUR_FOLDER).is_dir():
        return
    skip = shutil.ignore_patterns(Path(DIGESTS_PATH).name)
    try:
        shutil.copytree(source / OUR_FOLDER, target.folder / OUR_FOLDER, ignore=skip)
    except OSError as error:
        raise CheckpointError(f"{source / OUR_FOLDER} cannot be copied: {error}") from None


def _damaged(what: str) -> CheckpointError:
    return CheckpointError(
        f"{what} was read back other than it was written; nothing is published: check the disk and "
        "the memory of this machine, and report this if they are sound"
    )
