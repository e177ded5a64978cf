"""``qtool/kv_plan.json``: how each layer's keys and values are to be stored, for whoever loads it.

No exchange format holds this: ``kv_cache_scheme`` of compressed-tensors has room for FP8 scales
alone, and declares those (:mod:`~qtool.formats.kv_scales`). Either is the checkpoint's plan.

    {"version": 1, "name": "auto", "layers": ["int8", "int4", ...], "bits": 4.9,
     "bytes_per_token": 14112,
     "chosen_from": {"text": ..., "windows": 2, "seq_len": 512, "budget": .005, "kl": .0047, ...},
     "measured": {"text": ..., "windows": 4, "seq_len": 512, "kl": .0051, ...}}
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
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

    Raises:
        CheckpointError: no layers, or a scheme that there is not.
    """

    name: str
    layers: tuple[str, ...]
    bits: float | None = None
    bytes_per_token: int | None = None
    chosen_from: Mapping[str, Any] | None = None
    measured: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if not self.layers:
            raise CheckpointError("layers is empty; every layer of the model has a scheme")
        if unknown := [name for name in self.layers if name not in LAYER_SCHEMES]:
            raise CheckpointError(
                f"layers has {unknown[0]!r}; a layer has one of {', '.join(LAYER_SCHEMES)}"
            )

    @classmethod
    def uniform(cls, scheme: str, num_layers: int) -> KVPlan:
        """The same scheme in all layers."""
        return cls(scheme, (scheme,) * num_layers)

    @property
    def is_uniform(self) -> bool:
        """Whether all layers are alike."""
        return len(set(self.layers)) == 1

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

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        return {
            "version": VERSION,
            "name": self.name,
            "layers": list(self.layers),
            "bits": self.bits,
            "bytes_per_token": self.bytes_per_token,
            "chosen_from": None if self.chosen_from is None else dict(self.chosen_from),
            "measured": None if self.measured is None else dict(self.measured),
        }


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
    return KVPlan(name, tuple(layers), *figures, *notes)


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
