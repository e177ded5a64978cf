"""A checkpoint's weights into a decoder, part by part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from qtool.errors import CheckpointError
from qtool.formats.checkpoint import CheckpointReader
from qtool.formats.kv_plan import KeyExponents
from qtool.formats.tensor import QuantizedTensor, can_stack, concatenate_rows
from qtool.runtime.config import Activation, DecoderConfig, MoeConfig, parse_decoder_config
from qtool.runtime.kernels.backend import (
    AttentionScope,
    Backend,
    LinearOp,
    ReorderedInput,
    SideBySide,
)
from qtool.runtime.key_smoothing import KeySmoother, expected_peaks
from qtool.runtime.kv_cache import CacheForm
from qtool.runtime.kv_schemes import WIDE
from qtool.runtime.layers import Attention, DecoderLayer, FeedForward, Mlp
from qtool.runtime.model import Decoder
from qtool.runtime.moe import MixtureOfExperts, SharedExpert
from qtool.runtime.rotary import Rotary
from qtool.runtime.warm_up import warm_up
from qtool.runtime.weight_source import StoredModel, WeightSource

Weight = TypeVar("Weight", Tensor, Tensor | QuantizedTensor)


class DecoderBuilder:
    """Builds a :class:`Decoder` layer by layer; one layer's plain weights in memory at a time."""

    def __init__(
        self,
        source: WeightSource,
        config: DecoderConfig,
        backend: Backend,
        smoother: KeySmoother | None = None,
    ) -> None:
        self._source, self._config, self._backend = source, config, backend
        self._smoother = smoother
        self._linears: dict[str, LinearOp] = {}

    def build(self, length: int) -> Decoder:
        """Read everything. ``length`` is of the longest sequence that will run."""
        config, backend = self._config, self._backend
        embedding = self._embedding("model.embed_tokens.weight")
        layers = tuple(self._layer(index) for index in range(config.num_layers))
        norm = self._norm("model.norm")
        head = self._head(embedding)
        self._source.refuse_leftovers(config.tied_head)
        rotary = tuple(
            Rotary(rope, config.head_dim, length, backend.dtype, backend.device)
            for rope in config.ropes
        )
        linears, form = self._linears, CacheForm.uniform(WIDE, config.num_layers)
        return Decoder(config, backend, embedding, layers, norm, head, rotary, linears, form)

    def _head(self, embedding: Tensor) -> LinearOp:
        weight: Tensor | QuantizedTensor = embedding
        if not self._config.tied_head:
            shape = self._config.vocab_size, self._config.hidden_size
            weight = _checked("lm_head", self._source.weight("lm_head"), shape)
        self._linears["lm_head"] = self._in_order(weight, self._backend.head)
        return self._linears["lm_head"]

    def _layer(self, index: int) -> DecoderLayer:
        prefix = f"model.layers.{index}"
        attention = self._attention(index, f"{prefix}.self_attn")
        mlp = self._feed_forward(index, prefix)
        if not self._config.family.sandwich:
            return DecoderLayer(
                attention_norm=self._norm(f"{prefix}.input_layernorm"),
                attention=attention,
                mlp_norm=self._norm(f"{prefix}.post_attention_layernorm"),
                mlp=mlp,
            )
        return DecoderLayer(
            attention_norm=self._norm(f"{prefix}.input_layernorm"),
            attention=attention,
            attention_out_norm=self._norm(f"{prefix}.post_attention_layernorm"),
            mlp_norm=self._norm(f"{prefix}.pre_feedforward_layernorm"),
            mlp=mlp,
            mlp_out_norm=self._norm(f"{prefix}.post_feedforward_layernorm"),
        )

    def _attention(self, index: int, prefix: str) -> Attention:
        config = self._config
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        names, sizes = [f"{prefix}.{name}_proj" for name in "qkv"], [q_size, kv_size, kv_size]
        if config.family.fused:
            names, sizes = [f"{prefix}.qkv_proj"], [sum(sizes)]
        weights, biases = self._read(names, sizes, config.hidden_size, config.qkv_bias)
        q_norm, k_norm = self._head_norms(index, prefix, weights, biases)
        if self._smoother is not None and k_norm is None:
            weights, biases = self._smoother.projections(index, prefix, weights, biases)
        output = [f"{prefix}.o_proj"]
        return Attention(
            qkv=self._fused(names, weights, biases),
            output=self._linear(output, [config.hidden_size], q_size, config.o_bias),
            scope=AttentionScope(
                config.attention_scale, config.windows[index], config.attention_softcap
            ),
            rope=config.rope_of[index],
            q_norm=q_norm,
            k_norm=k_norm,
        )

    def _head_norms(
        self,
        index: int,
        prefix: str,
        weights: list[Tensor | QuantizedTensor],
        biases: list[Tensor | None],
    ) -> tuple[Tensor | None, Tensor | None]:
        """Of queries and keys, behind these projections; ``None`` where a family has none."""
        if not self._config.family.qk_norm:
            return None, None
        q_norm, k_norm = (self._norm(f"{prefix}.{n}_norm", self._config.head_dim) for n in "qk")
        if self._smoother is None:
            return q_norm, k_norm
        before = self._norm(f"model.layers.{index}.input_layernorm")
        peaks = partial(expected_peaks, k_norm, weights[1], biases[1], before)
        return self._smoother.norms(index, prefix, q_norm, k_norm, peaks)

    def _feed_forward(self, index: int, prefix: str) -> FeedForward:
        config = self._config
        if config.moe is not None and config.moe.layers[index]:
            return self._experts(config.moe, prefix)
        return self._mlp(f"{prefix}.mlp", config.intermediate_size, config.mlp_bias)

    def _mlp(
        self,
        prefix: str,
        width: int,
        bias: bool = False,
        names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    ) -> Mlp:
        """``names`` are those of gate, up and down."""
        hidden = self._config.hidden_size
        gate_up, sizes = [f"{prefix}.{name}" for name in names[:2]], [width, width]
        if self._config.family.fused:
            gate_up, sizes = [f"{prefix}.gate_up_proj"], [2 * width]
        return Mlp(
            self._linear(gate_up, sizes, hidden, bias, self._config.activation),
            self._linear([f"{prefix}.{names[2]}"], [hidden], width, bias),
            self._config.activation,
        )

    def _experts(self, moe: MoeConfig, prefix: str) -> MixtureOfExperts:
        names = self._config.family.experts
        assert names is not None
        module = f"{prefix}.{names.module}"
        shared = None
        if moe.shared_width is not None:
            mlp = self._mlp(f"{module}.shared_expert", moe.shared_width)
            shared = SharedExpert(mlp, self._router(f"{module}.shared_expert_gate", 1))
        experts = tuple(
            self._mlp(f"{module}.experts.{number}", moe.width, names=names.projections)
            for number in range(moe.num_experts)
        )
        together = self._backend.experts(
            [expert.gate_up for expert in experts],
            [expert.down for expert in experts],
            self._config.activation,
            moe.top_k,
        )
        return MixtureOfExperts(
            router=self._router(f"{module}.gate", moe.num_experts),
            experts=experts,
            top_k=moe.top_k,
            normalize=moe.normalize,
            shared=shared,
            together=together,
        )

    def _router(self, module: str, size: int) -> LinearOp:
        name = f"{module}.weight"
        weight = _checked(name, self._source.tensor(name), (size, self._config.hidden_size))
        self._linears[module] = self._backend.router(weight)
        return self._linears[module]

    def _embedding(self, name: str) -> Tensor:
        shape = self._config.vocab_size, self._config.hidden_size
        tensor = _checked(name, self._source.tensor(name), shape)
        return tensor.to(self._backend.device, self._backend.dtype)

    def _norm(self, module: str, size: int | None = None) -> Tensor:
        """What a norm multiplies by: its weight, plus the family's offset."""
        name = f"{module}.weight"
        shape = (size or self._config.hidden_size,)
        tensor = _checked(name, self._source.tensor(name), shape)
        return tensor.to(self._backend.device, torch.float32) + self._config.family.norm_offset

    def _linear(
        self,
        modules: list[str],
        rows: list[int],
        columns: int,
        bias: bool,
        activation: Activation | None = None,
    ) -> LinearOp:
        """One operation for modules that read the same input, stacked along their rows.

        ``activation`` is that between a gate and its up projection, if they are the modules.
        """
        return self._fused(modules, *self._read(modules, rows, columns, bias), activation)

    def _read(
        self, modules: list[str], rows: list[int], columns: int, bias: bool
    ) -> tuple[list[Tensor | QuantizedTensor], list[Tensor | None]]:
        """Weights [rows, columns] and biases [rows] of modules that read the same input."""
        weights = [
            _checked(module, self._source.weight(module), (size, columns))
            for module, size in zip(modules, rows, strict=True)
        ]
        biases = [
            _checked(module, self._source.tensor(f"{module}.bias"), (size,)) if bias else None
            for module, size in zip(modules, rows, strict=True)
        ]
        _refuse_mixture(modules, weights)
        return weights, biases

    def _fused(
        self,
        modules: list[str],
        weights: list[Tensor | QuantizedTensor],
        biases: list[Tensor | None],
        activation: Activation | None = None,
    ) -> LinearOp:
        operation = self._operation(weights, biases, activation)
        self._linears[", ".join(modules)] = operation
        return operation

    def _operation(
        self,
        weights: list[Tensor | QuantizedTensor],
        biases: list[Tensor | None],
        activation: Activation | None,
    ) -> LinearOp:
        """Weights that read the same input as one stacked weight, or side by side."""
        quantized = [weight for weight in weights if isinstance(weight, QuantizedTensor)]
        dense = [weight for weight in weights if isinstance(weight, Tensor)]
        if quantized and not can_stack(quantized):
            return SideBySide([self._one(w, b) for w, b in zip(weights, biases, strict=True)])
        stacked = concatenate_rows(quantized) if quantized else torch.cat(dense)
        given = [bias for bias in biases if bias is not None]
        stacked_bias = torch.cat(given) if given else None
        if activation is None:
            return self._one(stacked, stacked_bias)
        return self._in_order(
            stacked, lambda weight: self._backend.gate_up(weight, stacked_bias, activation)
        )

    def _one(self, weight: Tensor | QuantizedTensor, bias: Tensor | None) -> LinearOp:
        return self._in_order(weight, lambda prepared: self._backend.linear(prepared, bias))

    def _in_order(
        self,
        weight: Tensor | QuantizedTensor,
        prepare: Callable[[Tensor | QuantizedTensor], LinearOp],
    ) -> LinearOp:
        """A weight as the back end runs it; if its columns have an order, so has its input."""
        if isinstance(weight, Tensor) or weight.order is None:
            return prepare(weight)
        order = weight.order.to(self._backend.device)
        return ReorderedInput(prepare(weight.in_code_order()), order)


