"""What the offline half knows about a model family, as one row of a table each.

A row names things by their path inside a decoder block (``self_attn.q_proj``), so that nothing
else in the code base asks what class a module has. The rows hold for the Hugging Face names,
which are also the names on disk.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from qtool.errors import ModelError

Q, K, V, O = (f"self_attn.{letter}_proj" for letter in "qkvo")  # noqa: E741 (the paper's letters)
GATE, UP, DOWN = (f"mlp.{name}_proj" for name in ("gate", "up", "down"))
QKV, GATE_UP = "self_attn.qkv_proj", "mlp.gate_up_proj"


@dataclass(frozen=True, slots=True)
class SmoothingPair:
    """A source whose output channels may be divided, and the linears that undo it.

    Between the two nothing but a product with each channel may happen, so dividing the source
    and multiplying the targets' input columns leaves the function as it was.

    Attributes:
        source: a norm, or a linear whose rows (and bias) are divided: its last ones, as many as
            there are channels, where projections are fused.
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
class ResidualSum:
    """Where the output of a linear is added to the residual stream.

    Attributes:
        stream: submodule whose input is what the output is added to.
        norm: norm that the output passes first, or ``None``.
    """

    stream: str
    norm: str | None = None


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """Where a mixture of experts lies in a block, by the hub's names, which are those on disk.

    Attributes:
        module: the mixture.
        in_memory: the name that transformers has for it.
        projections: gate, up and down of an expert.
        shared: whether a shared expert stands beside the routed ones, with a gate of its own.
    """

    module: str
    in_memory: str
    projections: tuple[str, str, str]
    shared: bool = False

    def linears(self, expert: int) -> tuple[str, str, str]:
        """Paths of an expert's gate, up and down."""
        gate, up, down = (f"{self.module}.experts.{expert}.{name}" for name in self.projections)
        return gate, up, down


@dataclass(frozen=True, slots=True)
class ModelFamily:
    """Where a family keeps what quantization touches.

    Attributes:
        model_type: the name in ``config.json``.
        blocks: path of the list of decoder blocks.
        linear_groups: the quantized linears in true-sequential order; those of one group read
            the same input.
        pairs: smoothing pairs, in the order they are searched.
        sums: the linears that write the residual stream, and where.
        norm_offset: a norm multiplies by ``norm_offset + weight``.
        unclipped: linears whose largest weights stay as they are. Rotary embeddings and the
            softmax make the output of q and k sensitive to them (AWQ's code leaves them too).
        not_smoothed: places where others smooth and this family cannot, with the reason.
        routers: linears that choose experts, never quantized.
        experts: names of a mixture of experts.
        attention_output: the last linear of attention; its parent puts out what it does.
        embedding: the table beside the blocks that a tied head is.
        ties_head: whether the head is tied where the config says nothing.
        head: the name on disk of a head that is not tied.
    """

    model_type: str
    blocks: str
    linear_groups: tuple[tuple[str, ...], ...]
    pairs: tuple[SmoothingPair, ...]
    sums: Mapping[str, ResidualSum] = field(default_factory=dict)
    norm_offset: float = 0.0
    unclipped: tuple[str, ...] = (Q, K)
    not_smoothed: tuple[tuple[str, str], ...] = ()
    routers: tuple[str, ...] = ()
    experts: ExpertNames | None = None
    attention_output: str = O
    embedding: str = "embed_tokens"
    ties_head: bool = False
    head: str = "lm_head"

    @property
    def linears(self) -> tuple[str, ...]:
        """All quantized linears of a block, in true-sequential order."""
        return tuple(name for group in self.linear_groups for name in group)

    def unquantized_sides(self, pair: SmoothingPair, quantized: Container[str]) -> list[str]:
        """Linears of a pair that stay as they are; with any, there is nothing to smooth.

        Smoothing serves quantized targets, and changes no linear that stays as it was.
        """
        sides = [*pair.targets, *((pair.source,) if pair.source in self.linears else ())]
        return [name for name in sides if name not in quantized]

    def block_prefixes(self, config: Mapping[str, Any]) -> list[str]:
        """Path of every decoder block of a model with this ``config.json``."""
        return [f"{self.blocks}.{index}" for index in range(config["num_hidden_layers"])]

    def router_names(self, config: Mapping[str, Any]) -> list[str]:
        """Full names of all routers of a model with this ``config.json``."""
        prefixes = self.block_prefixes(config)
        return [f"{prefix}.{router}" for prefix in prefixes for router in self.routers]


_INTO_ATTENTION = SmoothingPair("input_layernorm", (Q, K, V), parent="self_attn", mixes_tokens=True)
_OUT_OF_ATTENTION = SmoothingPair(V, (O,), parent=O, shares_heads=True)
_OUT_OF_MLP = SmoothingPair(UP, (DOWN,), parent=DOWN)
_SUMS = {O: ResidualSum("input_layernorm"), DOWN: ResidualSum("post_attention_layernorm")}
_SANDWICH_SUMS = {
    O: ResidualSum("input_layernorm", norm="post_attention_layernorm"),
    DOWN: ResidualSum("pre_feedforward_layernorm", norm="post_feedforward_layernorm"),
}


