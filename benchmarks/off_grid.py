"""A copy of a Llama-shaped model that computes the same on other weights.

Models that come out of 4-bit GGUF files lie on that file's grid, where 4-bit quantization has an
easy life. This scales random channels up and down and undoes it in the weights that read them, so
that the function stays and the grid is gone; what is claimed of a method must hold on the copy.

    python benchmarks/off_grid.py MODEL_FOLDER OUT [--spread 0.3] [--seed 0]
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor


def move(tensors: dict[str, Tensor], config: dict[str, int], spread: float, seed: int) -> None:
    """Scale channels by ``exp(spread * normal)`` and undo it, in float32, in place."""
    generator = torch.Generator().manual_seed(seed)
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads

    def factors(size: int) -> Tensor:
        return torch.exp(spread * torch.randn(size, generator=generator))

    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        readers = {
            f"{prefix}.input_layernorm": [f"{attention}.{letter}_proj" for letter in "qkv"],
            f"{prefix}.post_attention_layernorm": [f"{mlp}.gate_proj", f"{mlp}.up_proj"],
        }
        for norm, linears in readers.items():
            scales = factors(config["hidden_size"])
            tensors[f"{norm}.weight"] /= scales
            for linear in linears:
                tensors[f"{linear}.weight"] *= scales
        scales = factors(kv_heads * head_dim)
        tensors[f"{attention}.v_proj.weight"] /= scales.unsqueeze(1)
        shared = scales.view(kv_heads, head_dim).repeat_interleave(heads // kv_heads, 0).flatten()
        tensors[f"{attention}.o_proj.weight"] *= shared
        scales = factors(config["intermediate_size"])
        tensors[f"{mlp}.up_proj.weight"] /= scales.unsqueeze(1)
        tensors[f"{mlp}.down_proj.weight"] *= scales


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--spread", type=float, default=0.3)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    config = json.loads((arguments.source / "config.json").read_text(encoding="utf-8"))
    stored = load_file(arguments.source / "model.safetensors")
    tensors = {name: tensor.float() for name, tensor in stored.items()}
    move(tensors, config, arguments.spread, arguments.seed)
    shutil.copytree(arguments.source, arguments.out)
    result = {name: tensor.to(stored[name].dtype) for name, tensor in tensors.items()}
    save_file(result, arguments.out / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    main()
