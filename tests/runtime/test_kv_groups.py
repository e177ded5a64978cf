"""Layers that see equally far share block tables: which do, and that no token tells."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qtool.errors import RequestError
from qtool.runtime import engine as engine_module
from qtool.runtime.engine import Engine
from qtool.runtime.kv_groups import (
    LEAST_SAVED,
    MAX_GROUPS,
    LayerGroups,
    choose_groups,
    first_seen,
    group_layers,
    longest_table,
    most_held,
)
from qtool.runtime.kv_schemes import INT4, INT8, LayerSchemes
from qtool.runtime.loaded_model import LoadedModel, load_model
from qtool.runtime.options import EngineOptions, ModelOptions
from qtool.runtime.outputs import CompletionOutput
from qtool.runtime.request import Request
from qtool.runtime.sampling_params import SamplingParams
from qtool.runtime.sequence import FORGOTTEN, SequenceStatus
from qtool.runtime.tokenizer import Tokenizer
from support.alike import requests_alike
from support.families import GEMMA, QWEN_WINDOW, WINDOW
from support.native import LEVELS

GEMMA3_270M = [512, 512, 512, 512, 512, None] * 3
NAN_BYTE, ZERO_BYTE = 255, 0

Windows = st.lists(st.sampled_from([None, None, 8, 40, 200]), min_size=1, max_size=40)


class TestGroups:
    """What goes into which group."""

    def test_gemma3_has_one_full_group_and_five_with_the_window(self) -> None:
        groups = group_layers(GEMMA3_270M, 16, 8192)
        assert groups.windows == (None, 512, 512, 512, 512, 512) and groups.depth == 3
        assert [groups.places[layer] for layer in (5, 11, 17)] == [(0, 0), (0, 1), (0, 2)]
        # 512 blocks of everything, and 33 of each window, instead of 512 of six times as many.
        assert groups.blocks(8192, 16) == 512 + 5 * 33

    @pytest.mark.parametrize(
        ("windows", "longest"),
        [
            ([None] * 4, 8192),
            ([4096] * 4, 8192),
            (GEMMA3_270M, 512),
            ([None] * 40 + [16], 100_000),
        ],
    )
    def test_one_group_where_more_would_give_nothing_back(
        self, windows: list[int | None], longest: int
    ) -> None:
        assert group_layers(windows, 16, longest) == LayerGroups.single(windows)

    @settings(max_examples=200, derandomize=True, database=None, deadline=None)
    @given(windows=Windows, longest=st.integers(1, 5000), block_size=st.sampled_from([1, 16, 64]))
    def test_each_layer_has_a_place_of_its_own_in_a_group_of_its_window(
        self, windows: list[int | None], longest: int, block_size: int
    ) -> None:
        groups = group_layers(windows, block_size, longest)
        assert len(set(groups.places)) == len(windows) and len(groups.windows) <= MAX_GROUPS
        for window, (group, place) in zip(windows, groups.places, strict=True):
            assert place < groups.depth
            seen = groups.windows[group]
            assert seen is None or (window is not None and seen >= window)
        firsts = groups.first_of_place()
        assert [groups.places[layer][1] for layer in firsts] == list(range(groups.depth))
        single = LayerGroups.single(windows)
        taken, before = (g.depth * g.blocks(longest, block_size) for g in (groups, single))
        assert taken <= (1 - LEAST_SAVED) * before or groups == single

    def test_eviction_and_mixed_forms_keep_one_group_and_say_why(self) -> None:
        uniform = LayerSchemes.uniform(INT8, 18)
        mixed = LayerSchemes("plan", (INT8,) * 9 + (INT4,) * 9)
        for schemes, evicts, why in ((uniform, True, "eviction"), (mixed, False, "forms")):
            groups = choose_groups(GEMMA3_270M, schemes, 64, 8192, evicts=evicts)
            assert groups.windows == (None,) and why in groups.obstacle
        assert not choose_groups(GEMMA3_270M, uniform, 16, 8192, evicts=False).obstacle
        assert not choose_groups([None] * 18, mixed, 64, 8192, evicts=False).obstacle

    @settings(max_examples=300, derandomize=True, database=None, deadline=None)
    @given(
        window=st.integers(1, 50),
        chunk=st.integers(1, 50),
        size=st.integers(1, 20),
        position=st.integers(0, 200),
    )
    def test_no_chunk_holds_more_than_the_bound_and_one_somewhere_holds_as_many(
        self, window: int, chunk: int, size: int, position: int
    ) -> None:
        def held(start: int) -> int:
            return -(-(start + chunk) // size) - first_seen(start, window, size)

        bound = most_held(window, chunk, size)
        assert held(position) <= bound
        assert max(held(start) for start in range(200, 200 + size)) == bound

    @given(bounds=st.lists(st.integers(1, 9), min_size=1, max_size=5), blocks=st.integers(1, 40))
    def test_the_longest_table_is_the_last_that_fits(self, bounds: list[int], blocks: int) -> None:
        longest = longest_table(bounds, blocks)
        if sum(bounds) <= blocks:
            assert longest > 10**9
            return
        taken = [sum(min(length, bound) for bound in bounds) for length in (longest, longest + 1)]
        assert taken[0] <= blocks < taken[1]


# Families with both kinds of layers, one of which runs as one native call a step.
GEMMA3: dict[str, Any] = {
    "model_type": "gemma3_text",
    **GEMMA,
    "layers": 7,
    "layer_types": ["sliding_attention", "full_attention"] + ["sliding_attention"] * 5,
}
QWEN2: dict[str, Any] = {"model_type": "qwen2", "layers": 4, **QWEN_WINDOW}
FORMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "torch": (GEMMA3, {"dtype": "fp32", "backend": "reference"}),
    "torch, int8": (GEMMA3, {"dtype": "fp32", "backend": "reference", "kv_cache_dtype": "int8"}),
    "torch, int4": (QWEN2, {"dtype": "fp32", "backend": "reference", "kv_cache_dtype": "int4"}),
    "native layers": (GEMMA3, {"dtype": "bf16", "batch_invariant": True}),
    "native layers, int4": (
        GEMMA3,
        {"dtype": "bf16", "batch_invariant": True, "kv_cache_dtype": "int4"},
    ),
    "native step": (QWEN2, {"dtype": "bf16", "batch_invariant": True, "kv_cache_dtype": "int8"}),
}


@pytest.fixture(scope="module", params=FORMS)
def model(request: pytest.FixtureRequest, model_factory: Callable[..., Path]) -> LoadedModel:
    shape, options = FORMS[request.param]
    if "batch_invariant" in options and not LEVELS:
        pytest.skip("no native code here")
    folder = model_factory(max_positions=512, **shape)
    return load_model(folder, ModelOptions(device="cpu", **options))


def _engine(model: LoadedModel, blocks: int, fill: int, **settings: Any) -> Engine:
    decoder = model.decoder
    size = decoder.kv.schemes.block_size(None)
    groups = group_layers(decoder.config.windows, size, model.max_model_len)
    tails = settings.get("max_num_seqs", 256) * decoder.kv_tail_bytes
    memory = blocks * size * groups.slot_bytes(decoder.kv_bytes_per_token) + tails
    options = EngineOptions(model="tiny", kv_cache_memory=memory, **settings)
    engine = Engine(model, Tokenizer.load(model.folder), options)
    for pool in (*engine._cache.pools, *engine._cache.tails):
        pool.view(torch.uint8).fill_(fill)
    return engine


@pytest.fixture
def one_table(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Makes engines from now on keep everything, in one table for all layers."""

    def undo(windows: list[int | None], *_: object, **__: object) -> LayerGroups:
        return LayerGroups.single(windows)

    return lambda: monkeypatch.setattr(engine_module, "choose_groups", undo)


