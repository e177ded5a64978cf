"""A loaded decoder as one native call a step, compiled from the one definition of the model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from qtool.runtime.batch import Batch
from qtool.runtime.config import DecoderConfig
from qtool.runtime.kernels.backend import LinearOp
from qtool.runtime.kernels.cpu.kv_pages import takes_heads
from qtool.runtime.kernels.cpu.native_backend import NativeBackend
from qtool.runtime.kernels.cpu.native_ops import BLOCK, NativeLinear
from qtool.runtime.kernels.cpu.step import LayerOps, NativeStep, StepModel
from qtool.runtime.kv_cache import BlockPools, CacheForm, PagedCache
from qtool.runtime.layers import DecoderLayer, Mlp
from qtool.runtime.model import Decoder, soft_cap
from qtool.runtime.rotary import Rotary


@dataclass(frozen=True, slots=True)
class NativeDecoder(Decoder):
    """A :class:`Decoder` whose forward pass is one call, over pages in the kernels' own form."""

    step: NativeStep

    @property
    def has_native_attention(self) -> bool:
        """Always."""
        return True

    @property
    def kv_dtype(self) -> torch.dtype:
        """See :attr:`Decoder.kv_dtype`; the kernels have no float16."""
        return torch.bfloat16 if self.dtype == torch.bfloat16 else torch.float32

    @torch.inference_mode()
    def forward(self, batch: Batch, cache: BlockPools) -> Tensor:
        """Float32 logits [R, vocab] of ``batch.logit_rows``; the cache gains the batch's rows."""
        assert isinstance(cache, PagedCache)
        out = self.step.run(batch, cache.pages)
        logits = out if isinstance(self.head, NativeLinear) else self.head(out)
        return soft_cap(logits, self.config.final_softcap)

    @torch.inference_mode()
    def likeliest(self, batch: Batch, cache: BlockPools) -> tuple[Tensor, Tensor]:
        """See :meth:`Decoder.likeliest`; logits exist 32 at a time."""
        assert isinstance(cache, PagedCache)
        if not isinstance(self.head, NativeLinear) or self.config.final_softcap is not None:
            return Decoder.likeliest(self, batch, cache)
        return self.step.run_likeliest(batch, cache.pages)


def why_not_native(decoder: Decoder) -> str | None:
    """What keeps a decoder from running as one native call, or ``None``."""
    if not isinstance(decoder.backend, NativeBackend):
        return f"the back end is {decoder.backend.name}"
    if lacking := next(_lacking(decoder.config), None):
        return f"the native step has no {lacking}"
    others = [name for name, op in decoder.linears.items() if not isinstance(op, NativeLinear)]
    others = [name for name in others if name != "lm_head"]
    if others:
        return f"{len(others)} linears have no native kernel, the first is {others[0]}"
    head_dim = decoder.config.head_dim
    if not takes_heads(head_dim):
        return f"head_dim is {head_dim}; the native attention takes multiples of 16 up to 256"
    width = decoder.config.intermediate_size
    if width % BLOCK:
        return f"intermediate_size is {width}; the native step takes multiples of {BLOCK}"
    return None


def _lacking(config: DecoderConfig) -> Iterator[str]:
    """What of a model the step does not compute."""
    rotated_whole = all(
        rope.rotary_dim(config.head_dim) == config.head_dim for rope in config.ropes
    )
    needs = {
        "mixture of experts": config.moe is not None,
        "norm of queries and keys": config.family.qk_norm,
        "norm behind attention and MLP": config.family.sandwich,
        f"activation {config.activation}": config.activation != "silu",
        "soft cap of attention scores": config.attention_softcap is not None,
        "scaled embeddings": config.embedding_scale != 1.0,
        "layers with rotary tables of their own, or without": len(set(config.rope_of)) > 1,
        "layers without rotary positions": config.rope_of[0] is None,
        "heads rotated in part": not rotated_whole,
    }
    return (name for name, needed in needs.items() if needed)


def compile_decoder(decoder: Decoder, form: CacheForm) -> NativeDecoder:
    """The same model as one native call a step.

    Args:
        decoder: one for which :func:`why_not_native` finds nothing.
        form: how keys and values are stored.
    """
    backend = decoder.backend
    assert isinstance(backend, NativeBackend)
    step = NativeStep(backend.library, _describe(decoder))
    stored = replace(decoder, kv=form)
    parts = {field.name: getattr(stored, field.name) for field in fields(Decoder)}
    return NativeDecoder(**parts, step=step)


def _describe(decoder: Decoder) -> StepModel:
    config = decoder.config
    positions = decoder.rotary[0].cos.shape[0]
    # In bfloat16 the table has 8 bits, an angle's error of half a percent; here it costs nothing.
    rotary = Rotary(config.ropes[0], config.head_dim, positions, torch.float32, decoder.device)
    half, embedding = config.head_dim // 2, decoder.embedding
    return StepModel(
        layers=[_layer_ops(layer) for layer in decoder.layers],
        embedding=embedding if embedding.dtype == torch.bfloat16 else embedding.float(),
        norm=decoder.norm,
        head=decoder.head if isinstance(decoder.head, NativeLinear) else None,
        cos=rotary.cos[:, :half].contiguous(),
        sin=rotary.sin[:, :half].contiguous(),
        intermediate=config.intermediate_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        norm_eps=config.norm_eps,
    )


def _layer_ops(layer: DecoderLayer) -> LayerOps:
    assert isinstance(layer.mlp, Mlp)
    return LayerOps(
        layer.attention_norm,
        layer.mlp_norm,
        _native(layer.attention.qkv),
        _native(layer.attention.output),
        _native(layer.mlp.gate_up),
        _native(layer.mlp.down),
        layer.attention.scope,
    )


def _native(linear: LinearOp) -> NativeLinear:
    assert isinstance(linear, NativeLinear)
    return linear
