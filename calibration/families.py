"""What the offline half knows about a model family, as one row of a table each.

A row names things by their path inside a decoder block (``self_attn.q_proj``), so that nothing
else in the code base asks what class a module has. The rows hold for the Hugging Face names,
which are also the names on disk.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from qtool.errors import ModelError

Q, K, V, O = (f"self_attn.{letter}_proj" for letter in "qkvo")  # noqa: E741 (the paper's letters)
GATE, UP, DOWN = (f"mlp.{name}_proj" for name in ("gate", "up", "down"))


@dataclass(frozen=True, slots=True)
class SmoothingPair:
    """A source whose output channels may be divided, and the linears that undo it.

    Between the two nothing but a product with each channel may happen, so dividing the source
    and multiplying the targets' input columns leaves the function as it was.

    Attributes:
        source: a norm, or a linear whose rows (and bias) are divided.
        targets: linears that read the source's output.
        parent: the module whose output error judges a scale; it takes the targets' input.
        mixes_tokens: the parent needs whole sequences, as attention does.
        shares_heads: the source's channels are key-value heads, each read by a whole group of
            query heads; its scale is tied over that group.
    """

    source: str
    targets: tuple[str, ...]
    parent: str
    mixes_tokens: bool = False
    shares_heads: bool = False


@dataclass(frozen=True, slots=True)
class ModelFamily:
    """Where a family keeps what quantization touches.

    Attributes:
        model_type: the name in ``config.json``.
        blocks: path of the list of decoder blocks.
        linear_groups: the quantized linears in true-sequential order; those of one group read
            the same input.
        pairs: smoothing pairs, in the order they are searched.
        norm_offset: a norm multiplies by ``norm_offset + weight``.
    """

    model_type: str
    blocks: str
    linear_groups: tuple[tuple[str, ...], ...]
    pairs: tuple[SmoothingPair, ...]
    norm_offset: float = 0.0

    @property
    def linears(self) -> tuple[str, ...]:
        """All quantized linears of a block, in true-sequential order."""
        return tuple(name for group in self.linear_groups for name in group)

    def block_prefixes(self, config: Mapping[str, Any]) -> list[str]:
        """Path of every decoder block of a model with this ``config.json``."""
        return [f"{self.blocks}.{index}" for index in range(config["num_hidden_layers"])]


def _llama_shaped(model_type: str) -> ModelFamily:
    return ModelFamily(
        model_type=model_type,
        blocks="model.layers",
        linear_groups=((Q, K, V), (O,), (GATE, UP), (DOWN,)),
        pairs=(
            SmoothingPair("input_layernorm", (Q, K, V), parent="self_attn", mixes_tokens=True),
            SmoothingPair(V, (O,), parent=O, shares_heads=True),
            SmoothingPair("post_attention_layernorm", (GATE, UP), parent="mlp"),
            SmoothingPair(UP, (DOWN,), parent=DOWN),
        ),
    )


FAMILIES = {name: _llama_shaped(name) for name in ("llama", "mistral", "qwen2")}


def find_family(config: Mapping[str, Any]) -> ModelFamily:
    """The row of a model with this ``config.json``.

    Raises:
        ModelError: no row has its ``model_type``.
    """
    model_type = config.get("model_type")
    if model_type not in FAMILIES:
        raise ModelError(
            f"model_type={model_type!r}: no family of this name can be quantized; "
            f"supported are {', '.join(sorted(FAMILIES))}"
        )
    return FAMILIES[model_type]


def head_dim(config: Mapping[str, Any]) -> int:
    """Width of one attention head of a model with this ``config.json``."""
    explicit = config.get("head_dim")
    return int(explicit or config["hidden_size"] // config["num_attention_heads"])