def _checked(name: str, tensor: Weight, shape: tuple[int, ...]) -> Weight:
    if tuple(tensor.shape) != shape:
        raise CheckpointError(
            f"{name} has shape {tuple(tensor.shape)}; config.json asks for {shape}: the config and "
            "the weights do not match"
        )
    return tensor


def _refuse_mixture(modules: list[str], weights: list[Tensor | QuantizedTensor]) -> None:
    """Weights of one fused projection are all quantized alike, or all dense."""
    schemes = {w.scheme if isinstance(w, QuantizedTensor) else None for w in weights}
    if len(schemes) > 1:
        raise CheckpointError(
            f"{', '.join(modules)} are quantized differently; projections that read the same input "
            "share one scheme and one ignore status"
        )


def load_decoder(
    reader: CheckpointReader,
    backend: Backend,
    length: int | None = None,
    key_exponents: Sequence[KeyExponents | None] | None = None,
) -> tuple[Decoder, StoredModel]:
    """Load a model folder, and say how it is stored.

    Args:
        reader: the opened folder.
        backend: where and how it will run.
        length: longest sequence, for the rotary tables; the model's own if ``None``.
        key_exponents: factors for keys that a plan has, a layer each; see :mod:`.key_smoothing`.

    Raises:
        ModelError: an architecture that is not supported.
        CheckpointError: missing, extra or misshapen tensors, or a quantization we cannot read;
            factors that would change scores.
    """
    config = parse_decoder_config(reader.config)
    source = WeightSource(reader)
    smoother = KeySmoother(config, key_exponents, source.stored.kv_scales, backend.dtype)
    builder = DecoderBuilder(source, config, backend, smoother)
    decoder = builder.build(length or config.max_position)
    warm_up(decoder)
    stored, smoothed = source.stored, smoother.smoothed
    return decoder, replace(stored, notes=stored.notes + smoothed.notes(), smoothed=smoothed)
