"""One native call for all layers of a decoder: a description in C structs, built once.

Mirrors ``native/step.h`` field by field. Nothing here knows a model's config:
:mod:`qtool.runtime.native_decoder` reads the one definition of the decoder.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from qtool.runtime.kernels.backend import AttentionLayout, AttentionScope
from qtool.runtime.kernels.cpu.kv_pages import TILE, KvLayer, KvPages
from qtool.runtime.kernels.cpu.native_ops import NativeLinear

# enum Phase of step.h.
PHASES = (
    "embed",
    "norm",
    "qkv",
    "rotate",
    "attend",
    "output",
    "gate_up",
    "down",
    "head",
    "wait",
)


class StepLayout(AttentionLayout, Protocol):
    """What a step reads of a batch (:class:`qtool.runtime.batch.Batch` is one); all int64."""

    @property
    def token_ids(self) -> Tensor: ...
    @property
    def logit_rows(self) -> Tensor: ...
    @property
    def tails(self) -> tuple[int, ...]: ...
    @property
    def more(self) -> Sequence[AttentionLayout]: ...


def _pointers(*names: str) -> list[tuple[str, type]]:
    return [(name, ctypes.c_void_p) for name in names]


def _numbers(*names: str) -> list[tuple[str, type]]:
    return [(name, ctypes.c_int64) for name in names]


class _Layer(ctypes.Structure):
    _fields_ = [
        *_pointers("input_norm", "post_attention_norm", "qkv", "output", "gate_up", "down"),
        ("kv", ctypes.POINTER(KvLayer)),
        ("scale", ctypes.c_float),
        ("window", ctypes.c_int32),
    ]


class _Model(ctypes.Structure):
    _fields_ = [
        *_pointers("layers", "embedding", "norm", "head", "cos", "sin"),
        *_numbers("num_layers", "hidden", "intermediate", "num_heads", "kv_heads", "head_dim"),
        *_numbers("embedding_is_bf16"),
        ("norm_eps", ctypes.c_float),
    ]


class _Batch(ctypes.Structure):
    _fields_ = [
        *_pointers("token_ids", "spans", "block_tables", "tails", "logit_rows"),
        *_pointers("out", "likeliest"),
        *_numbers("rows", "num_spans", "table_width", "num_logits"),
    ]


@dataclass(frozen=True, slots=True)
class LayerOps:
    """A layer's weights; norms are float32 [hidden]."""

    input_norm: Tensor
    post_attention_norm: Tensor
    qkv: NativeLinear
    output: NativeLinear
    gate_up: NativeLinear
    down: NativeLinear
    scope: AttentionScope


@dataclass(frozen=True, slots=True)
class StepModel:
    """A decoder's weights and shape.

    Attributes:
        embedding: float32 or bfloat16 [vocab, hidden].
        norm: float32 [hidden].
        head: hidden -> vocab; ``None`` gives normed rows instead of logits.
        cos, sin: float32 [positions, head_dim / 2].
    """

    layers: Sequence[LayerOps]
    embedding: Tensor
    norm: Tensor
    head: NativeLinear | None
    cos: Tensor
    sin: Tensor
    intermediate: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float


