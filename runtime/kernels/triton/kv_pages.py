"""One layer's pages on a GPU: what they hold, and the launches that write and read them.

Drawn in docs/layouts.md. Heads lie before tokens, so that a page of one head is one run of memory,
and codes in planes of sixteen-bit words along the head, so that unpacking moves nothing between
threads. Grids are words of two float16, because two bytes are not copied asynchronously.
"""

from __future__ import annotations

import math
from copy import copy
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from qtool.runtime.kernels.backend import (
    AttentionScope,
    FusedCache,
    PageCodes,
    PagedBatch,
    PageForm,
)
from qtool.runtime.kernels.triton.attention import paged_attention_kernel
from qtool.runtime.kernels.triton.attention_config import (
    FP8_SHORT,
    PLANES,
    AttentionTiles,
    attention_constants,
    select_attention,
    value_groups,
)
from qtool.runtime.kernels.triton.attention_plan import AttentionPlan
from qtool.runtime.kernels.triton.kv_write import seal_pages_kernel, write_rows_kernel
from qtool.runtime.kernels.triton.launch import Workspace, is_interpreted
from qtool.runtime.kernels.triton.target import Target

# Up to so many rows are written one by one, more of them by the sixteen.
FEW_ROWS = 32


@dataclass(frozen=True, slots=True)
class Pool:
    """Keys, or values.

    Attributes:
        words: int16 [num_blocks, num_kv_heads, page, head_dim / planes], or the compute dtype.
        grid: float16, or ``None``; 8 bits: [num_blocks, num_kv_heads, page], a scale a token;
            4-bit keys: [num_blocks, num_kv_heads, 2, head_dim], scales and minima by channel;
            4-bit values: [num_blocks, num_kv_heads, groups, 2, page], by token.
    """

    words: Tensor
    grid: Tensor | None

    @property
    def grid_words(self) -> Tensor | None:
        """The grid two by two, int32."""
        return None if self.grid is None else self.grid.view(torch.int32)


def make_pool(
    codes: PageCodes,
    shape: tuple[int, int, int, int],
    dtype: torch.dtype,
    device: torch.device,
    *,
    of_keys: bool,
    is_static: bool,
) -> Pool:
    """An empty pool: zeros, because the system hands those out on first touch.

    Args:
        shape: (num_blocks, page, num_kv_heads, head_dim).
    """
    blocks, page, heads, head_dim = shape
    words = torch.zeros(
        blocks, heads, page, head_dim // PLANES[codes],
        dtype=dtype if codes == "wide" else torch.int16, device=device,
    )  # fmt: skip
    if codes == "wide" or is_static:
        return Pool(words, None)
    grid: tuple[int, ...] = (page,)
    if codes == "int4":
        grid = (2, head_dim) if of_keys else (value_groups(head_dim), 2, page)
    return Pool(words, torch.zeros(blocks, heads, *grid, dtype=torch.float16, device=device))


class PlanCache:
    """The plan of the batch that runs: made by its first layer, read by all of them."""

    def __init__(self, target: Target, fixed: int | None = None) -> None:
        self._target, self._fixed = target, fixed
        self._plan: AttentionPlan | None = None

    def plan(self, batch: PagedBatch, group: int, num_kv_heads: int, page: int) -> AttentionPlan:
        """The plan of a batch; groups of layers with block tables of their own share one."""
        known = self._plan
        if known is None or known.batch.spans is not batch.spans or known.page != page:
            known = AttentionPlan(batch, group, num_kv_heads, page, self._target, self._fixed)
        elif known.batch is not batch:
            known = known.over(batch)
        self._plan = known
        return known


