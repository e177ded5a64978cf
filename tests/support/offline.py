"""One tiny model of each family that can be quantized, MHA and GQA, for the offline half."""

from __future__ import annotations

from typing import Any

from support.families import FAMILY_VARIANTS

# Widths that hold groups of 32 everywhere.
OFFLINE_VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {"bias": True},
    "llama mha": {"kv_heads": 4},
    "mistral": {"model_type": "mistral", "sliding_window": 24},
    "qwen2": {"model_type": "qwen2"},
    **{
        name: FAMILY_VARIANTS[name]
        for name in (
            "smollm3",
            "qwen3",
            "qwen3 mha, untied, window",
            "gemma2",
            "gemma3",
            "gemma3 mha, soft caps",
            "phi3",
            "phi3 mha, window",
            "mixtral",
            "mixtral window, mha",
            "qwen2_moe",
            "qwen3_moe",
        )
    },
}
OFFLINE_VARIANTS["qwen2_moe"] = OFFLINE_VARIANTS["qwen2_moe"] | {
    "shared_expert_intermediate_size": 64
}