def _poison(engine: Engine) -> None:
    """Blocks that nobody owns and nobody can find hold NaN from now on."""
    blank = list(engine._blocks._refs._blank)
    for pool in engine._cache.pools:
        pool.view(torch.uint8)[blank] = NAN_BYTE


def _run(engine: Engine, outputs: dict[str, CompletionOutput]) -> None:
    for delta in engine.step():
        outputs.setdefault(delta.request_id, CompletionOutput(0)).extend(delta)
    engine.check_integrity()
    _poison(engine)


def _requests(count: int) -> list[Request]:
    """Most begin alike and leave the window, a third are samples of the one before."""
    return requests_alike(count, seed=5, prefixes=(0, 70, 130), own=60, samples_every=3, answers=90)


def _drive(engine: Engine, requests: list[Request]) -> dict[str, CompletionOutput]:
    """Arrivals, steps and twins that are aborted, in random order."""
    chance, outputs = random.Random(9), dict[str, CompletionOutput]()
    pending, twins = list(requests), list[str]()
    while pending or engine.has_work:
        if pending and chance.random() < 0.5:
            request = pending.pop(0)
            twins.append(f"x{request.request_id}")
            engine.add(request)
            engine.add(Request(twins[-1], request.prompt_token_ids, request.params))
        _run(engine, outputs)
        if twins and chance.random() < 0.3:
            engine.abort(twins.pop(0))
    return {name: output for name, output in outputs.items() if not name.startswith("x")}


def _solo(engine: Engine, requests: list[Request]) -> dict[str, CompletionOutput]:
    outputs: dict[str, CompletionOutput] = {}
    for request in requests:
        engine.add(request)
        while engine.has_work:
            _run(engine, outputs)
    return outputs