def _llama_shaped(
    model_type: str,
    mlp_norm: str = "post_attention_layernorm",
    norm_offset: float = 0.0,
    sums: Mapping[str, ResidualSum] = _SUMS,
    ties_head: bool = False,
) -> ModelFamily:
    """``mlp_norm`` is the norm whose output the MLP reads directly."""
    return ModelFamily(
        model_type=model_type,
        blocks="model.layers",
        linear_groups=((Q, K, V), (O,), (GATE, UP), (DOWN,)),
        pairs=(
            _INTO_ATTENTION,
            _OUT_OF_ATTENTION,
            SmoothingPair(mlp_norm, (GATE, UP), parent="mlp"),
            _OUT_OF_MLP,
        ),
        sums=sums,
        norm_offset=norm_offset,
        ties_head=ties_head,
    )


def _gemma_shaped(model_type: str) -> ModelFamily:
    """The norms behind attention and MLP feed a sum, no linear: nothing to smooth through them."""
    return _llama_shaped(
        model_type,
        mlp_norm="pre_feedforward_layernorm",
        norm_offset=1.0,
        sums=_SANDWICH_SUMS,
        ties_head=True,
    )


def _fused(model_type: str) -> ModelFamily:
    """The rows of v are the last of ``qkv_proj``, those of up the last of ``gate_up_proj``."""
    return ModelFamily(
        model_type=model_type,
        blocks="model.layers",
        linear_groups=((QKV,), (O,), (GATE_UP,), (DOWN,)),
        pairs=(
            SmoothingPair("input_layernorm", (QKV,), parent="self_attn", mixes_tokens=True),
            SmoothingPair(QKV, (O,), parent=O, shares_heads=True),
            SmoothingPair("post_attention_layernorm", (GATE_UP,), parent="mlp"),
            SmoothingPair(GATE_UP, (DOWN,), parent=DOWN),
        ),
        sums=_SUMS,
        unclipped=(QKV,),
    )


def _mixture(model_type: str, experts: ExpertNames) -> ModelFamily:
    """The attention's part; :func:`find_family` adds the experts that a config counts."""
    routers = [f"{experts.module}.gate"]
    routers += [f"{experts.module}.shared_expert_gate"] if experts.shared else []
    reason = "the norm also feeds the router, which is not quantized and must choose as before"
    return ModelFamily(
        model_type=model_type,
        blocks="model.layers",
        linear_groups=((Q, K, V), (O,)),
        pairs=(_INTO_ATTENTION, _OUT_OF_ATTENTION),
        sums={O: _SUMS[O]},
        not_smoothed=((f"post_attention_layernorm -> {experts.module}.experts", reason),),
        routers=tuple(routers),
        experts=experts,
    )


_QWEN_EXPERT = ("gate_proj", "up_proj", "down_proj")
_ROWS = (
    *map(_llama_shaped, ("llama", "mistral", "qwen2", "qwen3")),
    _llama_shaped("smollm3", ties_head=True),
    *map(_gemma_shaped, ("gemma2", "gemma3_text")),
    _fused("phi3"),
    _mixture("mixtral", ExpertNames("block_sparse_moe", "mlp", ("w1", "w3", "w2"))),
    _mixture("qwen2_moe", ExpertNames("mlp", "mlp", _QWEN_EXPERT, shared=True)),
    _mixture("qwen3_moe", ExpertNames("mlp", "mlp", _QWEN_EXPERT)),
)
FAMILIES = {row.model_type: row for row in _ROWS}


def find_family(config: Mapping[str, Any]) -> ModelFamily:
    """The row of a model with this ``config.json``.

    Raises:
        ModelError: no row has its ``model_type``, or its blocks are not all of one kind.
    """
    model_type = config.get("model_type")
    if model_type not in FAMILIES:
        raise ModelError(
            f"model_type={model_type!r}: no family of this name can be quantized; "
            f"supported are {', '.join(sorted(FAMILIES))}"
        )
    family = FAMILIES[model_type]
    return family if family.experts is None else _with_experts(family, family.experts, config)


def _with_experts(
    family: ModelFamily, names: ExpertNames, config: Mapping[str, Any]
) -> ModelFamily:
    """Every expert reads the same input, so the first projections of all are one group."""
    for key in ("decoder_sparse_step", "mlp_only_layers"):
        if config.get(key) not in (None, 1, []):
            raise ModelError(
                f"{key}={config[key]}: blocks without experts among others cannot be quantized yet"
            )
    count = config.get("num_local_experts") or config["num_experts"]
    experts = [names.linears(number) for number in range(count)]
    groups = [tuple(name for gate, up, _ in experts for name in (gate, up))]
    if names.shared:
        shared = tuple(f"{names.module}.shared_expert.{name}" for name in names.projections)
        experts.append((shared[0], shared[1], shared[2]))
        groups.append(shared[:2])
    pairs = [SmoothingPair(up, (down,), parent=down) for _, up, down in experts]
    return replace(
        family,
        linear_groups=(*family.linear_groups, *groups, *((down,) for _, _, down in experts)),
        pairs=(*family.pairs, *pairs),
    )


def head_dim(config: Mapping[str, Any]) -> int:
    """Width of one attention head of a model with this ``config.json``."""
    explicit = config.get("head_dim")
    return int(explicit or config["hidden_size"] // config["num_attention_heads"])


def value_channels(config: Mapping[str, Any]) -> int:
    """Channels of all value heads together."""
    heads = config.get("num_key_value_heads") or config["num_attention_heads"]
    return int(heads) * head_dim(config)
