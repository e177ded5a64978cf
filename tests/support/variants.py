"""Model variants the decoder must get right, and what transformers says about them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

VARIANTS: dict[str, dict[str, Any]] = {
    "gqa": {},
    "mha": {"kv_heads": 4},
    "mqa": {"kv_heads": 1},
    "untied": {"tie": False},
    "biases": {"bias": True},
    "wide heads": {"head_dim": 32},
    "llama3 rope": {"rope_parameters": LLAMA3},
    "linear rope": {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
    "mistral": {"model_type": "mistral", "sliding_window": None},
    "mistral window": {"model_type": "mistral", "sliding_window": 24},
    "qwen2": {"model_type": "qwen2"},
}


def token_ids(count: int, seed: int = 0, vocab: int = 384) -> list[int]:
    """Seeded random tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocab, (count,), generator=generator).tolist()


def ref_logits(folder: Path, token_ids: list[int]) -> torch.Tensor:
    """Transformers' logits [T, vocab] in float32."""
    # Eager attention honours the window exactly as written.
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([token_ids])).logits[0]
    return logits


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over the norm of what is expected."""
    return float((actual - expected).norm() / expected.norm())
