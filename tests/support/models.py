"""Tiny Hugging Face model folders, made in memory: seeded weights, a real tokenizer, no network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

SPECIAL_TOKENS = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# Several scripts, so that merges span bytes of one character and characters span tokens.
TRAINING_TEXT = (
    "The quick brown fox jumps over the lazy dog, and the dog did not mind the fox at all.",
    "A model reads the text, then the model writes the next word of the text.",
    "El zorro marrón salta sobre el perro perezoso; mañana será otro día.",
    "Größe und Maß: die schöne Straße führt über die Brücke.",
    "你好，世界。模型读取文本，然后写出下一个词。",
    "Привет, мир! Модель читает текст и пишет следующее слово.",
    "مرحبا بالعالم",
    "🙂🙃 👍🏽 👩‍👩‍👧 1234567890 def f(x): return x + 1\n",
)


def make_tokenizer(*, vocab_size: int = 384, add_bos: bool = False) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with ``<s>``, ``</s>`` (EOS), chat marks and a chat template.

    ``add_bos`` puts ``<s>`` before every encoded text, as Llama's tokenizers do.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TRAINING_TEXT, trainer)
    if add_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 0)]
        )
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        additional_special_tokens=["<|im_start|>", "<|im_end|>"],
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped


def _randomize(model: PreTrainedModel, seed: int) -> None:
    """Overwrite every parameter, so that no bias is zero and no norm is one: a bug in them shows.

    Matrices get a standard deviation of ``fan_in ** -0.5``; logits then have one near 1.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(model.named_parameters()):
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim > 1:
            value = noise * parameter.shape[-1] ** -0.5
        else:
            value = 0.1 * noise + (0.0 if name.endswith("bias") else 1.0)
        parameter.data.copy_(value)


def make_model(
    folder: Path,
    *,
    model_type: str = "llama",
    hidden_size: int = 64,
    intermediate_size: int = 128,
    heads: int = 4,
    kv_heads: int = 2,
    layers: int = 2,
    tie: bool = True,
    bias: bool = False,
    dtype: torch.dtype = torch.float32,
    vocab_size: int = 384,
    max_positions: int = 256,
    add_bos: bool = False,
    seed: int = 0,
    max_shard_size: str = "1GB",
    **config: Any,
) -> Path:
    """Write a seeded random model with its tokenizer to ``folder`` and return the folder.

    ``bias`` gives the Llama shape biases in attention and MLP; ``max_shard_size`` such as
    ``"100KB"`` makes a sharded checkpoint; ``config`` goes to the model's config as it is.
    """
    tokenizer = make_tokenizer(vocab_size=vocab_size, add_bos=add_bos)
    if bias:
        config |= {"attention_bias": True, "mlp_bias": True}
    tokens = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    settings = AutoConfig.for_model(
        model_type,
        **{
            "vocab_size": vocab_size,
            "hidden_size": hidden_size,
            "intermediate_size": intermediate_size,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "num_hidden_layers": layers,
            "tie_word_embeddings": tie,
            "max_position_embeddings": max_positions,
            **tokens,
            **config,
        },
    )
    model = AutoModelForCausalLM.from_config(settings, dtype=dtype)
    _randomize(model, seed)
    model.generation_config = GenerationConfig(**tokens)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    tokenizer.save_pretrained(folder)
    return folder
