"""A Hugging Face Llama folder -> the GGUF file that llama.cpp and OpenVINO read.

Linear weights become Q4_0 (4.5 bits a weight, symmetric, groups of 32), the embedding, which is
the head too, Q8_0; norms stay in float32. The ``gguf`` package quantizes as ``llama-quantize``
does, bit for bit, so nothing of llama.cpp has to be built for it. Tokenizer and other metadata
come from a template file of the same family.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.torch import load_file

LINEAR, HEAD, PLAIN = (
    gguf.GGMLQuantizationType.Q4_0,
    gguf.GGMLQuantizationType.Q8_0,
    gguf.GGMLQuantizationType.F32,
)
EMBEDDING = "token_embd.weight"
# The writer makes these itself.
OWN_KEYS = ("GGUF.", "general.architecture", "general.file_type")


def write_gguf(folder: Path, template: Path, out: Path) -> None:
    """Convert the Llama model in ``folder`` (tied embedding) to ``out``."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    writer = gguf.GGUFWriter(out, "llama")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_0)
    _copy_metadata(gguf.GGUFReader(template), writer, _sizes(config))
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    for file in sorted(folder.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            theirs = names.get_name(name, try_suffixes=(".weight",))
            assert theirs is not None, f"{name} has no place in a GGUF file"
            kind = tensor_kind(theirs, tensor.ndim)
            values = _reorder(theirs, tensor.float().numpy(), config)
            writer.add_tensor(theirs, gguf.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def tensor_kind(name: str, dimensions: int) -> gguf.GGMLQuantizationType:
    """How the tensor ``name`` of a GGUF file is stored."""
    if dimensions == 1:
        return PLAIN
    return HEAD if name == EMBEDDING else LINEAR


def rotary_order(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of Q or K [heads * head_dim, in] in llama.cpp's order.

    Its rotation pairs neighbours; Hugging Face pairs the halves of a head.
    """
    rows, columns = weight.shape
    halves = weight.reshape(heads, 2, rows // heads // 2, columns)
    return halves.swapaxes(1, 2).reshape(rows, columns)


def _reorder(name: str, values: np.ndarray, config: dict[str, Any]) -> np.ndarray:
    if name.endswith("attn_q.weight"):
        return rotary_order(values, config["num_attention_heads"])
    if name.endswith("attn_k.weight"):
        return rotary_order(values, config["num_key_value_heads"])
    return values


def _sizes(config: dict[str, Any]) -> dict[str, int | float]:
    heads = config["num_attention_heads"]
    return {
        "llama.block_count": config["num_hidden_layers"],
        "llama.context_length": config["max_position_embeddings"],
        "llama.embedding_length": config["hidden_size"],
        "llama.feed_forward_length": config["intermediate_size"],
        "llama.attention.head_count": heads,
        "llama.attention.head_count_kv": config["num_key_value_heads"],
        "llama.rope.dimension_count": config["hidden_size"] // heads,
        "llama.rope.freq_base": config["rope_parameters"]["rope_theta"],
        "llama.vocab_size": config["vocab_size"],
    }


def _copy_metadata(
    template: gguf.GGUFReader, writer: gguf.GGUFWriter, sizes: dict[str, int | float]
) -> None:
    for key, field in template.fields.items():
        if key.startswith(OWN_KEYS):
            continue
        kind = field.types[0]
        of = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(key, sizes.get(key, field.contents()), kind, sub_type=of)