class NativeStep:
    """Runs all layers over a batch. Not thread-safe: it owns the buffers of a step."""

    def __init__(self, library: ctypes.CDLL, model: StepModel) -> None:
        self._library, self._model = library, model
        declare(library)
        for layer in model.layers:
            layer.gate_up.interleave_halves()
        # The structs hold addresses: what they point at must live as long.
        self._alive: list[object] = []
        self._layers = (_Layer * len(model.layers))(*map(self._layer, model.layers))
        self._struct = self._describe(model)
        self._workspace = library.qt_workspace_new()
        self._width = model.embedding.shape[0 if model.head else 1]
        self._pages: KvPages | None = None

    def __del__(self) -> None:
        if workspace := getattr(self, "_workspace", None):
            self._library.qt_workspace_free(workspace)

    def run(self, batch: StepLayout, pages: KvPages) -> Tensor:
        """Logits of ``batch.logit_rows``, float32 [R, vocab], or normed rows without a head.

        Args:
            pages: gain the batch's rows.
        """
        out = torch.empty(len(batch.logit_rows), self._width)
        self._run(batch, pages, out, None)
        return out

    def run_likeliest(self, batch: StepLayout, pages: KvPages) -> tuple[Tensor, Tensor]:
        """The largest logit of each of ``batch.logit_rows``, float32 [R], and its token, int64 [R].

        Of equals the lowest token; NaN if any logit of the row is. The model has a head.
        """
        assert self._model.head is not None
        count = len(batch.logit_rows)
        best, tokens = torch.empty(count), torch.empty(count, dtype=torch.int64)
        self._run(batch, pages, best, tokens)
        return best, tokens

    def _run(
        self, batch: StepLayout, pages: KvPages, out: Tensor, likeliest: Tensor | None
    ) -> None:
        self._use_pages(pages)
        tails = pages.tail_numbers(batch.tails)
        tables = batch.block_tables
        if batch.more:
            tables = torch.stack([tables, *(part.block_tables for part in batch.more)])
        numbers = [n for s in batch.spans for n in (s.start, s.length, s.context_len)]
        spans = (ctypes.c_int64 * len(numbers))(*numbers)
        struct = _Batch(
            batch.token_ids.data_ptr(),
            ctypes.addressof(spans),
            tables.data_ptr(),
            None if tails is None else tails.data_ptr(),
            batch.logit_rows.data_ptr(),
            out.data_ptr(),
            None if likeliest is None else likeliest.data_ptr(),
            len(batch.token_ids),
            len(batch.spans),
            tables.shape[-1],
            len(batch.logit_rows),
        )
        self._library.qt_step(self._struct, struct, self._workspace)

    def ticks(self) -> dict[str, int]:
        """Clock ticks of each phase so far, on one thread."""
        values = (ctypes.c_int64 * len(PHASES))()
        self._library.qt_workspace_ticks(self._workspace, values)
        return dict(zip(PHASES, values, strict=True))

    def _use_pages(self, pages: KvPages) -> None:
        if pages is self._pages:
            return
        for layer, part in zip(self._layers, pages.structs, strict=True):
            layer.kv = ctypes.pointer(part)
        self._pages = pages

    def _keep(self, tensor: Tensor) -> int:
        tensor = tensor.contiguous()
        self._alive.append(tensor)
        return tensor.data_ptr()

    def _keep_norm(self, weight: Tensor) -> int:
        return self._keep(functional.pad(weight.float(), (0, -weight.shape[0] % TILE)))

    def _layer(self, ops: LayerOps) -> _Layer:
        linears = (ops.qkv, ops.output, ops.gate_up, ops.down)
        self._alive += linears
        return _Layer(
            self._keep_norm(ops.input_norm),
            self._keep_norm(ops.post_attention_norm),
            *(linear.handle for linear in linears),
            None,
            ops.scope.scale,
            ops.scope.window or 0,
        )

    def _describe(self, model: StepModel) -> _Model:
        self._alive.append(model.head)
        return _Model(
            ctypes.addressof(self._layers),
            self._keep(model.embedding),
            self._keep_norm(model.norm),
            model.head.handle if model.head else None,
            self._keep(model.cos),
            self._keep(model.sin),
            len(model.layers),
            model.embedding.shape[1],
            model.intermediate,
            model.num_heads,
            model.num_kv_heads,
            model.head_dim,
            model.embedding.dtype == torch.bfloat16,
            model.norm_eps,
        )


def declare(library: ctypes.CDLL) -> None:
    """Argument types of the functions of ``step.h``."""
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    library.qt_workspace_new.restype = pointer
    library.qt_workspace_free.argtypes = (pointer,)
    library.qt_workspace_ticks.argtypes = (pointer, ctypes.POINTER(number))
    library.qt_step.argtypes = (ctypes.POINTER(_Model), ctypes.POINTER(_Batch), pointer)