class TritonPages(FusedCache):
    """See :class:`FusedCache`.

    Args:
        shape: (num_blocks, page, num_kv_heads, head_dim).
    """

    def __init__(
        self,
        form: PageForm,
        shape: tuple[int, int, int, int],
        dtype: torch.dtype,
        device: torch.device,
        target: Target,
        workspace: Workspace,
        plans: PlanCache,
        *,
        tails: Tensor | None = None,
        scales: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        _, self.page, self.num_kv_heads, self.head_dim = shape
        self.form, self._target, self._workspace, self._plans = form, target, workspace, plans
        self.keys, self.values = (
            make_pool(codes, shape, dtype, device, of_keys=of_keys, is_static=form.is_static)
            for codes, of_keys in ((form.keys, True), (form.values, False))
        )
        self._tails, self._static = tails, self._by_head(scales)
        grids = (self.keys.grid, self.values.grid)
        self.pools = [self.keys.words, self.values.words, *(g for g in grids if g is not None)]

    def beside(self, tails: Tensor | None, scales: tuple[Tensor, Tensor] | None) -> TritonPages:
        other = copy(self)
        other._tails, other._static = tails, self._by_head(scales)
        return other

    def _by_head(self, scales: tuple[Tensor, Tensor] | None) -> Tensor | None:
        """A checkpoint's scales, float32 [2, num_kv_heads]."""
        if scales is None:
            return None
        heads = [scale.flatten().expand(self.num_kv_heads) for scale in scales]
        return torch.stack(heads).contiguous()

    def attend(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        rotary: tuple[Tensor, Tensor] | None,
        batch: PagedBatch,
        scope: AttentionScope,
    ) -> Tensor:
        plan = self.plan(batch, q.shape[1] // self.num_kv_heads)
        q, keys = self.write(q, keys, values, rotary, plan)
        if self.form.has_tails:
            self._seal(keys, values, plan)
        out = self.read(q, keys, values, plan, scope)
        if self._tails is not None and plan.late_rows is not None:
            rows, tails, offsets = plan.late_rows
            for place, part in enumerate((keys, values)):
                self._tails[tails, place, offsets] = part[rows]
        return out

    def plan(self, batch: PagedBatch, group: int) -> AttentionPlan:
        """The batch's tiles, for ``group`` heads of queries to one of keys."""
        return self._plans.plan(batch, group, self.num_kv_heads, self.page)

    def write(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        rotary: tuple[Tensor, Tensor] | None,
        plan: AttentionPlan,
    ) -> tuple[Tensor, Tensor]:
        """Queries and keys rotated, keys only where anyone needs them; rows are stored."""
        tails, rows = self._tails, len(q)
        cos, sin = rotary if rotary is not None else (None, None)
        q_out = q if rotary is None else torch.empty(q.shape, dtype=q.dtype, device=q.device)
        keys_out = keys
        if rotary is not None and tails is not None:
            keys_out = torch.empty(keys.shape, dtype=keys.dtype, device=keys.device)
        size = 1 if rows <= FEW_ROWS else 16
        write_rows_kernel[(-(-rows // size), self.num_kv_heads)](
            q,
            keys,
            values,
            cos,
            sin,
            None if rotary is None else q_out,
            None if keys_out is keys else keys_out,
            plan.batch.slots if tails is None else plan.tail_slots,
            self.keys.words if tails is None else tails,
            self.keys.grid,
            self.values.words,
            self.values.grid,
            self._static,
            q.stride(0),
            keys.stride(0),
            values.stride(0),
            0 if tails is None else tails.stride(0),
            rows,
            ROWS=size,
            GROUP=q.shape[1] // self.num_kv_heads,
            HEADS=triton.next_power_of_2(q.shape[1] // self.num_kv_heads),
            D=self.head_dim,
            ROTARY=0 if cos is None else cos.shape[1],
            PAGE=self.page,
            # Keys and values have the same codes where rows are stored one by one.
            CODES=self.form.keys if tails is None else "wide",
            TO_TAILS=tails is not None,
            num_warps=1,
        )
        return q_out, keys_out

    def _seal(self, keys: Tensor, values: Tensor, plan: AttentionPlan) -> None:
        """Store the pages that are full now."""
        assert self._tails is not None
        tables = plan.batch.block_tables
        seal_pages_kernel[(len(plan.pages), self.num_kv_heads)](
            plan.pages,
            tables,
            keys,
            values,
            self._tails,
            self.keys.words,
            self.keys.grid,
            self.values.words,
            self.values.grid,
            keys.stride(0),
            values.stride(0),
            self._tails.stride(0),
            tables.stride(0),
            D=self.head_dim,
            PAGE=self.page,
            KEYS=self.form.keys,
            VALUE_GROUPS=value_groups(self.head_dim),
            num_warps=4,
        )

    def read(
        self, q: Tensor, keys: Tensor, values: Tensor, plan: AttentionPlan, scope: AttentionScope
    ) -> Tensor:
        """Attention over what is stored; ``keys`` and ``values`` are the batch's own rows.

        Returns:
            [T, num_heads, head_dim], contiguous.
        """
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        group, tables = q.shape[1] // self.num_kv_heads, plan.batch.block_tables
        splits = plan.splits(scope.window)
        tiles = select_attention(self._target, self.form, self.head_dim, self.page, plan.block_m)
        self._reserve(splits.num_shared, tiles)
        tails = self._tails
        interpreted = is_interpreted()
        constants = attention_constants(
            self.form, group, self.head_dim, self.page, scope, q.dtype, tiles,
            asm=self._target.is_nvidia and not interpreted, interpreted=interpreted,
        )  # fmt: skip
        paged_attention_kernel[(len(splits.work), self.num_kv_heads)](
            q,
            self.keys.words,
            self.keys.grid if self.form.keys == "int4" else self.keys.grid_words,
            self.values.words,
            self.values.grid_words,
            self._static,
            None if tails is None else keys,
            None if tails is None else values,
            tails,
            tables,
            plan.tiles,
            splits.tiles,
            splits.work,
            out,
            self._workspace.partials,
            self._workspace.locks,
            q.stride(0),
            keys.stride(0),
            values.stride(0),
            0 if tails is None else tails.stride(0),
            tables.stride(0),
            score_scale(self.form, scope),
            **constants,
            **tiles.options,
        )
        return out

    def _reserve(self, num_shared: int, tiles: AttentionTiles) -> None:
        """Room for partial results; the same for every batch, so that captured graphs stay."""
        size = tiles.block_m * (tiles.value_places + 2)
        places = num_shared * self.num_kv_heads
        self._workspace.grow(places * size, places)


def score_scale(form: PageForm, scope: AttentionScope) -> float:
    """What products of queries and codes are multiplied by: see the kernel."""
    scale = scope.scale * (FP8_SHORT if form.keys == "fp8" else 1.0)
    return scale / scope.softcap if scope.softcap is not None else scale * math.log2(math.e)
