"""For gpu_check.py, attention over the paged cache: is it right, and how fast is a decode step.

Every form of the cache is checked against torch's pools of the same form: a prompt in chunks, then
a step, with the rotation fused. Then one layer of an 8B decoder (32 heads of queries, 8 of keys,
128 channels) over batch and context, with layers in turns so that none stays in the cache. A row's
columns are sequences and tokens of context, its share is of the bandwidth that a copy reaches, and
its speedup is over 16-bit pages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from qtool.runtime.batch import Batch, build_batch
from qtool.runtime.kernels.backend import AttentionScope, Backend, PageForm
from qtool.runtime.kernels.triton.kv_pages import TritonPages
from qtool.runtime.kv_cache import CacheForm, LayerCache
from qtool.runtime.kv_fused import page_form
from qtool.runtime.kv_schemes import SCHEMES, KVScheme
from qtool.runtime.rotary import RotaryRows
from qtool.runtime.sampling_params import SamplingParams
from qtool.runtime.scheduled_step import Chunk
from qtool.runtime.sequence import Sequence

if TYPE_CHECKING:
    from gpu_check import Bench, Row

PAGE = 64
# Both round to 16 bits in places of their own; a wrong page or scale is off by far more.
BOUND = 0.02


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """How much is done.

    Attributes:
        most_tokens: of all sequences together; larger steps are left out.
        turns: bytes of the layers that take turns.
    """

    heads: tuple[int, int]
    head_dim: int
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    chunks: tuple[int, ...]
    most_tokens: int
    turns: int


FULL = AttentionPlan(
    heads=(32, 8),
    head_dim=128,
    batches=(1, 4, 16, 64),
    contexts=(1024, 4096, 32768, 131072),
    chunks=(700, 1300, 41),
    most_tokens=2**21,  # 8 GiB of 16-bit pages
    turns=2**28,
)
SMALL = AttentionPlan((2, 1), 64, (1, 2), (70,), (66, 3), 2**10, 1)


def plan_of(bench: Bench) -> AttentionPlan:
    """The small one runs in the interpreter."""
    return FULL if bench.device.type == "cuda" else SMALL


def attention_checks(bench: Bench) -> Iterator[Row]:
    """Every form against torch's pools, chunk by chunk, then a step of one row."""
    plan = plan_of(bench)
    for name, scheme in SCHEMES.items():
        found, expected = (
            _run_layer(bench, plan, scheme, backend) for backend in (bench.backend, None)
        )
        error = float((found - expected).norm() / expected.norm())
        verdict = "ok" if error < BOUND else f"relative error {error:.2g}, bound {BOUND}"
        shape = (1, sum(plan.chunks) + 1)
        yield bench.row("attention check", name, shape, 1, verdict=verdict)


def _run_layer(
    bench: Bench, plan: AttentionPlan, scheme: KVScheme, backend: Backend | None
) -> Tensor:
    """What the queries of all chunks get, float32."""
    torch.manual_seed(1)
    total = sum(plan.chunks) + 1
    blocks = -(-total // PAGE)
    shape = (2 * blocks, PAGE, plan.heads[1], plan.head_dim)
    form = CacheForm.uniform(scheme, 1)
    cache = LayerCache(form, shape, 1, torch.float16, bench.device, backend)
    sequence = Sequence("s", [0] * total, SamplingParams())
    sequence.block_table = [2 * block for block in reversed(range(blocks))]
    sequence.tail = 0
    scope, outs, start = AttentionScope(plan.head_dim**-0.5), [], 0
    for length in (*plan.chunks, 1):
        batch = build_batch([Chunk(sequence, start, length)], PAGE, bench.device)
        q, keys, values = (
            bench.random(length, heads, plan.head_dim) for heads in (*plan.heads, plan.heads[1])
        )
        angles = torch.rand(length, plan.head_dim // 2, device=bench.device).repeat(1, 2)
        rows = RotaryRows(angles.cos().half(), angles.sin().half())
        outs.append(cache.attend(0, q, keys, values, batch, scope, bench.backend, rows))
        start += length
    return torch.cat(outs).float()


def decode_attention(bench: Bench) -> Iterator[Row]:
    """One layer's attention in a decode step."""
    plan = plan_of(bench)
    for batch_size, context in product(plan.batches, plan.contexts):
        if batch_size * context > plan.most_tokens:
            continue
        wide = 0.0
        for name, scheme in SCHEMES.items():
            form = page_form(scheme)
            assert form is not None
            seconds, num_bytes = _decode_seconds(bench, plan, form, batch_size, context)
            wide = wide or seconds
            label = "16-bit" if name == "wide" else name
            yield bench.row(
                "attention", label, (batch_size, context), batch_size,
                seconds=seconds, of_ceiling=num_bytes / bench.bandwidth / seconds,
                speedup=wide / seconds,
            )  # fmt: skip


def _decode_seconds(
    bench: Bench, plan: AttentionPlan, form: PageForm, batch_size: int, context: int
) -> tuple[float, int]:
    """Seconds of a layer, and the bytes of keys and values that it reads."""
    blocks = batch_size * -(-context // PAGE)
    shape = (blocks, PAGE, plan.heads[1], plan.head_dim)
    tails = None
    if form.has_tails:
        tails = bench.random(batch_size, 2, *shape[1:])
    first = _filled(bench, form, shape, tails)
    num_bytes = sum(pool.nbytes for pool in first.pools)
    copies = min(64, -(-plan.turns // num_bytes)) if bench.device.type == "cuda" else 1
    layers = [first, *(_filled(bench, form, shape, tails) for _ in range(copies - 1))]
    batch = _decode_batch(bench, batch_size, context)
    q = bench.random(batch_size, plan.heads[0], plan.head_dim)
    keys = bench.random(batch_size, plan.heads[1], plan.head_dim)
    group, scope = plan.heads[0] // plan.heads[1], AttentionScope(plan.head_dim**-0.5)

    def call(layer: TritonPages) -> Callable[[], object]:
        tiles = layer.plan(batch, group)
        return lambda: layer.read(q, keys, keys, tiles, scope)

    return bench.seconds([call(layer) for layer in layers]), num_bytes


def _filled(
    bench: Bench, form: PageForm, shape: tuple[int, int, int, int], tails: Tensor | None
) -> TritonPages:
    """Pages of any codes, with grids that keep everything finite."""
    pages = bench.backend.fused_cache(form, shape, tails=tails)
    assert isinstance(pages, TritonPages)
    for pool in (pages.keys, pages.values):
        if pool.words.dtype == torch.int16:
            pool.words.random_(-(2**15), 2**15)
        else:
            pool.words.normal_()
        if pool.grid is not None:
            pool.grid.fill_(2.0**-6)
    return pages


def _decode_batch(bench: Bench, batch_size: int, context: int) -> Batch:
    """A step of sequences of one length, on blocks in random order."""
    each = -(-context // PAGE)
    order = torch.randperm(batch_size * each).tolist()
    chunks = []
    for index in range(batch_size):
        sequence = Sequence(f"s{index}", [0] * context, SamplingParams())
        sequence.block_table = order[index * each : (index + 1) * each]
        sequence.tail = index
        chunks.append(Chunk(sequence, context - 1, 1))
    return build_batch(chunks, PAGE, bench.device)
