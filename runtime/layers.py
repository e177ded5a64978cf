"""The parts of a decoder layer: weights in the back end's form, and the order they run in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from qtool.runtime.batch import Batch
from qtool.runtime.config import Activation, DecoderConfig
from qtool.runtime.kernels.backend import AttentionScope, Backend, LinearOp, Rows, Stream
from qtool.runtime.kv_cache import AttentionCache
from qtool.runtime.rotary import RotaryRows


@dataclass(frozen=True, slots=True)
class Attention:
    """Grouped-query attention with fused q, k, v projection.

    Attributes:
        rope: the rotary table it takes, or ``None``: positions are not rotated.
        q_norm, k_norm: float32 [head_dim], or ``None``.
    """

    qkv: LinearOp
    output: LinearOp
    scope: AttentionScope
    rope: int | None = 0
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None

    def __call__(
        self,
        x: Rows,
        rotary: tuple[RotaryRows, ...],
        layer: int,
        batch: Batch,
        cache: AttentionCache,
        config: DecoderConfig,
        backend: Backend,
    ) -> Tensor:
        """x [T, hidden], normed -> [T, hidden]; the rows' keys and values are written first.

        Args:
            rotary: the batch's rows of every rotary table.
        """
        heads = self.qkv.read(x).unflatten(1, (-1, config.head_dim))
        q, k, v = heads.split((config.num_heads, config.num_kv_heads, config.num_kv_heads), dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = backend.norm_heads(q, k, self.q_norm, self.k_norm, config.norm_eps)
        turn = None if self.rope is None else rotary[self.rope]
        out = cache.attend(layer, q, k, v, batch, self.scope, backend, turn)
        return self.output(out.flatten(1))


class FeedForward(Protocol):
    """What stands behind the attention: an MLP, or a mixture of them."""

    @property
    def reader(self) -> LinearOp | None:
        """The one linear that reads its input, or ``None`` where there are several."""
        ...

    def __call__(self, x: Rows, backend: Backend) -> Tensor:
        """x [T, hidden], normed for its reader -> [T, hidden]."""
        ...


@dataclass(frozen=True, slots=True)
class Mlp:
    """Gated MLP (Shazeer 2020) with fused gate and up projection."""

    gate_up: LinearOp
    down: LinearOp
    activation: Activation = "silu"

    @property
    def reader(self) -> LinearOp:
        """What reads its input."""
        return self.gate_up

    def __call__(self, x: Rows, backend: Backend) -> Tensor:
        """x [T, hidden] -> [T, hidden]."""
        gate_up = self.gate_up.read(x)
        if self.gate_up.gates:
            return self.down(gate_up)
        if self.activation == "silu":
            return self.down(backend.silu_mul(gate_up))
        return self.down(backend.gelu_mul(gate_up))


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Pre-norm block; norms are float32 [hidden] with their offset added.

    Attributes:
        attention_norm, mlp_norm: of what goes in.
        attention_out_norm, mlp_out_norm: of what comes out, before it is added; or ``None``.
    """

    attention_norm: Tensor
    attention: Attention
    mlp_norm: Tensor
    mlp: FeedForward
    attention_out_norm: Tensor | None = None
    mlp_out_norm: Tensor | None = None

    def __call__(
        self,
        stream: Stream,
        rotary: tuple[RotaryRows, ...],
        layer: int,
        batch: Batch,
        cache: AttentionCache,
        config: DecoderConfig,
        backend: Backend,
    ) -> Stream:
        """The residual stream [T, hidden] behind this layer."""
        eps = config.norm_eps
        rows, normed = backend.norm_for(self.attention.qkv, stream, self.attention_norm, eps)
        out = self.attention(normed, rotary, layer, batch, cache, config, backend)
        stream = Stream(rows, out, self.attention_out_norm)
        rows, normed = backend.norm_for(self.mlp.reader, stream, self.mlp_norm, eps)
        return Stream(rows, self.mlp(normed, backend), self.mlp_out_norm)