@pytest.mark.usefixtures("expecting_nothing")
def test_tokens_are_those_of_one_table_that_keeps_everything(
    model: LoadedModel, one_table: Callable[[], None]
) -> None:
    requests = _requests(7)
    # What the longest takes alone, and a bit: several preempt one another.
    size = model.decoder.kv.schemes.block_size(None)
    groups = group_layers(model.decoder.config.windows, size, model.max_model_len)
    blocks = int(1.2 * groups.blocks(280, size, 100))
    engines = [
        _engine(
            model,
            blocks,
            fill,
            max_num_batched_tokens=chunk,
            max_num_seqs=5,
            enable_prefix_caching=remembers,
        )
        for fill, chunk, remembers in ((NAN_BYTE, 100, True), (ZERO_BYTE, 37, False))
    ]
    assert all(len(engine._blocks._windows) > 1 for engine in engines)
    one_table()
    keeper = _engine(model, 400, ZERO_BYTE, max_num_seqs=1, enable_prefix_caching=False)
    expected = _solo(keeper, requests)
    for engine in engines:
        assert _drive(engine, requests) == expected
        stats = engine.stats()
        assert stats.preemptions > 0 and stats.blocks_used == 0
    assert engines[0].stats().reused_tokens > 100


def test_blocks_of_the_window_are_given_back_while_a_sequence_runs(model: LoadedModel) -> None:
    size = model.decoder.kv.schemes.block_size(None)
    engine = _engine(model, 100, NAN_BYTE, max_num_batched_tokens=48, max_num_seqs=2)
    params = SamplingParams(max_tokens=300, temperature=0.0, ignore_eos=True)
    engine.add(Request("long", tuple(_requests(1)[0].prompt_token_ids), params))
    (sequence,) = engine._scheduler._sequences.values()
    outputs: dict[str, CompletionOutput] = {}
    windows = engine._blocks._windows
    while engine.has_work:
        _run(engine, outputs)
        if sequence.status is SequenceStatus.FINISHED:
            break
        held = [len(table) - table.count(FORGOTTEN) for table in sequence.tables]
        assert engine.stats().blocks_used == sum(held)
        for window, count in zip(windows, held, strict=True):
            full = -(-sequence.num_computed // size)
            # Between steps a sequence holds what its next token sees, and no chunk.
            assert count == full if window is None else count <= most_held(WINDOW, 1, size)
    assert len(outputs["long"].token_ids) == 300 and windows[-1] == WINDOW


def test_a_prefix_is_found_only_as_far_as_its_window_is_still_known(model: LoadedModel) -> None:
    size = model.decoder.kv.schemes.block_size(None)
    engine = _engine(model, 120, NAN_BYTE, max_num_batched_tokens=512, max_num_seqs=2)
    chance = random.Random(1)
    ids = tuple(chance.randrange(384) for _ in range(4 * size + 5))
    params = SamplingParams(max_tokens=4, temperature=0.0, logprobs=2, ignore_eos=True)

    def reused(name: str) -> tuple[int, CompletionOutput]:
        before, outputs = engine.stats().reused_tokens, dict[str, CompletionOutput]()
        engine.add(Request(name, ids, params))
        while engine.has_work:
            _run(engine, outputs)
        return engine.stats().reused_tokens - before, outputs[name]

    none, first = reused("first")
    everything, second = reused("second")
    assert (none, everything) == (0, 4 * size) and first == second
    # A group with a window forgets its last full block: what is left are the blocks before it,
    # as the chunk was larger than the window and all of them became known.
    prefixes = engine._blocks._prefixes
    assert prefixes is not None
    (lost,) = [block for (group, _), (block, *_) in list(prefixes._known.items()) if group == 1][
        3:4
    ]
    del engine._blocks._refs._idle[lost]
    prefixes.drop(lost)
    engine._blocks._refs._blank.append(lost)
    shorter, third = reused("third")
    assert shorter == 3 * size and third == first


def test_where_all_layers_slide_a_sequence_may_be_longer_than_the_cache(
    model_factory: Callable[..., Path],
) -> None:
    folder = model_factory(model_type="mistral", sliding_window=WINDOW, max_positions=512)
    model = load_model(folder, ModelOptions(device="cpu", dtype="fp32", backend="reference"))
    params = SamplingParams(max_tokens=40, temperature=0.0, logprobs=2, ignore_eos=True)
    request = Request("long", tuple(i % 384 for i in range(300)), params)
    small = _engine(model, 8, NAN_BYTE, max_num_batched_tokens=64, max_num_seqs=1)
    large = _engine(model, 40, NAN_BYTE, max_num_batched_tokens=512, max_num_seqs=4)
    assert small.info.num_blocks == 7 and not small.info.notes and not small.info.kv_groups
    assert _solo(small, [request]) == _solo(large, [request])
    # 24 tokens and a chunk of 64 lie in 7 blocks at most.
    tight = _engine(model, 6, NAN_BYTE, max_num_batched_tokens=64, max_num_seqs=1)
    assert "holds 96 tokens" in tight.info.notes[0]
    with pytest.raises(RequestError, match="takes 7 blocks of 16, the whole cache has 6"):
        tight.add(request)
