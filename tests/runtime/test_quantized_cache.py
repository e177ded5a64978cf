"""A quantized cache inside a decoder and an engine: what queries see, whatever the company."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from qtool.formats.kv_scales import KvScales
from qtool.runtime.batch import build_batch
from qtool.runtime.engine import Engine
from qtool.runtime.kernels.backend import AttentionScope
from qtool.runtime.kernels.cpu.torch_ops import CpuBackend
from qtool.runtime.kernels.reference import ReferenceBackend
from qtool.runtime.kv_cache import BlockPools, CacheForm, LayerCache
from qtool.runtime.kv_schemes import (
    FP8,
    FP8_STATIC,
    INT4,
    INT8,
    K8V4,
    SCHEMES,
    WIDE,
    KVScheme,
    LayerSchemes,
)
from qtool.runtime.loaded_model import LoadedModel, choose_cache, load_model
from qtool.runtime.native_decoder import NativeDecoder
from qtool.runtime.options import EngineOptions, ModelOptions
from qtool.runtime.outputs import CompletionOutput
from qtool.runtime.request import Request
from qtool.runtime.sampling_params import SamplingParams
from qtool.runtime.scheduled_step import Chunk
from qtool.runtime.sequence import Sequence as Tokens
from qtool.runtime.tokenizer import Tokenizer
from support.alike import requests_alike
from support.caches import ref_stored
from support.native import LEVELS

CPU = torch.device("cpu")
QUANTIZED = [name for name, scheme in SCHEMES.items() if scheme.keys is not None]
# A form in each layer, one of them wide: one table of blocks, pages of 64, two layers with tails.
MIXED = LayerSchemes("mixed", (INT8, WIDE, INT4, K8V4, FP8))
NAN_BYTE, ZERO_BYTE = 255, 0

# Of three sequences: chunks end inside pages, at their ends, and beyond several; then all decode.
STEPS = (
    ((0, 70), (0, 60), (0, 0)),
    ((70, 149), (60, 63), (0, 4)),
    ((149, 150), (63, 64), (4, 5)),
)


def _fill(cache: BlockPools, byte: int) -> None:
    for pool in (*cache.pools, *cache.tails):
        pool.view(torch.uint8).fill_(byte)


def _ids(count: int, seed: int = 0) -> list[int]:
    return torch.randint(384, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def _tokens(ids: Sequence[int], size: int, first: int, tail: int) -> Tokens:
    """On every second block, in falling order."""
    tokens = Tokens(f"s{first}", list(ids), SamplingParams())
    tokens.block_table = [first + 2 * i for i in reversed(range(-(-len(ids) // size)))]
    tokens.tail = tail
    return tokens


def test_the_mixed_form_has_every_scheme() -> None:
    assert set(MIXED.layers) == set(SCHEMES.values())


class TestAttention:
    """Against one row and one head at a time, in float64."""

    HEADS, KV_HEADS, HEAD_DIM = 4, 2, 64

    def _expected(
        self, q: Tensor, keys: Tensor, values: Tensor, scheme: KVScheme, scope: AttentionScope
    ) -> Tensor:
        """Rows [T, ...] of a whole sequence; own pages as they are where there are tails."""
        size, length = scheme.block_size(None), len(q)
        assert scheme.keys is not None and scheme.values is not None
        kinds = ((keys, scheme.keys), (values, scheme.values))
        exact = [rows.double() for rows, _ in kinds]
        padded = [
            torch.nn.functional.pad(rows, (0, 0, 0, 0, 0, -length % size)) for rows, _ in kinds
        ]
        stored = [
            ref_stored(rows.unflatten(0, (-1, size)), kind).flatten(0, 1)[:length]
            for rows, (_, kind) in zip(padded, kinds, strict=True)
        ]
        out = torch.empty(q.shape, dtype=torch.float64)
        for row in range(length):
            own = row // size * size if scheme.has_tails else length
            first = 0 if scope.window is None else max(0, row - scope.window + 1)
            k, v = (
                torch.cat((s[:own], e[own:]))[first : row + 1]
                for s, e in zip(stored, exact, strict=True)
            )
            for head in range(self.HEADS):
                group = head // (self.HEADS // self.KV_HEADS)
                scores = k[:, group] @ q[row, head].double() * scope.scale
                if scope.softcap is not None:
                    scores = scope.softcap * torch.tanh(scores / scope.softcap)
                out[row, head] = torch.softmax(scores, 0) @ v[:, group]
        return out

    @pytest.mark.parametrize("backend_class", [ReferenceBackend, CpuBackend])
    @pytest.mark.parametrize("name", QUANTIZED)
    @pytest.mark.parametrize(
        "scope", [AttentionScope(0.2), AttentionScope(0.2, 50), AttentionScope(0.2, None, 8.0)]
    )
    def test_a_query_sees_what_is_stored_and_its_own_page_as_it_is(
        self, name: str, scope: AttentionScope, backend_class: type[ReferenceBackend | CpuBackend]
    ) -> None:
        scheme = SCHEMES[name]
        size = scheme.block_size(None)
        form, backend = CacheForm.uniform(scheme, 1), backend_class(CPU, torch.float32)
        cache = LayerCache(form, (48, size, 2, 64), 3, torch.float32, CPU)
        _fill(cache, NAN_BYTE)
        lengths = (150, 64, 5)
        generator = torch.Generator().manual_seed(3)
        data = [
            [torch.randn(n, heads, 64, generator=generator) for heads in (4, 2, 2)] for n in lengths
        ]
        sequences = [
            _tokens(range(n), size, 20 * (i // 2) + i % 2, i) for i, n in enumerate(lengths)
        ]
        found: list[list[Tensor]] = [[], [], []]
        for bounds in STEPS:
            chunks = [
                Chunk(sequence, start, end - start)
                for sequence, (start, end) in zip(sequences, bounds, strict=True)
                if end > start
            ]
            batch = build_batch(chunks, size, CPU)
            pieces = [
                [part[c.start : c.start + c.length] for part in data[sequences.index(c.sequence)]]
                for c in chunks
            ]
            rows = [torch.cat(parts) for parts in zip(*pieces, strict=True)]
            out = cache.attend(0, *rows, batch, scope, backend)
            for chunk, span in zip(chunks, batch.spans, strict=True):
                found[sequences.index(chunk.sequence)].append(
                    out[span.start : span.start + span.length]
                )
        for parts, (q, keys, values) in zip(found, data, strict=True):
            expected = self._expected(q, keys, values, scheme, scope)
            torch.testing.assert_close(torch.cat(parts).double(), expected, rtol=1e-4, atol=1e-4)


# What runs a decoder: torch, or native code, a step in one call.
BACKENDS = {
    "reference": {"backend": "reference"},
    **({"native": {"cpu_compute": "fp32"}} if LEVELS else {}),
}


def _load(folder: Path, backend: str, schemes: LayerSchemes) -> LoadedModel:
    options = ModelOptions(device="cpu", dtype="fp32", **BACKENDS[backend])  # type: ignore[arg-type]
    loaded = load_model(folder, options)
    assert isinstance(loaded.decoder, NativeDecoder) == (backend == "native")
    return replace(loaded, decoder=replace(loaded.decoder, kv=CacheForm(schemes)))


@pytest.fixture(
    scope="module",
    params=[(b, name) for b in BACKENDS for name in (*QUANTIZED, MIXED.name)],
    ids=lambda param: ", ".join(param),
)
def model(
    request: pytest.FixtureRequest, tiny_model_folder: Path, model_factory: Callable[..., Path]
) -> LoadedModel:
    backend, name = request.param
    if name == MIXED.name:
        return _load(model_factory(layers=len(MIXED.layers)), backend, MIXED)
    return _load(tiny_model_folder, backend, LayerSchemes.uniform(SCHEMES[name], 2))


def _run(model: LoadedModel, ids: Sequence[int], sizes: Sequence[int], fill: int) -> Tensor:
    """Logits of all tokens, in chunks of ``sizes``, the last of them repeated."""
    decoder = model.decoder
    size = decoder.kv.schemes.block_size(None)
    cache = decoder.new_cache(2 * (len(ids) // size + 2), size)
    _fill(cache, fill)
    tokens, start, remaining, logits = _tokens(ids, size, 1, 0), 0, list(sizes), []
    while start < len(ids):
        length = min(remaining.pop(0) if len(remaining) > 1 else remaining[0], len(ids) - start)
        batch = build_batch([Chunk(tokens, start, length)], size, CPU, [True])
        logits.append(decoder.forward(batch, cache))
        start += length
    return torch.cat(logits)


def test_the_bits_do_not_depend_on_chunks_nor_on_what_the_pool_held(model: LoadedModel) -> None:
    ids = _ids(150)
    whole = _run(model, ids, [150], ZERO_BYTE)
    assert torch.isfinite(whole).all()
    for sizes in ([1], [7], [63, 1, 64, 40], [130, 1], [64]):
        assert torch.equal(_run(model, ids, sizes, NAN_BYTE), whole), sizes


def test_it_differs_from_a_wide_cache_and_not_by_much(model: LoadedModel) -> None:
    backend = "native" if isinstance(model.decoder, NativeDecoder) else "reference"
    wide = _load(model.folder, backend, LayerSchemes.uniform(WIDE, len(model.decoder.layers)))
    ids = _ids(200, seed=1)
    exact, found = (_run(m, ids, [200], ZERO_BYTE) for m in (wide, model))
    error = float((found - exact).norm() / exact.norm())
    most = {"int8": 0.02, "fp8": 0.1, "k8v4": 0.15, "int4": 0.15, "mixed": 0.15}
    assert 1e-4 < error < most[model.decoder.kv.schemes.name]
    if model.decoder.kv.schemes.name in ("k8v4", "int4"):
        assert torch.equal(found[:64], exact[:64])


def _engine(model: LoadedModel, blocks: int, fill: int, **settings: int) -> Engine:
    decoder = model.decoder
    scheme = decoder.kv.schemes
    seqs = settings.get("max_num_seqs", 256)
    tails = seqs * decoder.kv_tail_bytes
    memory = blocks * scheme.block_size(None) * decoder.kv_bytes_per_token + tails
    options = EngineOptions(model="tiny", kv_cache_memory=memory, **settings)  # type: ignore[arg-type]
    engine = Engine(model, Tokenizer.load(model.folder), options)
    _fill(engine._cache, fill)
    return engine


def _requests(count: int) -> list[Request]:
    """Most begin alike and cross pages, a third are samples of the one before."""
    return requests_alike(count, seed=5, prefixes=(0, 70, 130), own=60, samples_every=3, answers=40)


def _collect(engine: Engine, outputs: dict[str, CompletionOutput]) -> None:
    for delta in engine.step():
        outputs.setdefault(delta.request_id, CompletionOutput(0)).extend(delta)


def _drive(engine: Engine, requests: list[Request]) -> dict[str, CompletionOutput]:
    """Arrivals and steps in random order; every fourth request has a twin that is aborted."""
    chance, outputs = random.Random(9), dict[str, CompletionOutput]()
    pending = list(requests)
    while pending or engine.has_work:
        if pending and chance.random() < 0.5:
            request = pending.pop(0)
            engine.add(request)
            if len(pending) % 4 == 0:
                engine.add(Request("twin", request.prompt_token_ids, request.params))
        _collect(engine, outputs)
        if chance.random() < 0.2:
            engine.abort("twin")
            outputs.pop("twin", None)
        elif "twin" in outputs and outputs["twin"].finish_reason is not None:
            outputs.pop("twin")
    outputs.pop("twin", None)
    return outputs


@pytest.mark.usefixtures("expecting_nothing")
def test_in_any_company_a_request_gets_the_bits_of_a_solo_run(model: LoadedModel) -> None:
    requests = _requests(9)
    expected: dict[str, CompletionOutput] = {}
    solo = _engine(model, 64, ZERO_BYTE, max_num_seqs=1)
    for request in requests:
        solo.add(request)
        while solo.has_work:
            _collect(solo, expected)
    blocks = {16: 16, 64: 6}[model.decoder.kv.schemes.block_size(None)]
    for fill in (NAN_BYTE, ZERO_BYTE):
        engine = _engine(model, blocks, fill, max_num_batched_tokens=100, max_num_seqs=5)
        assert _drive(engine, requests) == expected
        stats = engine.stats()
        assert stats.preemptions > 0 and stats.reused_tokens > 100 and stats.blocks_used == 0


def test_forks_in_mid_page_write_what_each_would_alone(model: LoadedModel) -> None:
    ids, params = tuple(_ids(100, seed=4)), SamplingParams(max_tokens=60, ignore_eos=True, seed=1)
    other = SamplingParams(max_tokens=60, ignore_eos=True, seed=2)
    alone: dict[str, CompletionOutput] = {}
    for request in (Request("a", ids, params), Request("b", ids, other)):
        engine = _engine(model, 64, ZERO_BYTE, max_num_seqs=2)
        engine.add(request)
        while engine.has_work:
            _collect(engine, alone)
    engine = _engine(model, 64, NAN_BYTE, max_num_seqs=2, enable_prefix_caching=False)
    engine.add(Request("a", ids, params))
    engine.add(Request("b", ids, other, fork_of="a"))
    together: dict[str, CompletionOutput] = {}
    while engine.has_work:
        _collect(engine, together)
    assert together == alone and together["a"].token_ids != together["b"].token_ids
    assert engine.stats().reused_tokens == 99


def test_a_prefix_hit_is_a_whole_number_of_pages(model: LoadedModel) -> None:
    engine = _engine(model, 64, NAN_BYTE, max_num_seqs=4)
    params, outputs = SamplingParams(max_tokens=1, temperature=0.0), list[list[int]]()
    for name in ("first", "second"):
        engine.add(Request(name, tuple(_ids(150, seed=3)), params))
        found: dict[str, CompletionOutput] = {}
        while engine.has_work:
            _collect(engine, found)
        outputs.append(found[name].token_ids)
    size = model.decoder.kv.schemes.block_size(None)
    assert engine.stats().reused_tokens == 150 // size * size
    assert outputs[0] == outputs[1]


def test_what_is_reported_is_what_is_allocated_and_within_the_budget(model: LoadedModel) -> None:
    decoder, memory = model.decoder, 3 * 10**6
    options = EngineOptions(model="t", kv_cache_memory=memory, max_num_seqs=8)
    engine = Engine(model, Tokenizer.load(model.folder), options)
    info = engine.info
    pools = sum(pool.nbytes for pool in engine._cache.pools)
    tails = sum(tail.nbytes for tail in engine._cache.tails)
    assert pools == info.num_cache_tokens * info.kv_bytes_per_token
    assert tails == info.kv_tail_bytes == 8 * decoder.kv_tail_bytes
    assert pools + tails <= memory
    assert (tails > 0) == decoder.kv.schemes.has_tails


class TestFp8Scales:
    """Static where the checkpoint brings scales for all layers, and said aloud where not."""

    def _choose(self, tiny_model_folder: Path, asked: str, layers: int) -> tuple[CacheForm, str]:
        decoder = load_model(tiny_model_folder, ModelOptions(device="cpu", dtype="fp32")).decoder
        scales = {
            f"model.layers.{i}.self_attn": KvScales(
                torch.tensor([0.5]), torch.full((2, 1, 1), 0.25)
            )
            for i in range(layers)
        }
        form, notes = choose_cache(asked, scales, decoder)
        return form, " ".join(notes)

    def test_scales_of_every_layer_are_used_and_cost_no_bytes(
        self, tiny_model_folder: Path
    ) -> None:
        form, notes = self._choose(tiny_model_folder, "fp8", 2)
        assert set(form.schemes.layers) == {FP8_STATIC} and not notes
        cache = LayerCache(form, (4, 16, 2, 16), 0, torch.float32, CPU)
        rows = torch.full((1, 2, 16), 0.3)
        batch = build_batch([Chunk(_tokens([1], 16, 0, -1), 0, 1)], 16, CPU)
        backend = ReferenceBackend(CPU, torch.float32)
        q = torch.randn(1, 4, 16, generator=torch.Generator().manual_seed(0))
        out = cache.attend(0, q, rows, rows, batch, AttentionScope(1.0), backend)
        # 0.3 / 0.25 = 1.2 lies between 1.125 and 1.25 of e4m3.
        assert torch.equal(out, torch.full_like(out, 1.25 * 0.25))

    @pytest.mark.parametrize("layers", [0, 1])
    def test_without_them_it_is_dynamic_and_says_so(
        self, tiny_model_folder: Path, layers: int
    ) -> None:
        form, notes = self._choose(tiny_model_folder, "fp8", layers)
        assert set(form.schemes.layers) == {SCHEMES["fp8"]}
        assert f"{2 - layers} layers" in notes and "not calibrated" in notes

    def test_scales_that_are_not_asked_for_are_named(self, tiny_model_folder: Path) -> None:
        form, notes = self._choose(tiny_model_folder, "auto", 2)
        assert form.schemes.is_wide and "not used without kv_cache_dtype fp8" in notes
