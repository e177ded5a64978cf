"""The seam: one operation, one signature, several back ends.

A back end computes what a decoder layer needs beyond indexing and adding. ``reference`` is
plain torch and the truth in tests; others answer to it. Every operation takes the rows of a
ragged batch; none knows about models or requests.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol, TypeAlias

import torch
from torch import Tensor

from qtool.formats.tensor import QuantizedTensor


class AttentionLayout(Protocol):
    """What attention reads of a batch (:class:`qtool.runtime.batch.Batch` is one).

    ``spans`` are the sequences' rows; ``block_tables`` int64 [S, B] their blocks.
    """

    @property
    def spans(self) -> tuple[Span, ...]: ...
    @property
    def block_tables(self) -> Tensor: ...
    @property
    def is_decode(self) -> bool: ...


class PagedBatch(AttentionLayout, Protocol):
    """A batch that is stored too (:class:`qtool.runtime.batch.Batch` is one).

    ``slots`` int64 [T] say where rows are stored, block by block, -1 nowhere; ``tails`` each
    sequence's tail page, where the cache has them.
    """

    @property
    def slots(self) -> Tensor: ...
    @property
    def tails(self) -> tuple[int, ...]: ...


class Span(Protocol):
    """Rows ``[start, start + length)``; the last one stands at ``context_len - 1``."""

    @property
    def start(self) -> int: ...
    @property
    def length(self) -> int: ...
    @property
    def context_len(self) -> int: ...


@dataclass(frozen=True, slots=True)
class AttentionScope:
    """Constants of one layer's attention.

    Attributes:
        scale: what scores are multiplied by.
        window: how many tokens a row sees, itself the last; ``None`` for all.
        softcap: scores become ``softcap * tanh(score / softcap)`` (Gemma 2 report, section 2).
    """

    scale: float
    window: int | None = None
    softcap: float | None = None


@dataclass(frozen=True, slots=True)
class RoundedRows:
    """Rows that are rounded to 8 bits already, in the form that one linear reads.

    Attributes:
        codes: [M, K'].
        scales: float32 [M], or [K' / 128, M].
    """

    codes: Tensor
    scales: Tensor


# What comes out of a norm: [M, K] in the compute dtype, or rounded for the one that reads it.
Rows: TypeAlias = Tensor | RoundedRows


@dataclass(frozen=True, slots=True)
class Stream:
    """The residual stream between two parts of a decoder; the last one's result is not added yet.

    Attributes:
        rows: float32 [M, K]; a back end may add the update in place.
        update: [M, K] in the compute dtype, or ``None``.
        update_norm: float32 [K] of a norm that the update goes through first, or ``None``.
    """

    rows: Tensor
    update: Tensor | None = None
    update_norm: Tensor | None = None


# How an element is stored: in the compute dtype, or as a code of a grid.
PageCodes = Literal["wide", "int8", "fp8", "int4"]


@dataclass(frozen=True, slots=True)
class PageForm:
    """What lies in the pages of one layer.

    Codes of 8 bits have a scale a token and head, keys of 4 bits a grid a channel and page,
    values of 4 bits one a group of channels.

    Attributes:
        is_static: all keys, and all values, of a head have one scale, which is given.
    """

    keys: PageCodes
    values: PageCodes
    is_static: bool = False

    @property
    def has_tails(self) -> bool:
        """Whether a page is stored when it is full, and kept aside until then."""
        return "int4" in (self.keys, self.values)


class FusedCache(ABC):
    """One layer's keys and values in pages of the back end's own: rotated, stored, attended to.

    Attributes:
        pools: tensors [num_blocks, ...]; a block's share is its entry in each.
    """

    pools: list[Tensor]

    @abstractmethod
    def beside(self, tails: Tensor | None, scales: tuple[Tensor, Tensor] | None) -> FusedCache:
        """Another layer's, of the same form, in other blocks of the same pools.

        Args:
            tails, scales: the other's, where the form has them.
        """

    @abstractmethod
    def attend(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        rotary: tuple[Tensor, Tensor] | None,
        batch: PagedBatch,
        scope: AttentionScope,
    ) -> Tensor:
        """Store the batch's rows, and let its queries see what is stored.

        Args:
            q: [T, num_heads, head_dim], not rotated.
            keys, values: [T, num_kv_heads, head_dim].
            rotary: cosines and sines of the rows, [T, rotary_dim] in the compute dtype; ``None``
                where positions are not rotated.

        Returns:
            [T, num_heads, head_dim].
        """


class LinearOp(ABC):
    """A linear layer ready to run: weights in the back end's own layout."""

    kernel: str  # what runs, for the load plan
    obstacle: str = ""  # why it is not the kernel the back end is there for
    num_bytes: int  # memory its weights take
    gates: bool = False  # whether the result of Backend.gate_up is gated already, [M, K]

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor:
        """x [M, in_features] -> [M, out_features], in x's dtype."""

    def read(self, rows: Rows) -> Tensor:
        """The same of what :meth:`Backend.norm_for` made for this linear."""
        assert isinstance(rows, Tensor), "rounded for another linear"
        return self(rows)


class ExpertsOp(ABC):
    """All experts of a mixture in a fixed number of launches."""

    @abstractmethod
    def __call__(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """What the chosen experts make of each row, weighted and added up.

        Args:
            x: [T, hidden].
            weights: float32 [T, top_k].
            chosen: int64 [T, top_k], experts' numbers.

        Returns:
            float32 [T, hidden].
        """


class SideBySide(LinearOp):
    """Linears of one input that do not stack into one weight: one after another."""

    def __init__(self, parts: Sequence[LinearOp]) -> None:
        self._parts = tuple(parts)
        self.num_bytes = sum(part.num_bytes for part in parts)
        self.kernel = parts[0].kernel

    def __call__(self, x: Tensor) -> Tensor:
        return torch.cat([part(x) for part in self._parts], dim=1)


class ReorderedInput(LinearOp):
    """A linear whose weight holds its input features in another order.

    Args:
        linear: with the weight as it is held.
        order: int64 [in_features]: which feature each column of the weight is for.
    """

    def __init__(self, linear: LinearOp, order: Tensor) -> None:
        self._linear, self._order = linear, order
        self.num_bytes = linear.num_bytes + order.numel() * order.element_size()
        self.kernel = f"{linear.kernel}, inputs reordered"
        self.gates, self.obstacle = linear.gates, linear.obstacle

    def __call__(self, x: Tensor) -> Tensor:
        return self._linear(x.index_select(1, self._order))


class Backend(ABC):
    """Operations on one device in one dtype."""

    name: ClassVar[str]
    attention_kernel: ClassVar[str]  # what runs, for people
    norm_kernel: ClassVar[str]
    fused_kernel: ClassVar[str] = ""  # what runs over pages of its own, if it has any
    # Tokens of a block that its own pages want, where nobody asks for a number.
    block_size: ClassVar[int | None] = None

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device = device
        self.dtype = dtype

    @abstractmethod
    def linear(self, weight: Tensor | QuantizedTensor, bias: Tensor | None) -> LinearOp:
        """Prepare a weight [out_features, in_features] once, at load."""

    def gate_up(
        self, weight: Tensor | QuantizedTensor, bias: Tensor | None, activation: str
    ) -> LinearOp:
        """Prepare a gate stacked on its up projection, [2 * K, in_features].

        The operation gives both, [M, 2 * K]; or, where it says that it ``gates``, their gated
        product.
        """
        return self.linear(weight, bias)

    def experts(
        self,
        gate_up: Sequence[LinearOp],
        down: Sequence[LinearOp],
        activation: str,
        top_k: int,
    ) -> ExpertsOp | None:
        """Experts' linears, prepared already, as one operation; ``None``: one after another."""
        return None

    def head(self, weight: Tensor | QuantizedTensor) -> LinearOp:
        """Prepare the head; it computes in float32.

        16-bit logits have 8 bits, and ties among the likeliest.
        """
        return type(self)(self.device, torch.float32).linear(weight, None)

    def router(self, weight: Tensor) -> LinearOp:
        """Prepare a small plain weight that decides; float32, so that near ties do not flip."""
        return type(self)(self.device, torch.float32).linear(weight, None)

    def why_not_fused(self, form: PageForm, head_dim: int, block_size: int) -> str | None:
        """What keeps it from having pages of its own for a layer, or ``None``."""
        return f"the back end {self.name} has none of its own"

    def fused_cache(
        self,
        form: PageForm,
        shape: tuple[int, int, int, int],
        *,
        tails: Tensor | None = None,
        scales: tuple[Tensor, Tensor] | None = None,
    ) -> FusedCache:
        """A layer's pages, where :meth:`why_not_fused` finds nothing.

        Args:
            shape: (num_blocks, block_size, num_kv_heads, head_dim).
            tails: [num_tails, keys and values, block_size, num_kv_heads, head_dim] in the compute
                dtype, where the form has them.
            scales: keys' and values', float32 [1] or [num_kv_heads, 1], where the form is static.
        """
        raise NotImplementedError

    @property
    def warm_up_rows(self) -> tuple[int, ...]:
        """Rows of steps that compile what else serving can need, once there is a cache."""
        return ()

    @property
    def compiles(self) -> bool:
        """Whether its kernels are compiled when they first run."""
        return False

    def warm_up(self) -> None:
        """Compile all forms of products that serving can need, once all weights are prepared."""
        return

    @abstractmethod
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Rows scaled to unit root mean square, times weight (Zhang & Sennrich 2019, section 3).

        x [M, K], weight [K] -> [M, K], all float32.
        """

    def settle(self, stream: Stream, eps: float) -> Tensor:
        """The stream with its update added, float32 [M, K]."""
        update = stream.update
        if update is None:
            return stream.rows
        if stream.update_norm is not None:
            update = self.rms_norm(update.float(), stream.update_norm, eps)
        return stream.rows + update

    def norm_for(
        self, reader: LinearOp | None, stream: Stream, weight: Tensor, eps: float
    ) -> tuple[Tensor, Rows]:
        """Add a stream's update, and norm the sum: (sum, float32 [M, K]; its norm).

        Args:
            reader: the one linear that will read the norm (:meth:`LinearOp.read`), which may get
                it rounded; ``None`` where others do, who get it in the compute dtype.
            weight: float32 [K], the norm's.
        """
        rows = self.settle(stream, eps)
        return rows, self.rms_norm(rows, weight, eps).to(self.dtype)

    def norm_heads(
        self, q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """Queries [T, H, D] and keys [T, KV, D], each head normed; weights float32 [D]."""

        def norm(x: Tensor, weight: Tensor) -> Tensor:
            rows = x.reshape(-1, x.shape[2]).float()
            return self.rms_norm(rows, weight, eps).to(x.dtype).view(x.shape)

        return norm(q, q_weight), norm(k, k_weight)

    @abstractmethod
    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """[M, 2 * K] -> silu(first half) * second half, [M, K]."""

    @abstractmethod
    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        """[M, 2 * K] -> gelu(first half) * second half, [M, K]; gelu's form with a tanh."""

    def gate_for(self, reader: LinearOp, gate_up: Tensor, activation: str) -> Rows:
        """Gate and up projection [M, 2 * K], gated for the linear that reads the product.

        Args:
            reader: gets [M, K] in the dtype of ``gate_up``, or rounded for it.
            activation: of the gate: ``silu``, or gelu's form with a tanh.
        """
        return self.silu_mul(gate_up) if activation == "silu" else self.gelu_mul(gate_up)

    @abstractmethod
    def attention(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        layout: AttentionLayout,
        scope: AttentionScope,
    ) -> Tensor:
        """Causal attention of every row over its sequence's pages, grouped-query.

        Args:
            q: [T, num_heads, head_dim], rotated.
            keys, values: [num_blocks, block_size, num_kv_heads, head_dim]; the rows' own
                entries are already written. Slots outside a sequence's context may hold
                anything, NaN included.

        Returns:
            [T, num_heads, head_dim].
        """
