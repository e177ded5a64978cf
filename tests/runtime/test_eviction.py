"""Heavy-hitter eviction inside a decoder and an engine, against transformers with masks."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoModelForCausalLM

from qtool.errors import EngineError, UsageError
from qtool.runtime.batch import build_batch
from qtool.runtime.engine import Engine
from qtool.runtime.eviction import EvictionRule, eviction_rule
from qtool.runtime.kernels.backend import AttentionScope
from qtool.runtime.kernels.reference import ReferenceBackend
from qtool.runtime.kv_cache import CacheForm, LayerCache
from qtool.runtime.kv_schemes import INT8, SCHEMES, WIDE
from qtool.runtime.llm import LLM
from qtool.runtime.loaded_model import EVICTION_OBSTACLE, LoadedModel, load_model
from qtool.runtime.native_decoder import NativeDecoder
from qtool.runtime.options import EngineOptions, ModelOptions
from qtool.runtime.outputs import CompletionOutput
from qtool.runtime.request import Request
from qtool.runtime.sampling_params import SamplingParams
from qtool.runtime.scheduled_step import Chunk
from qtool.runtime.sequence import Sequence
from qtool.runtime.tokenizer import Tokenizer
from qtool.runtime.window_run import WindowRun
from support.families import FAMILY_VARIANTS, WINDOW
from support.native import LEVELS

CPU = torch.device("cpu")
NAN_BYTE = 255
RULE = EvictionRule(16, 6, 3)


def _ids(count: int, seed: int = 0) -> list[int]:
    return torch.randint(384, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


class TestTheRule:
    """Options to what a sequence keeps."""

    def test_a_budget_is_whole_blocks_half_of_them_the_latest(self) -> None:
        rule = eviction_rule("heavy-hitter", 1039, 16, [None, None], 4096)
        assert rule == EvictionRule(16, 64, 32) and rule.max_tokens == 1024
        assert rule.num_dropped == 7 and "1,024 tokens" in rule.describe()
        assert eviction_rule("off", None, 16, [None], 4096) is None

    def test_a_sliding_window_widens_what_is_recent(self) -> None:
        rule = eviction_rule("heavy-hitter", 640, 16, [512, None], 4096)
        assert rule == EvictionRule(16, 40, 32) and "the last 512" in rule.describe()
        assert eviction_rule("heavy-hitter", 640, 16, [33, None], 4096) == EvictionRule(16, 40, 20)

    @pytest.mark.parametrize(
        ("budget", "block_size", "windows", "message"),
        [
            (47, 16, [None], "kv_budget=47: must be 48 or more"),
            (191, 64, [None], "must be 192 or more: a first block of 64 tokens"),
            (500, 16, [None, 512], "must be 544 or more.*windows reach back 512"),
            (4096, 16, [None], "no sequence here is longer than 4096 tokens"),
            (1024, 16, [512, 512], "no layer of this model sees more than 512 tokens"),
        ],
    )
    def test_budgets_that_leave_no_choice_are_refused(
        self, budget: int, block_size: int, windows: list[int | None], message: str
    ) -> None:
        with pytest.raises(UsageError, match=message):
            eviction_rule("heavy-hitter", budget, block_size, windows, 4096)

    def test_the_first_and_the_latest_stay_and_ties_go_to_the_earliest(self) -> None:
        rule = EvictionRule(16, 12, 3)
        assert rule.num_dropped == 2
        weights = [0, 5, 3, 3, 9, 3, 9, 9, 9, 0, 0, 0]
        assert rule.choose(weights) == [2, 3]
        assert rule.choose([0] * 12) == [1, 2]

    @given(data=st.data(), budget=st.integers(3, 80))
    def test_those_that_go_are_the_lightest_of_those_that_may(
        self, data: st.DataObject, budget: int
    ) -> None:
        rule = EvictionRule(16, budget, data.draw(st.integers(0, budget - 2)))
        weights = data.draw(st.lists(st.integers(0, 9), min_size=budget, max_size=budget))
        gone = rule.choose(weights)
        may = set(range(1, budget - rule.recent))
        assert gone == sorted(set(gone)) and set(gone) <= may and len(gone) == rule.num_dropped
        left = [weights[place] for place in may - set(gone)]
        assert not left or max(weights[place] for place in gone) <= min(left)

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"kv_eviction": "heavy-hitter"}, "needs kv_budget"),
            ({"kv_budget": 512}, "no meaning without kv_eviction"),
            ({"kv_eviction": "h2o"}, "use one of off, heavy-hitter"),
        ],
    )
    def test_half_an_option_is_refused(self, settings: dict[str, object], message: str) -> None:
        with pytest.raises(UsageError, match=message):
            ModelOptions(**settings)  # type: ignore[arg-type]


def _masks(kept: list[list[int]], kind: str) -> Tensor | dict[str, Tensor]:
    """What transformers takes: 0 where row i sees column j, float64 [1, 1, T, T], by layer type."""
    low = torch.finfo(torch.float64).min
    full = torch.full((len(kept), len(kept)), low, dtype=torch.float64)
    for row, columns in enumerate(kept):
        full[row, columns] = 0.0
    if kind == "llama":
        return full[None, None]
    behind = torch.arange(len(kept)).unsqueeze(1) - torch.arange(len(kept))
    sliding = full.masked_fill(behind >= WINDOW, low)
    return {"full_attention": full[None, None], "sliding_attention": sliding[None, None]}


def _evicted_by_hand(
    folder: Path, ids: list[int], rule: EvictionRule, kind: str
) -> tuple[Tensor, int]:
    """Float64 logits of transformers, each row masked to what is kept; and how many blocks are not.

    The whole prefix runs again at every eviction; attention of rows is read from its output.
    """
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, attn_implementation="eager"
    )
    tokens, size = torch.tensor([ids]), rule.block_size
    held, kept, dropped = list[int](), list[list[int]](), 0
    for position in range(len(ids)):
        if len(held) == rule.budget * size:
            with torch.no_grad():
                found = model(
                    tokens[:, :position], attention_mask=_masks(kept, kind), output_attentions=True
                )
            given = torch.stack(found.attentions).sum((0, 1, 2))  # [T, T] over layers and heads
            voters = torch.arange(size - 1, position, size)
            blocks = [held[i : i + size] for i in range(0, len(held), size)]
            weights = [
                float(given[voters[voters >= block[-1]]][:, block].sum(1).mean())
                for block in blocks
            ]
            order = sorted(range(1, rule.budget - rule.recent), key=lambda i: weights[i])
            gone = set(order[: rule.num_dropped])
            held = [p for i, block in enumerate(blocks) if i not in gone for p in block]
            dropped += len(gone)
        held.append(position)
        kept.append(list(held))
    with torch.no_grad():
        return model(tokens, attention_mask=_masks(kept, kind)).logits[0], dropped


@pytest.mark.parametrize("kind", ["llama", "gemma2", "gemma3"])
def test_logits_are_those_of_transformers_with_what_is_evicted_masked(
    kind: str, tiny_model_folder: Path, model_factory: Callable[..., Path]
) -> None:
    """Positions, choice, causality, windows and soft caps at once; no mask is of qtool's making."""
    folder = tiny_model_folder if kind == "llama" else model_factory(**FAMILY_VARIANTS[kind])
    ids, rule = _ids(240, seed=8), EvictionRule(16, 8, 3)
    expected, dropped = _evicted_by_hand(folder, ids, rule, kind)
    options = ModelOptions(device="cpu", dtype="fp32", backend="reference")
    decoder = load_model(folder, options).decoder
    found = WindowRun(decoder, ids, rule).logits(0, 240)
    assert dropped == 7
    torch.testing.assert_close(found.double(), expected, rtol=1e-3, atol=1e-4)
    whole = WindowRun(decoder, ids).logits(0, 240)
    assert torch.equal(found[:128], whole[:128]) and not torch.equal(found[128:], whole[128:])


