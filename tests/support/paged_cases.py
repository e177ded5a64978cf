"""Sequences stored chunk by chunk in a GPU cache's pages, and what their queries must see."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from qtool.runtime.batch import QuerySpan
from qtool.runtime.kernels.backend import AttentionScope, PageForm
from qtool.runtime.kernels.triton.kv_pages import PlanCache, Pool, TritonPages
from qtool.runtime.kernels.triton.launch import Workspace
from qtool.runtime.kernels.triton.target import Target
from qtool.runtime.kv_codes import CodePool
from qtool.runtime.kv_schemes import FP8, FP8_STATIC, INT4, INT8, K8V4, WIDE, KVScheme

CPU = torch.device("cpu")
FORMS: dict[str, tuple[PageForm, KVScheme]] = {
    "wide": (PageForm("wide", "wide"), WIDE),
    "int8": (PageForm("int8", "int8"), INT8),
    "fp8": (PageForm("fp8", "fp8"), FP8),
    "fp8 static": (PageForm("fp8", "fp8", is_static=True), FP8_STATIC),
    "k8v4": (PageForm("int8", "int4"), K8V4),
    "int4": (PageForm("int4", "int4"), INT4),
}


@dataclass(frozen=True)
class Rows:
    """A batch, as the kernels read one."""

    spans: tuple[QuerySpan, ...]
    block_tables: Tensor
    slots: Tensor
    tails: tuple[int, ...]
    is_decode: bool = False


@dataclass
class Case:
    """Sequences of random rows, and a cache that is full of NaN wherever nobody has written.

    Attributes:
        lengths: of the sequences.
        programs: multiprocessors of the GPU, over four; few make few splits.
    """

    form: str
    lengths: tuple[int, ...]
    group: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    page: int = 64
    dtype: torch.dtype = torch.float16
    programs: int = 4
    fixed: int | None = None
    rows: list[list[Tensor]] = field(init=False)
    tables: list[list[int]] = field(init=False)
    pages: TritonPages = field(init=False)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(sum(self.lengths) + self.head_dim)
        heads = (self.group * self.kv_heads, self.kv_heads, self.kv_heads)
        self.rows = [
            [
                torch.randn(length, count, self.head_dim, generator=generator).to(self.dtype)
                for count in heads
            ]
            for length in self.lengths
        ]
        for _, keys, _ in self.rows:
            keys[..., ::13] += 3.0  # channels that are large in every token
        counts = [-(-length // self.page) for length in self.lengths]
        order = torch.randperm(sum(counts) + 3, generator=generator).tolist()
        self.tables = [[order.pop() for _ in range(count)] for count in counts]
        shape = (sum(counts) + 3, self.page, self.kv_heads, self.head_dim)
        form, _ = FORMS[self.form]
        tails = None
        if form.has_tails:
            tails = torch.full((len(self.lengths), 2, *shape[1:]), torch.nan, dtype=self.dtype)
        self.pages = TritonPages(
            form, shape, self.dtype, CPU, Target("sm_90", self.programs), Workspace.on(CPU),
            PlanCache(Target("sm_90", self.programs), self.fixed),
            tails=tails, scales=self.scales,
        )  # fmt: skip
        for pool in self.pages.pools:
            pool.view(torch.uint8).fill_(255)

    @property
    def scales(self) -> tuple[Tensor, Tensor] | None:
        """The checkpoint's, where the form takes those."""
        if not FORMS[self.form][0].is_static:
            return None
        return torch.tensor([0.03125]), torch.linspace(0.01, 0.02, self.kv_heads).unsqueeze(1)

    def batch(self, bounds: Sequence[tuple[int, int]]) -> tuple[Rows, list[Tensor]]:
        """Rows [start, end) of each sequence, those without rows left out; and q, keys, values."""
        spans, slots, tables, tails, parts = [], [], [], [], []
        width = max(map(len, self.tables))
        for index, (start, end) in enumerate(bounds):
            if end == start:
                continue
            table = self.tables[index]
            spans.append(QuerySpan(len(slots), end - start, end))
            slots += [table[p // self.page] * self.page + p % self.page for p in range(start, end)]
            tables.append(table + [0] * (width - len(table)))
            tails.append(index if FORMS[self.form][0].has_tails else -1)
            parts.append([part[start:end] for part in self.rows[index]])
        rows = Rows(tuple(spans), torch.tensor(tables), torch.tensor(slots), tuple(tails))
        return rows, [torch.cat(part) for part in zip(*parts, strict=True)]

    def run(
        self, steps: Sequence[Sequence[tuple[int, int]]], scope: AttentionScope
    ) -> list[Tensor]:
        """What each sequence's queries get, in chunks."""
        found: list[list[Tensor]] = [[] for _ in self.lengths]
        for bounds in steps:
            rows, parts = self.batch(bounds)
            out = self.pages.attend(*parts, None, rows, scope)
            spans = iter(rows.spans)
            for index, (start, end) in enumerate(bounds):
                if end > start:
                    span = next(spans)
                    found[index].append(out[span.start : span.start + span.length])
        return [torch.cat(parts) for parts in found]

    def store(self, bounds: Sequence[tuple[int, int]]) -> None:
        """Write rows that nobody looks at: their attention would take long in the interpreter."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(TritonPages, "read", lambda _, q, *__: q)
            rows, parts = self.batch(bounds)
            self.pages.attend(*parts, None, rows, AttentionScope(1.0))

    def last(self, starts: Sequence[int], scope: AttentionScope) -> list[Tensor]:
        """What queries from ``starts`` on get, in one chunk each; those before are only stored."""
        self.store([(0, start) for start in starts])
        ends = zip(starts, self.lengths, strict=True)
        return self.run([list(ends)], scope)

    def stored(self, index: int) -> tuple[Tensor, Tensor]:
        """A sequence's keys and values as the scheme has them, float64, through torch's pools."""
        _, keys, values = self.rows[index]
        scheme = FORMS[self.form][1]
        kinds = ((keys, scheme.keys), (values, scheme.values))
        if scheme is WIDE:
            return keys.double(), values.double()
        count = -(-len(keys) // self.page)
        shape = (count, self.page, self.kv_heads, self.head_dim)
        decoded = []
        for place, (rows, kind) in enumerate(kinds):
            assert kind is not None
            pool = CodePool(kind, shape, CPU, None if self.scales is None else self.scales[place])
            padded = rows.new_zeros(count * self.page, *rows.shape[1:])
            padded[: len(rows)] = rows
            pool.seal(torch.arange(count), padded.unflatten(0, (count, self.page)))
            decoded.append(pool.read(torch.arange(count)).flatten(0, 1)[: len(rows)].double())
        return decoded[0], decoded[1]

    def expected(self, index: int, scope: AttentionScope, start: int = 0) -> Tensor:
        """Rows from ``start`` on in float64; own pages as they were, where pages are sealed."""
        q, *exact = (part.double() for part in self.rows[index])
        stored = self.stored(index)
        out = torch.empty_like(q)
        for row in range(start, len(q)):
            own = row // self.page * self.page if FORMS[self.form][0].has_tails else row + 1
            first = 0 if scope.window is None else max(0, row - scope.window + 1)
            keys, values = (
                torch.cat((s[:own], e[own:]))[first : row + 1]
                for s, e in zip(stored, exact, strict=True)
            )
            for head in range(q.shape[1]):
                scores = keys[:, head // self.group] @ q[row, head] * scope.scale
                if scope.softcap is not None:
                    scores = scope.softcap * torch.tanh(scores / scope.softcap)
                out[row, head] = torch.softmax(scores, 0) @ values[:, head // self.group]
        return out[start:]


def codes_of(pool: Pool, planes: int) -> Tensor:
    """Words as codes, a plane behind the other: [num_blocks, page, num_kv_heads, head_dim]."""
    words = pool.words.to(torch.int32)
    if planes == 4:
        parts = [(words >> (4 * plane)) & 15 for plane in range(4)]
    else:
        parts = [words & 255, (words >> 8) & 255]
    return torch.cat(parts, dim=-1).to(torch.uint8).transpose(1, 2)


def e4m3_of(pool: Pool) -> Tensor:
    """Bits of e4m3 of FP8 words, uint8 [num_blocks, page, num_kv_heads, head_dim]."""
    words = pool.words.to(torch.int32)
    low = ((words >> 7) & 0x80) | (words & 0x7F)
    high = ((words >> 8) & 0x80) | ((words >> 7) & 0x7F)
    return torch.cat((low, high), dim=-1).to(torch.uint8).transpose(1, 2)
