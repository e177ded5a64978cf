"""The "fp8" format of DeepSeek and transformers: FP8 codes and ``weight_scale_inv``.

Per quantized linear of N out and K in features:

    weight             float8_e4m3fn  [N, K]
    weight_scale_inv   float32        [ceil(N / 128), ceil(K / 128)]; one value without blocks
    activation_scale   float32        one value, for static inputs; input_scale in vLLM's files

Despite its name the scale is what codes are multiplied by. vLLM's files without blocks call it
``weight_scale``. Blocks take their inputs in groups of 128, measured as they come. Blocks alone are
written: for everything else other engines have compressed-tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from qtool.errors import CheckpointError
from qtool.formats.linears import Shape, StoredLinears, plain_codes
from qtool.formats.reader import TensorEntry
from qtool.formats.scheme import BLOCK_SIZE, ActivationScheme, WeightScheme, fp8_scheme
from qtool.formats.tensor import QuantizedTensor

NAME = QUANT_METHOD = "fp8"
ONE_SCHEME = True
SCALE_DTYPE: torch.dtype | None = torch.float32
HOLDS_KV_SCALES = False
SIDE_FILE: str | None = None


class Fp8Linears(StoredLinears):
    """A linear with FP8 codes or their scale is quantized."""

    names = ("weight", "weight_scale_inv", "weight_scale", "activation_scale", "input_scale")
    marks = ("weight_scale_inv", "weight_scale")

    def __init__(self, block: Mapping[str, Any], entries: Mapping[str, TensorEntry]) -> None:
        super().__init__(entries)
        self._scheme = parse_scheme(block)

    def is_quantized(self, module: str) -> bool:
        return super().is_quantized(module) or is_float8(f"{module}.weight", self._entries)

    def unpack(self, module: str, tensors: Mapping[str, Tensor]) -> QuantizedTensor:
        for ours, theirs in (
            ("weight_scale_inv", "weight_scale"),
            ("activation_scale", "input_scale"),
        ):
            if ours in tensors and theirs in tensors:
                raise CheckpointError(f"{ours} and {theirs}: one of them is enough; drop the other")
        scale = "weight_scale" if "weight_scale" in tensors else "weight_scale_inv"
        inputs = "activation_scale" if "activation_scale" in tensors else "input_scale"
        return plain_codes(tensors, self._scheme, scale=scale, input_scale=inputs)


def is_float8(name: str, entries: Mapping[str, TensorEntry]) -> bool:
    """Whether a checkpoint has a tensor of FP8 codes under ``name``."""
    return name in entries and entries[name].dtype == torch.float8_e4m3fn


def parse_scheme(block: Mapping[str, Any]) -> WeightScheme:
    """The scheme of all quantized linears.

    Raises:
        CheckpointError: blocks, codes or inputs of another kind, by name.
    """
    blocks, way = block.get("weight_block_size"), block.get("activation_scheme", "dynamic")
    if block.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
        raise CheckpointError(f"fp8 with fmt {block['fmt']!r}: this version reads e4m3")
    if way not in ("dynamic", "static"):
        raise CheckpointError(f"fp8 with activation_scheme {way!r}: it is dynamic or static")
    if blocks is None:
        return WeightScheme(
            8,
            True,
            "tensor",
            None,
            "float",
            ActivationScheme("float", "token" if way == "dynamic" else "tensor"),
        )
    if list(blocks) != [BLOCK_SIZE, BLOCK_SIZE] or way != "dynamic":
        raise CheckpointError(
            f"fp8 in blocks of {blocks} with {way} inputs: this version reads [128, 128] with "
            "dynamic inputs"
        )
    return fp8_scheme("block")


def open_linears(block: Mapping[str, Any], entries: Mapping[str, TensorEntry]) -> StoredLinears:
    """The quantized linears of a checkpoint; see :class:`~qtool.formats.linears.ReadableFormat`."""
    return Fp8Linears(block, entries)


def obstacle(scheme: WeightScheme, shape: Shape) -> str | None:
    """Why the format, as we write it, holds no weight of a scheme; ``None`` if it does."""
    if scheme != fp8_scheme("block"):
        return f"{scheme.describe()}: fp8 holds FP8 in blocks, with inputs in groups of 128"
    return None


def warnings(weights: Iterable[tuple[WeightScheme, Shape]]) -> tuple[str, ...]:
    """Who does not load matrices of these shapes: seen in transformers 5.24.0."""
    ragged = {
        shape for _, shape in weights if any(s > BLOCK_SIZE and s % BLOCK_SIZE for s in shape)
    }
    if not ragged:
        return ()
    listed = ", ".join(f"{rows} x {columns}" for rows, columns in sorted(ragged))
    return (
        f"matrices of {listed} are no whole number of {BLOCK_SIZE} x {BLOCK_SIZE} blocks: "
        "transformers without a GPU refuses them or, where the blocks divide a side evenly, reads "
        "them wrong, and engines may not split them over devices; FP8 by channel in "
        "compressed-tensors has no such limit",
    )


def pack(tensor: QuantizedTensor) -> dict[str, Tensor]:
    """Tensors of one linear under their local names; the input is not changed."""
    return {"weight": tensor.codes, "weight_scale_inv": tensor.scales.to(SCALE_DTYPE)}


def quantization_config(schemes: Mapping[str, WeightScheme], ignore: list[str]) -> dict[str, Any]:
    """The ``quantization_config`` block of config.json."""
    return {
        "quant_method": QUANT_METHOD,
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "weight_block_size": [BLOCK_SIZE, BLOCK_SIZE],
        "modules_to_not_convert": sorted(ignore),
    }
