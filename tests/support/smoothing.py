"""Models whose keys have channels of very different size, with factors for them and without."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from qtool.formats.checkpoint import CheckpointReader
from qtool.formats.kv_plan import KeyExponents
from qtool.runtime.config import DecoderConfig, parse_decoder_config
from qtool.runtime.kernels.backend import Backend
from qtool.runtime.key_smoothing import calibrated_exponents
from qtool.runtime.kv_cache import CacheForm
from qtool.runtime.kv_schemes import WIDE
from qtool.runtime.loaded_model import choose_form
from qtool.runtime.loader import DecoderBuilder, load_decoder
from qtool.runtime.model import Decoder
from qtool.runtime.options import ModelOptions
from qtool.runtime.weight_source import WeightSource
from support.families import FAMILY_VARIANTS
from support.variants import VARIANTS

LENGTH = 256

SMOOTHED_MODELS: dict[str, dict[str, Any]] = {
    "llama gqa": VARIANTS["gqa"],
    "llama mha, biases": {"kv_heads": 4, "bias": True},
    "qwen2": VARIANTS["qwen2"],
    **{
        name: FAMILY_VARIANTS[name]
        for name in (
            "qwen3",
            "qwen3 mha, untied, window",
            "gemma3",
            "gemma3 mha, soft caps",
            "phi3",
            "phi4 partial",
            "smollm3",
            "qwen3_moe",
        )
    },
}


def edit(folder: Path, ending: str, change: Callable[[Tensor], None]) -> Path:
    """Tensors whose names end so, changed in place."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    found = [tensor for name, tensor in tensors.items() if name.endswith(ending)]
    assert found
    for tensor in found:
        change(tensor)
    save_file(tensors, path, metadata={"format": "pt"})
    return folder


def spread_gains(folder: Path, offset: float = 0.0) -> Path:
    """Gains of k_norm from .01 to 30, and one of zero; ``offset`` is what the family adds."""

    def change(gains: Tensor) -> None:
        gains.copy_(torch.logspace(-2, 1.5, len(gains)).roll(3))
        gains[1] = 0.0
        gains -= offset

    return edit(folder, "k_norm.weight", change)


def large_bias(folder: Path, size: float = 60.0) -> Path:
    """Of every head's keys two channels, rotated together, of that size; as in Qwen2."""

    def change(bias: Tensor) -> None:
        heads = bias.view(2, -1)
        heads[:, heads.shape[1] // 2 - 1] = size
        heads[:, -1] = -size

    return edit(folder, "k_proj.bias", change)


def planned_exponents(config: DecoderConfig, seed: int = 0) -> tuple[KeyExponents, ...] | None:
    """Factors as calibration makes them; ``None`` for models whose gains hold them."""
    if config.family.qk_norm:
        return None
    shape = config.num_layers, config.num_kv_heads, config.head_dim
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return calibrated_exponents((3 * noise).exp().tolist(), config)


def decoders(
    folder: Path, backend: Callable[[], Backend], planned: Sequence[KeyExponents] | None = None
) -> tuple[Decoder, Decoder]:
    """The same model as it lies on disk, and with factors for its keys."""
    with CheckpointReader(folder) as reader:
        config = parse_decoder_config(reader.config)
        plain = DecoderBuilder(WeightSource(reader), config, backend()).build(LENGTH)
        planned = planned or planned_exponents(config)
        smoothed, stored = load_decoder(reader, backend(), LENGTH, planned)
    assert stored.smoothed.by_plan or stored.smoothed.by_norm
    assert not stored.notes
    form = CacheForm.uniform(WIDE, config.num_layers)
    return choose_form(plain, form)[0], choose_form(smoothed, form)[0]


def model_of(name: str, model_factory: Callable[..., Path]) -> Path:
    folder = model_factory(**SMOOTHED_MODELS[name])
    if name == "qwen2":
        return large_bias(folder)
    offsets = {"qwen3": 0.0, "gemma3": 1.0}
    family = next((family for family in offsets if name.startswith(family)), None)
    return folder if family is None else spread_gains(folder, offsets[family])


def load_options(**changes: object) -> ModelOptions:
    values = {"device": "cpu", "dtype": "fp32", "backend": "reference", **changes}
    return ModelOptions(**values)  # type: ignore[arg-type]