def test_layers_with_a_window_are_exact_across_holes() -> None:
    """Holes before the recent blocks: distances in slots and in positions agree within 40."""
    generator = torch.Generator().manual_seed(3)
    q, keys, values = (torch.randn(128, heads, 16, generator=generator) for heads in (4, 2, 2))
    scope, backend = AttentionScope(0.25, 40), ReferenceBackend(CPU, torch.float32)
    found = []
    for holes in ([], [1, 2, 3]):
        cache = LayerCache(CacheForm.uniform(WIDE, 1), (8, 16, 2, 16), 0, torch.float32, CPU)
        sequence = Sequence("s", _ids(128), SamplingParams())
        sequence.block_table = list(range(8))
        for start, end in ((0, 128 - 16), (128 - 16, 128)):
            batch = build_batch([Chunk(sequence, start, end - start)], 16, CPU)
            rows = [part[start:end] for part in (q, keys, values)]
            out = cache.attend(0, *rows, batch, scope, backend)
            sequence.block_table = [i for i in range(8) if i not in holes]
            sequence.num_evicted = 16 * len(holes)
        found.append(out)
    torch.testing.assert_close(found[0], found[1], rtol=1e-6, atol=1e-6)


LONG, BUDGET = 500, {16: 96, 64: 256}


@pytest.fixture(scope="module")
def folder(model_factory: Callable[..., Path]) -> Path:
    return model_factory(max_positions=LONG)


