"""The parts of a decoder layer: weights in the back end's form, and the order they run in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from qtool.runtime.batch import Batch
from qtool.runtime.config import Activation, DecoderConfig
from qtool.runtime.kernels.backend import AttentionScope, Backend, LinearOp
from qtool.runtime.kv_cache import LayerCache
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
        x: Tensor,
        rotary: tuple[RotaryRows, ...],
        layer: int,
        batch: Batch,
        cache: LayerCache,
        config: DecoderConfig,
        backend: Backend,
    ) -> Tensor:
        """x [T, hidden] -> [T, hidden]; the rows' keys and values are written first.

        Args:
            rotary: the batch's rows of every rotary table.
        """
        heads = self.qkv(x).view(x.shape[0], -1, config.head_dim)
        q, k, v = heads.split((config.num_heads, config.num_kv_heads, config.num_kv_heads), dim=1)
        q = _norm_heads(q, self.q_norm, config, backend)
        k = _norm_heads(k, self.k_norm, config, backend)
        turn = None if self.rope is None else rotary[self.rope]
        out = cache.attend(layer, q, k, v, batch, self.scope, backend, turn)
        return self.output(out.reshape(x.shape[0], -1))


def _norm_heads(
    x: Tensor, weight: Tensor | None, config: DecoderConfig, backend: Backend
) -> Tensor:
    """Heads [T, H, head_dim], each scaled to unit root mean square where there is a norm."""
    if weight is None:
        return x
    rows = x.reshape(-1, config.head_dim).float()
    return backend.rms_norm(rows, weight, config.norm_eps).to(x.dtype).view(x.shape)


class FeedForward(Protocol):
    """What stands behind the attention: an MLP, or a mixture of them."""

    def __call__(self, x: Tensor, backend: Backend) -> Tensor:
        """x [T, hidden] -> [T, hidden]."""
        ...


@dataclass(frozen=True, slots=True)
class Mlp:
    """Gated MLP (Shazeer 2020) with fused gate and up projection."""

    gate_up: LinearOp
    down: LinearOp
    activation: Activation = "silu"

    def __call__(self, x: Tensor, backend: Backend) -> Tensor:
        """x [T, hidden] -> [T, hidden]."""
        gate_up = self.gate_up(x)
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
        x: Tensor,
        rotary: tuple[RotaryRows, ...],
        layer: int,
        batch: Batch,
        cache: LayerCache,
        config: DecoderConfig,
        backend: Backend,
    ) -> Tensor:
        """The residual stream, float32 [T, hidden], behind this layer."""

        def norm(rows: Tensor, weight: Tensor | None) -> Tensor:
            return (
                rows if weight is None else backend.rms_norm(rows.float(), weight, config.norm_eps)
            )

        normed = norm(x, self.attention_norm).to(backend.dtype)
        out = self.attention(normed, rotary, layer, batch, cache, config, backend)
        x = x + norm(out, self.attention_out_norm)
        out = self.mlp(norm(x, self.mlp_norm).to(backend.dtype), backend)
        return x + norm(out, self.mlp_out_norm)
