"""Tiny models of every family, with what makes it differ from Llama within reach of 90 tokens."""

from __future__ import annotations

from typing import Any

WINDOW = 24
TYPES = ["sliding_attention", "full_attention"] * 2
PHI = {"model_type": "phi3", "pad_token_id": 0}
SMOL = {"model_type": "smollm3", "pad_token_id": 0, "layers": 4, "no_rope_layer_interval": 2}
QWEN_WINDOW = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}
GEMMA = {"layers": 4, "head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": WINDOW}
MOE = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "original_max_position_embeddings": 32,
    "short_factor": [1.0 + 0.1 * i for i in range(6)],
    "long_factor": [2.0 + 0.5 * i for i in range(6)],
    "partial_rotary_factor": 0.75,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
TWO_ROPES = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}

# Sizes that the blocks of FP8 divide, so that projections of one input stack.
IN_BLOCKS = {"hidden_size": 128, "intermediate_size": 128, "kv_heads": 4, "head_dim": 32}

FAMILY_VARIANTS: dict[str, dict[str, Any]] = {
    "smollm3": SMOL,
    "smollm3 window": SMOL | {"use_sliding_window": True, "sliding_window": WINDOW},
    "qwen2 window": {"model_type": "qwen2", **QWEN_WINDOW},
    "qwen3": {"model_type": "qwen3", "head_dim": 32},
    "qwen3 mha, untied, window": {
        "model_type": "qwen3",
        "head_dim": 16,
        "kv_heads": 4,
        "tie": False,
        **QWEN_WINDOW,
    },
    "gemma2": {
        "model_type": "gemma2",
        "attn_logit_softcapping": 1.5,
        "final_logit_softcapping": 2.0,
        **GEMMA,
    },
    "gemma3": {
        "model_type": "gemma3_text",
        "layer_types": TYPES,
        "rope_parameters": TWO_ROPES,
        **GEMMA,
    },
    "gemma3 mha, soft caps": {
        "model_type": "gemma3_text",
        "kv_heads": 4,
        "layer_types": TYPES,
        "final_logit_softcapping": 2.0,
        **GEMMA,
    },
    "phi3": PHI,
    "phi3 mha, window": PHI | {"kv_heads": 4, "sliding_window": WINDOW},
    "phi4 partial": PHI
    | {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e4,
            "partial_rotary_factor": 0.5,
        },
        "tie": False,
    },
    "phi3 longrope": PHI | {"rope_parameters": LONGROPE, "original_max_position_embeddings": 32},
    "yarn": {"rope_parameters": YARN},
    "yarn mscale": {
        "rope_parameters": YARN
        | {"mscale": 0.7, "mscale_all_dim": 0.4, "truncate": False, "beta_fast": 16}
    },
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "intermediate_size": 64},
    "mixtral window, mha": {
        "model_type": "mixtral",
        "num_local_experts": 3,
        "kv_heads": 4,
        "sliding_window": WINDOW,
    },
    "qwen2_moe": {
        "model_type": "qwen2_moe",
        "shared_expert_intermediate_size": 48,
        **MOE,
    },
    "qwen2_moe, some plain": {
        "model_type": "qwen2_moe",
        "layers": 4,
        "shared_expert_intermediate_size": 48,
        "decoder_sparse_step": 2,
        "mlp_only_layers": [3],
        "norm_topk_prob": True,
        **MOE,
    },
    "qwen3_moe": {"model_type": "qwen3_moe", "head_dim": 32, "norm_topk_prob": True, **MOE},
}