@pytest.fixture(scope="module", params=SCHEMES)
def model(request: pytest.FixtureRequest, folder: Path) -> LoadedModel:
    size = SCHEMES[request.param].block_size(None)
    return load_model(folder, _loading(request.param, BUDGET[size]))


def _loading(name: str, budget: int) -> ModelOptions:
    return ModelOptions(
        device="cpu",
        dtype="fp32",
        backend="reference",
        kv_cache_dtype=name,
        kv_eviction="heavy-hitter",
        kv_budget=budget,
    )


def _engine(model: LoadedModel, blocks: int, **settings: int) -> Engine:
    decoder = model.decoder
    size = decoder.kv.schemes.block_size(None)
    tails = settings.get("max_num_seqs", 256) * decoder.kv_tail_bytes
    memory = blocks * size * decoder.kv_bytes_per_token + tails
    loading = _loading(decoder.kv.schemes.name, BUDGET[size])
    options = EngineOptions(model="t", loading=loading, kv_cache_memory=memory, **settings)  # type: ignore[arg-type]
    engine = Engine(model, Tokenizer.load(model.folder), options)
    for pool in (*engine._cache.pools, *engine._cache.tails):
        pool.view(torch.uint8).fill_(NAN_BYTE)
    return engine


def _requests(count: int, size: int) -> list[Request]:
    """Prompts of several lengths, whose answers grow beyond the budget; some are samples."""
    chance, requests = random.Random(7), list[Request]()
    for index in range(count):
        length = (3 * BUDGET[size] // 2, BUDGET[size] // 3, BUDGET[size] - 20)[index % 3]
        prompt, fork_of = [chance.randrange(384) for _ in range(length + index)], None
        if index == 3:
            prompt, fork_of = list(requests[-1].prompt_token_ids), requests[-1].request_id
        params = SamplingParams(
            temperature=chance.choice([0.0, 1.0]),
            seed=index,
            logprobs=2,
            max_tokens=chance.randrange(60, 80),
            ignore_eos=True,
        )
        # The first runs last: others take its blocks when some of them are evicted already.
        late = int(index == 0)
        requests.append(Request(f"r{index}", tuple(prompt), params, late, fork_of=fork_of))
    return requests


def _collect(engine: Engine, outputs: dict[str, CompletionOutput]) -> None:
    for delta in engine.step():
        outputs.setdefault(delta.request_id, CompletionOutput(0)).extend(delta)
    engine.check_integrity()


@pytest.mark.usefixtures("expecting_nothing")
def test_what_is_evicted_depends_on_a_sequence_alone(model: LoadedModel) -> None:
    """To the bit, beside others, in other chunks, after preemptions, in a pool full of NaN."""
    size = model.decoder.kv.schemes.block_size(None)
    requests, expected = _requests(5, size), dict[str, CompletionOutput]()
    solo = _engine(model, BUDGET[size] // size, max_num_seqs=1)
    for request in requests:
        solo.add(request)
        while solo.has_work:
            _collect(solo, expected)
    evicted = solo.stats().evicted_blocks
    blocks = 3 * BUDGET[size] // size // 2
    engine = _engine(model, blocks, max_num_batched_tokens=40, max_num_seqs=4)
    chance, pending, outputs = random.Random(2), list(requests), dict[str, CompletionOutput]()
    while pending or engine.has_work:
        begun = engine.stats().evicted_blocks > 0 or len(pending) == len(requests)
        if pending and begun and chance.random() < 0.3:
            engine.add(pending.pop(0))
        _collect(engine, outputs)
    assert outputs == expected
    stats = engine.stats()
    assert stats.preemptions > 0 and stats.evicted_blocks > evicted > 5
    assert stats.blocks_used == stats.reused_tokens == 0


def test_a_sequence_longer_than_the_whole_cache_runs_in_its_budget(model: LoadedModel) -> None:
    size = model.decoder.kv.schemes.block_size(None)
    engine, most = _engine(model, BUDGET[size] // size, max_num_seqs=1), 0
    params = SamplingParams(max_tokens=100, ignore_eos=True, temperature=0.0)
    engine.add(Request("long", tuple(_ids(LONG - 100)), params))
    outputs: dict[str, CompletionOutput] = {}
    while engine.has_work:
        _collect(engine, outputs)
        most = max(most, engine.stats().blocks_used)
    assert len(outputs["long"].token_ids) == 100 and most == BUDGET[size] // size
    assert engine.info.num_cache_tokens == BUDGET[size] == engine.info.kv_budget
    assert engine.info.num_full_sequences == 1 and not engine.info.prefix_caching
    assert not any("no sequence reaches" in note for note in engine.info.notes)
    assert "heavy-hitter" in engine.info.kv_eviction


def test_a_cache_smaller_than_the_budget_is_refused(model: LoadedModel) -> None:
    size = model.decoder.kv.schemes.block_size(None)
    with pytest.raises(EngineError, match="lower the budget, or give the cache more memory"):
        _engine(model, BUDGET[size] // size - 1, max_num_seqs=1)


@pytest.mark.skipif(not LEVELS, reason="no native code here")
def test_the_native_step_makes_room_for_it_and_the_plan_says_so(folder: Path) -> None:
    plain = ModelOptions(device="cpu", batch_invariant=True)
    evicting = replace(plain, kv_eviction="heavy-hitter", kv_budget=96)
    assert isinstance(load_model(folder, plain).decoder, NativeDecoder)
    loaded = load_model(folder, evicting)
    assert not isinstance(loaded.decoder, NativeDecoder)
    assert any(EVICTION_OBSTACLE in note for note in loaded.notes)
    with pytest.raises(EngineError, match="--strict.*heavy-hitter eviction"):
        load_model(folder, replace(evicting, strict=True))
    options = EngineOptions(model="t", loading=evicting, kv_cache_memory=10**6)
    plan = Engine(loaded, Tokenizer.load(folder), options).info
    (attention,) = (part for part in plan.parts if part.part == "attention")
    assert "torch" in attention.kernel and "native call" in attention.why


def test_llm_and_its_counters_know_it(folder: Path) -> None:
    params = SamplingParams(max_tokens=60, ignore_eos=True, temperature=0.0)
    with LLM(
        str(folder), device="cpu", backend="reference", kv_eviction="heavy-hitter", kv_budget=96
    ) as llm:
        (result,) = llm.generate([_ids(100)], params, progress=False)
        assert len(result.outputs[0].token_ids) == 60 and llm.info.kv_budget == 96
        assert llm.stats().evicted_blocks == 4


def test_below_the_budget_nothing_changes(folder: Path) -> None:
    ids, outputs = tuple(_ids(60)), list[CompletionOutput]()
    params = SamplingParams(max_tokens=30, ignore_eos=True, temperature=0.0)
    evicting = _loading("int8", 96)
    for loading in (evicting, replace(evicting, kv_eviction="off", kv_budget=None)):
        loaded = load_model(folder, loading)
        assert set(loaded.decoder.kv.schemes.layers) == {INT8}
        options = EngineOptions(model="t", loading=loading, kv_cache_memory=10**6)
        engine = Engine(loaded, Tokenizer.load(folder), options)
        engine.add(Request("a", ids, params))
        found: dict[str, CompletionOutput] = {}
        while engine.has_work:
            _collect(engine, found)
        outputs.append(found["a"])
        assert engine.stats().evicted_blocks == 0
    assert outputs[0] == outputs[1]
