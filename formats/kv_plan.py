"""``qtool/kv_plan.json``: how each layer's keys and values are to be stored, for whoever loads it.

No exchange format holds this: ``kv_cache_scheme`` of compressed-tensors has room for FP8 scales
alone, and declares those (:mod:`~qtool.formats.kv_scales`). Either is the checkpoint's plan.

    {"version": 1, "name": "auto", "layers": ["int8", "int4", ...], "bits": 4.9,
     "bytes_per_token": 14112, "key_exponents": [["00210021", ...], null, ...],
     "chosen_from": {"text": ..., "windows": 2, "seq_len": 512, "budget": .005, "kl": .0047, ...},
     "measured": {"text": ..., "windows": 4, "seq_len": 512, "kl": .0051, ...}}

``key_exponents`` has a string for each KV head of a layer, and in it a digit for each channel.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from qtool.errors import CheckpointError
from qtool.formats.kv_scales import promises_kv_scales
from qtool.formats.reader import read_json
from qtool.formats.registry import quantization_block

KV_PLAN_PATH = "qtool/kv_plan.json"

# Grows with the layout of the file.
VERSION = 1

# Keys and values in the compute dtype.
WIDE = "wide"
FP8 = "fp8"
# What a layer may have. Repeated here, as formats know no runtime; a test holds it against
# runtime.kv_schemes.
LAYER_SCHEMES = (WIDE, FP8, "int8", "k8v4", "int4")

# Those in which the channels of a token's key share a scale: a plan has key exponents for these.
KEYS_BY_TOKEN = ("int8", "k8v4")

# Of one layer, [num_kv_heads][head_dim]: channel d of keys is divided by ``2**exponent``, and that
# of queries multiplied by it, before they are stored and compared.
KeyExponents = tuple[tuple[int, ...], ...]
MAX_EXPONENT = 8

# What ``quantize --kv-cache`` takes; auto searches a scheme for each layer.
AUTO = "auto"
CHOICES = (FP8, "int8", "int4", "k8v4", AUTO)

# The name of a plan that kv_cache_scheme makes.
DECLARED = "kv_cache_scheme"

_REMEDY = (
    "write it again with qtool quantize --kv-cache, or delete the file to store keys and values in "
    "the compute dtype"
)


@dataclass(frozen=True, slots=True)
class KVPlan:
    """What a checkpoint says of its cache.

    Attributes:
        name: what was asked for: a scheme, or ``auto``; :data:`DECLARED` where no file says so.
        layers: a row of :data:`LAYER_SCHEMES` for each layer.
        bits: of an element of keys and values, scales included, where the compute dtype has 16;
            ``None`` where nobody has reckoned it.
        bytes_per_token: likewise, all layers.
        chosen_from: what a search looked at: text, windows, budget, its losses; or ``None``.
        measured: what the plan costs on held-out text, or ``None``.
        key_exponents: of each layer, or ``None`` for a layer whose keys stay as they are; ``None``
            where all do.

    Raises:
        CheckpointError: no layers, a scheme that there is not, or exponents for other layers than
            there are, of differing lengths, or out of range.
    """

    name: str
    layers: tuple[str, ...]
    bits: float | None = None
    bytes_per_token: int | None = None
    chosen_from: Mapping[str, Any] | None = None
    measured: Mapping[str, Any] | None = None
    key_exponents: tuple[KeyExponents | None, ...] | None = None

    def __post_init__(self) -> None:
        if not self.layers:
            raise CheckpointError("layers is empty; every layer of the model has a scheme")
        if unknown := [name for name in self.layers if name not in LAYER_SCHEMES]:
            raise CheckpointError(
                f"layers has {unknown[0]!r}; a layer has one of {', '.join(LAYER_SCHEMES)}"
            )
        if self.key_exponents is None:
            return
        if len(self.key_exponents) != len(self.layers):
            raise CheckpointError(
                f"key_exponents has {len(self.key_exponents)} entries for {len(self.layers)} "
                "layers; each has one, or null"
            )
        for layer, heads in enumerate(self.key_exponents):
            if heads is not None:
                _check_exponents(layer, heads)

    @classmethod
    def uniform(cls, scheme: str, num_layers: int) -> KVPlan:
        """The same scheme in all layers."""
        return cls(scheme, (scheme,) * num_layers)

    @property
    def is_uniform(self) -> bool:
        """Whether all layers are alike."""
        return len(set(self.layers)) == 1

    @property
    def num_smoothed(self) -> int:
        """Layers with an exponent above 0."""
        return sum(any(map(any, heads or ())) for heads in self.key_exponents or ())

    @property
    def source(self) -> str:
        """Where it lies, for people."""
        return DECLARED if self.name == DECLARED else KV_PLAN_PATH

    def describe(self) -> str:
        """For people: ``int4``, or ``auto: 18 int4, 12 int8``."""
        if self.is_uniform:
            return self.layers[0]
        parts = (f"{count} {name}" for name, count in Counter(self.layers).most_common())
        return f"{self.name}: {', '.join(parts)}"

    def check_layers(self, count: int) -> None:
        """Raise CheckpointError unless the plan is for a model of so many layers."""
        if len(self.layers) != count:
            raise CheckpointError(
                f"{KV_PLAN_PATH} is for {len(self.layers)} layers, and the model has {count}; "
                f"{_REMEDY}"
            )

    def check_heads(self, num_kv_heads: int, head_dim: int) -> None:
        """Raise CheckpointError unless its exponents are for keys of that shape."""
        for layer, heads in enumerate(self.key_exponents or ()):
            found = None if heads is None else (len(heads), len(heads[0]))
            if found not in (None, (num_kv_heads, head_dim)):
                raise CheckpointError(
                    f"{KV_PLAN_PATH}: key_exponents of layer {layer} are {found} by KV heads and "
                    f"channels, and the model has {(num_kv_heads, head_dim)}; {_REMEDY}"
                )

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        return {
            "version": VERSION,
            "name": self.name,
            "layers": list(self.layers),
            "bits": self.bits,
            "bytes_per_token": self.bytes_per_token,
            "key_exponents": _digits(self.key_exponents),
            "chosen_from": None if self.chosen_from is None else dict(self.chosen_from),
            "measured": None if self.measured is None else dict(self.measured),
        }


def _check_exponents(layer: int, heads: KeyExponents) -> None:
    lengths = {len(head) for head in heads}
    if len(lengths) != 1 or lengths == {0}:
        raise CheckpointError(
            f"key_exponents of layer {layer} has heads of {sorted(lengths)} channels; all have as "
            "many"
        )
    if beyond := [e for head in heads for e in head if not 0 <= e <= MAX_EXPONENT]:
        raise CheckpointError(
            f"key_exponents of layer {layer} has {beyond[0]}; an exponent is 0 to {MAX_EXPONENT}"
        )


def _digits(exponents: tuple[KeyExponents | None, ...] | None) -> list[list[str] | None] | None:
    """A string a head: as lists of numbers, files would have a line a channel."""
    if exponents is None:
        return None
    return [
        None if heads is None else ["".join(map(str, head)) for head in heads]
        for heads in exponents
    ]


def _numbers(value: object) -> tuple[KeyExponents | None, ...] | None:
    """Inverse of :func:`_digits`."""
    if value is None:
        return None
    if not isinstance(value, list):
        raise CheckpointError(f"key_exponents is {value!r}; it is a list, a layer an entry")
    return tuple(_layer_numbers(layer, heads) for layer, heads in enumerate(value))


def _layer_numbers(layer: int, heads: object) -> KeyExponents | None:
    if heads is None:
        return None
    if isinstance(heads, list) and all(_is_digits(head) for head in heads):
        return tuple(tuple(map(int, head)) for head in heads)
    raise CheckpointError(
        f"key_exponents of layer {layer} is {str(heads)[:40]}; it is a list of strings, a KV head "
        "each, with a digit for each channel"
    )


def _is_digits(head: object) -> bool:
    return isinstance(head, str) and re.fullmatch("[0-9]+", head) is not None


def read_kv_plan(folder: Path) -> KVPlan | None:
    """The plan in a checkpoint's own file, or ``None`` if it has none.

    Raises:
        CheckpointError: it has one that cannot be read.
    """
    path = folder / KV_PLAN_PATH
    if not path.is_file():
        return None
    values = read_json(path)
    try:
        return _parse(values)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}; {_REMEDY}") from None


def _parse(values: Mapping[str, Any]) -> KVPlan:
    if values.get("version") != VERSION:
        raise CheckpointError(
            f"version is {values.get('version')!r}; this version of qtool reads {VERSION}"
        )
    name, layers = values.get("name"), values.get("layers")
    if not isinstance(name, str):
        raise CheckpointError(f"name is {name!r}; it is what was asked for")
    if not isinstance(layers, list):
        raise CheckpointError(f"layers is {layers!r}; it is a list of schemes, one a layer")
    figures = [values.get(key) for key in ("bits", "bytes_per_token")]
    for figure in figures:
        if not (figure is None or (isinstance(figure, int | float) and figure > 0)):
            raise CheckpointError(
                f"bits or bytes_per_token is {figure!r}; each is a positive number or null"
            )
    notes = [values.get(key) for key in ("chosen_from", "measured")]
    for note in notes:
        if not (note is None or isinstance(note, dict)):
            raise CheckpointError(f"chosen_from or measured is {note!r}; each is an object or null")
    plan = KVPlan(name, tuple(layers), *figures, *notes)
    return replace(plan, key_exponents=_numbers(values.get("key_exponents")))


def declared_plan(folder: Path, config: Mapping[str, Any], num_layers: int) -> KVPlan | None:
    """A checkpoint's plan: that of its file, else FP8 where its config promises scales.

    Raises:
        CheckpointError: the file cannot be read, or is for another number of layers.
    """
    if (plan := read_kv_plan(folder)) is not None:
        plan.check_layers(num_layers)
        return plan
    if promises_kv_scales(quantization_block(folder, config) or {}):
        return KVPlan(DECLARED, (FP8,) * num_layers)
    return None
