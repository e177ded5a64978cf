"""One layer's keys and values into native pages, and attention over them, outside a step."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from qtool.runtime.kernels.backend import AttentionLayout, AttentionScope
from qtool.runtime.kernels.cpu.kv_pages import KvLayer, KvPages


class _Call(ctypes.Structure):
    """``qt_layer_call`` of native/attention.h."""

    _fields_ = (
        ("kv", ctypes.POINTER(KvLayer)),
        *((name, ctypes.c_void_p) for name in ("spans", "tables", "tails")),
        *((name, ctypes.c_void_p) for name in ("queries", "keys", "values", "out")),
        *((name, ctypes.c_int64) for name in ("num_spans", "table_width", "num_heads", "window")),
        *((name, ctypes.c_float) for name in ("scale", "softcap")),
    )


class LayerCall:
    """What the queries of a batch see of a layer's pages, ready to be computed.

    Args:
        q: [T, num_heads, head_dim], rotated.
        rows: keys, rotated, and values [T, num_kv_heads, head_dim], which the pages gain first;
            ``None``: they have them.
        layout: block tables name all that rows may see.
        tails: each sequence's tail page.
    """

    def __init__(
        self,
        pages: KvPages,
        layer: int,
        q: Tensor,
        rows: tuple[Tensor, Tensor] | None,
        layout: AttentionLayout,
        tails: tuple[int, ...],
        scope: AttentionScope,
    ) -> None:
        spans = torch.tensor([(s.start, s.length, s.context_len) for s in layout.spans])
        tables = layout.block_tables.contiguous()
        keys, values = (None, None) if rows is None else (x.float().contiguous() for x in rows)
        self._out = torch.empty(q.shape)
        # The struct holds addresses: what they point at must live as long.
        self._alive = (
            *(spans, tables, pages.tail_numbers(tails), q.float().contiguous()),
            *(keys, values, self._out, pages),
        )
        self._call = _Call(
            ctypes.pointer(pages.structs[layer]),
            *(None if x is None else x.data_ptr() for x in self._alive[:-1]),
            len(spans),
            tables.shape[1],
            q.shape[1],
            scope.window or 0,
            scope.scale,
            scope.softcap or 0.0,
        )

    def run(self, library: ctypes.CDLL) -> Tensor:
        """Float32 [T, num_heads, head_dim], in memory that a second run writes again."""
        library.qt_attend(ctypes.byref(self._call))
        return self._out
