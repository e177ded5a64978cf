"""The parts of a decoder layer: weights in the back end's form, and the order they run in."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from qtool.runtime.batch import Batch
from qtool.runtime.config import DecoderConfig
from qtool.runtime.kernels.backend import AttentionScope, Backend, LinearOp
from qtool.runtime.kv_cache import KVCache
from qtool.runtime.rotary import rotate


@dataclass(frozen=True, slots=True)
class RotaryRows:
    """Cosines and sines of a batch's rows, [T, head_dim]."""

    cos: Tensor
    sin: Tensor


@dataclass(frozen=True, slots=True)
class Attention:
    """Grouped-query attention with fused q, k, v projection."""

    qkv: LinearOp
    output: LinearOp
    scope: AttentionScope

    def __call__(
        self,
        x: Tensor,
        rotary: RotaryRows,
        layer: int,
        batch: Batch,
        cache: KVCache,
        config: DecoderConfig,
        backend: Backend,
    ) -> Tensor:
        """x [T, hidden] -> [T, hidden]; the rows' keys and values are written first."""
        heads = self.qkv(x).view(x.shape[0], -1, config.head_dim)
        q, k, v = heads.split((config.num_heads, config.num_kv_heads, config.num_kv_heads), dim=1)
        q, k = rotate(q, rotary.cos, rotary.sin), rotate(k, rotary.cos, rotary.sin)
        cache.write(layer, k, v, batch.slots)
        out = backend.attention(q, cache.keys[layer], cache.values[layer], batch, self.scope)
        return self.output(out.reshape(x.shape[0], -1))


@dataclass(frozen=True, slots=True)
class Mlp:
    """SwiGLU (Shazeer 2020) with fused gate and up projection."""

    gate_up: LinearOp
    down: LinearOp

    def __call__(self, x: Tensor, backend: Backend) -> Tensor:
        """x [T, hidden] -> [T, hidden]."""
        return self.down(backend.silu_mul(self.gate_up(x)))


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Pre-norm block; norm weights are float32 [hidden]."""

    input_norm: Tensor
    attention: Attention
    post_attention_norm: Tensor
    mlp: Mlp
