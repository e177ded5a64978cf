"""The decoder: one class for all supported families, driven by its config."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from qtool.runtime.batch import Batch, QuerySpan
from qtool.runtime.config import DecoderConfig
from qtool.runtime.kernels.backend import Backend, LinearOp, Stream
from qtool.runtime.kernels.cpu.kv_pages import takes
from qtool.runtime.kernels.cpu.native_backend import NativeBackend
from qtool.runtime.kv_cache import AttentionCache, BlockPools, CacheForm, LayerCache, PagedCache
from qtool.runtime.kv_fused import block_size_of
from qtool.runtime.kv_groups import LayerGroups
from qtool.runtime.layers import DecoderLayer
from qtool.runtime.rotary import Rotary


@dataclass(frozen=True, slots=True)
class Decoder:
    """A loaded model.

    Attributes:
        embedding: [vocab, hidden] in the compute dtype.
        norm: float32 [hidden], before the head.
        head: hidden -> vocab, in float32.
        rotary: cosines and sines, for each of ``config.ropes``.
        linears: every linear by its checkpoint name, for the load plan.
        kv: how it stores keys and values.
    """

    config: DecoderConfig
    backend: Backend
    embedding: Tensor
    layers: tuple[DecoderLayer, ...]
    norm: Tensor
    head: LinearOp
    rotary: tuple[Rotary, ...]
    linears: dict[str, LinearOp]
    kv: CacheForm

    @property
    def dtype(self) -> torch.dtype:
        """Compute dtype."""
        return self.backend.dtype

    @property
    def has_native_attention(self) -> bool:
        """Whether native CPU kernels store and read the cache, of whatever form."""
        known = self.dtype in (torch.float32, torch.bfloat16)
        native = isinstance(self.backend, NativeBackend) and not self.kv.counts_votes
        return native and known and takes(self.kv.schemes.layers, self.config.head_dim)

    @property
    def kv_dtype(self) -> torch.dtype:
        """Of keys and values where a scheme keeps them as they are computed."""
        return self.backend.dtype

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        return self.backend.device

    @property
    def weight_bytes(self) -> int:
        """Memory of all weights, in the form they are computed with."""
        linears = sum(op.num_bytes for op in self.linears.values())
        shared = self.config.tied_head and self.dtype == torch.float32
        return linears + (0 if shared else self.embedding.nbytes)

    @property
    def kv_cache_dtype(self) -> str:
        """How keys and values are stored."""
        if self.kv.schemes.is_wide:
            return str(self.kv_dtype).removeprefix("torch.")
        return self.kv.schemes.description

    def block_size(self, asked: int | None = None) -> int:
        """Tokens of a block of its cache: what was asked for, or what it needs or wants.

        Raises:
            UsageError: the form of the cache needs another number.
        """
        return block_size_of(self.kv.schemes, self.backend, asked)

    @property
    def kv_bytes_per_token(self) -> int:
        """Memory that one token's keys and values take, scales included, tail pages not."""
        config, size = self.config, self.block_size()
        page = self.kv.schemes.page_bytes(
            size, config.num_kv_heads, config.head_dim, self.kv_dtype.itemsize
        )
        return -(-page // size)

    @property
    def kv_tail_bytes(self) -> int:
        """Memory of a running sequence's unfinished page, where the form keeps it aside; or 0."""
        heads, head_dim = self.config.num_kv_heads, self.config.head_dim
        return self.kv.schemes.tail_bytes(heads, head_dim, self.kv_dtype.itemsize)

    def new_cache(
        self,
        num_blocks: int,
        block_size: int,
        num_tails: int = 1,
        groups: LayerGroups | None = None,
    ) -> BlockPools:
        """An empty cache of the kind :meth:`forward` reads.

        Args:
            num_tails: sequences that may run at a time, where the form has tail pages.
            groups: which layers share block tables; all of them if ``None``.

        Raises:
            UsageError: blocks that native kernels do not take.
        """
        shape = (num_blocks, block_size, self.config.num_kv_heads, self.config.head_dim)
        if self.has_native_attention and isinstance(self.backend, NativeBackend):
            library = self.backend.library
            return PagedCache(self.kv, shape, num_tails, self.kv_dtype, library, groups)
        # Eviction needs votes, which are counted from pages that torch can read.
        pages = None if self.kv.counts_votes else self.backend
        return LayerCache(self.kv, shape, num_tails, self.dtype, self.device, pages, groups)

    def warm_up(self, cache: BlockPools) -> None:
        """Compile what steps need before the first request; nothing is stored in blocks."""
        if not isinstance(cache, LayerCache) or not cache.is_fused:
            return
        for rows in self.backend.warm_up_rows:
            positions = torch.arange(rows, device=self.device)
            tables = positions.new_zeros(1, -(-rows // cache.block_size))
            tokens, span = torch.zeros_like(positions), QuerySpan(0, rows, rows)
            nowhere, last = positions.new_full((rows,), -1), positions[-1:]
            batch = Batch(tokens, positions, nowhere, (span,), tables, last, (0,))
            self.forward(replace(batch, more=(batch,) * (cache.num_groups - 1)), cache)

    @torch.inference_mode()
    def forward(self, batch: Batch, cache: BlockPools) -> Tensor:
        """Float32 logits [R, vocab] of ``batch.logit_rows``; the cache gains the batch's rows."""
        assert isinstance(cache, AttentionCache)
        stream = self.run_layers(self.embed(batch), range(len(self.layers)), batch, cache)
        return self.logits(stream, batch)

    @torch.inference_mode()
    def embed(self, batch: Batch) -> Stream:
        """The first layer's input, [T, hidden].

        The residual stream stays in float32: in bfloat16 every layer would round it to 8 bits.
        """
        return Stream(self.embedding[batch.token_ids].float() * self.config.embedding_scale)

    @torch.inference_mode()
    def run_layers(
        self, stream: Stream, span: range, batch: Batch, cache: AttentionCache
    ) -> Stream:
        """Some layers one after the other, [T, hidden]; their caches gain the rows."""
        rotary = tuple(table.rows(batch.positions) for table in self.rotary)
        for index in span:
            layer = self.layers[index]
            stream = layer(stream, rotary, index, batch, cache, self.config, self.backend)
        return stream

    @torch.inference_mode()
    def logits(self, stream: Stream, batch: Batch) -> Tensor:
        """Float32 logits [R, vocab] of the last layer's output [T, hidden]."""
        config = self.config
        if not len(batch.logit_rows):
            return stream.rows.new_empty(0, config.vocab_size)
        rows = self.backend.settle(stream, config.norm_eps)[batch.logit_rows]
        rows = self.backend.rms_norm(rows, self.norm, config.norm_eps)
        return soft_cap(self.head(rows), config.final_softcap)

    def likeliest(self, batch: Batch, cache: BlockPools) -> tuple[Tensor, Tensor]:
        """The largest logit of each of ``batch.logit_rows``, float32 [R], and its token, int64 [R].

        Of equals the lowest token; NaN if any logit of the row is. For steps in which nobody asks
        for more: a decoder may then do without a table of logits.
        """
        best, tokens = self.forward(batch, cache).max(dim=-1)
        return best, tokens


def soft_cap(logits: Tensor, cap: float | None) -> Tensor:
    """``cap * tanh(logits / cap)`` (Gemma 2 report, section 2); [R, vocab] in place.

    Row by row: within one call over all of them, a value's bits would depend on its place.
    """
    if cap is not None:
        for row in logits:
            row.div_(cap).tanh_().mul_(cap)
    return logits
