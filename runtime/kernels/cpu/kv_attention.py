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
        ("scale", ctypes.c_float),
    )


def attend(
    library: ctypes.CDLL,
    pages: KvPages,
    layer: int,
    q: Tensor,
    rows: tuple[Tensor, Tensor] | None,
    layout: AttentionLayout,
    tails: tuple[int, ...],
    scope: AttentionScope,
) -> Tensor:
    """What queries see of a layer's pages.

    Args:
        q: [T, num_heads, head_dim], rotated.
        rows: keys, rotated, and values [T, num_kv_heads, head_dim], which the pages gain first;
            ``None``: they have them.
        layout: block tables are of all that rows may see.
        tails: each sequence's tail page.
        scope: without a soft cap.

    Returns:
        float32 [T, num_heads, head_dim].
    """
    assert scope.softcap is None
    q, out = q.float().contiguous(), torch.empty(q.shape)
    keys, values = (None, None) if rows is None else (x.float().contiguous() for x in rows)
    spans = torch.tensor([(s.start, s.length, s.context_len) for s in layout.spans])
    tables, numbers = layout.block_tables.contiguous(), pages.tail_numbers(tails)
    tensors = (spans, tables, numbers, q, keys, values, out)
    call = _Call(
        ctypes.pointer(pages.structs[layer]),
        *(None if tensor is None else tensor.data_ptr() for tensor in tensors),
        len(spans),
        tables.shape[1],
        q.shape[1],
        scope.window or 0,
        scope.scale,
    )
    library.qt_attend(ctypes.byref(call))
    return out
