"""The engine on a real tiny decoder: the same tokens in any company, exact ends, nothing leaks."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from qtool.errors import EngineError, RequestError
from qtool.runtime.engine import Engine
from qtool.runtime.loaded_model import LoadedModel, load_model
from qtool.runtime.options import EngineOptions, ModelOptions
from qtool.runtime.outputs import CompletionOutput, OutputDelta
from qtool.runtime.request import Request
from qtool.runtime.sampling_params import SamplingParams
from qtool.runtime.tokenizer import Tokenizer

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tiny_model_folder: Path) -> LoadedModel:
    options = ModelOptions(device="cpu", dtype="fp32", backend="reference")
    return load_model(tiny_model_folder, options)


@pytest.fixture(scope="module")
def tokenizer(tiny_model_folder: Path) -> Tokenizer:
    return Tokenizer.load(tiny_model_folder)


@pytest.fixture
def make_engine(model: LoadedModel, tokenizer: Tokenizer) -> Callable[..., Engine]:
    def make(*, blocks: int = 64, **settings: int) -> Engine:
        memory = blocks * 16 * model.decoder.config.kv_bytes_per_token(4)
        options = EngineOptions(model="tiny", kv_cache_memory=memory, **settings)  # type: ignore[arg-type]
        engine = Engine(model, tokenizer, options)
        assert engine.info.num_blocks == min(blocks, 16 * options.max_num_seqs)
        return engine

    return make


def _prompt(index: int, length: int | None = None) -> tuple[int, ...]:
    chance = random.Random(index)
    return tuple(chance.randrange(384) for _ in range(length or chance.randrange(1, 60)))


def _drain(engine: Engine) -> dict[str, CompletionOutput]:
    outputs: dict[str, CompletionOutput] = {}
    for _ in range(10_000):
        if not engine.has_work:
            return outputs
        for delta in engine.step():
            outputs.setdefault(delta.request_id, CompletionOutput(0)).extend(delta)
        engine.check_integrity()
    raise AssertionError("the engine did not finish")


def _solo(engine: Engine, prompt: tuple[int, ...], params: SamplingParams) -> CompletionOutput:
    engine.add(Request("solo", prompt, params))
    return _drain(engine)["solo"]


def test_greedy_tokens_equal_transformers(
    tiny_model_folder: Path, make_engine: Callable[..., Engine]
) -> None:
    reference = AutoModelForCausalLM.from_pretrained(tiny_model_folder, dtype=torch.float32)
    prompt = _prompt(3, 30)
    expected = reference.generate(
        torch.tensor([prompt]),
        max_new_tokens=12,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    assert _solo(make_engine(), prompt, GREEDY).token_ids == expected[0, 30:].tolist()


def _make_requests() -> list[Request]:
    seeded = [
        SamplingParams(temperature=1.0, top_p=0.9, seed=i, max_tokens=12, ignore_eos=True)
        for i in range(8)
    ]
    return [Request(f"g{i}", _prompt(i), GREEDY) for i in range(8)] + [
        Request(f"s{i}", _prompt(i + 20), params) for i, params in enumerate(seeded)
    ]


REQUESTS = _make_requests()


class TestTheSameTokensInAnyCompany:
    """Greedy and seeded requests: alone is the truth, everything else must equal it."""

    @pytest.fixture
    def alone(self, make_engine: Callable[..., Engine]) -> dict[str, list[int]]:
        engine = make_engine()
        return {
            r.request_id: _solo(engine, r.prompt_token_ids, r.params).token_ids for r in REQUESTS
        }

    def _run(self, engine: Engine) -> dict[str, list[int]]:
        for request in REQUESTS:
            engine.add(request)
        return {name: output.token_ids for name, output in _drain(engine).items()}

    def test_in_a_batch_of_16(
        self,
        alone: dict[str, list[int]],
        make_engine: Callable[..., Engine],
    ) -> None:
        engine = make_engine(blocks=256)
        assert self._run(engine) == alone
        assert engine.stats().blocks_used == 0

    @pytest.mark.parametrize("budget", [1, 3, 16, 33])
    def test_with_prompts_chunked_at_any_size(
        self,
        alone: dict[str, list[int]],
        make_engine: Callable[..., Engine],
        budget: int,
    ) -> None:
        seats = min(budget, 16)
        engine = make_engine(blocks=256, max_num_batched_tokens=budget, max_num_seqs=seats)
        assert self._run(engine) == alone

    @pytest.mark.usefixtures("expecting_nothing")
    def test_with_preemption(
        self,
        alone: dict[str, list[int]],
        make_engine: Callable[..., Engine],
    ) -> None:
        engine = make_engine(blocks=9, max_num_batched_tokens=64, max_num_seqs=16)
        assert self._run(engine) == alone
        assert engine.stats().preemptions > 0

    def test_with_others_aborted_around_them(
        self,
        alone: dict[str, list[int]],
        make_engine: Callable[..., Engine],
    ) -> None:
        chance = random.Random(0)
        engine = make_engine(blocks=40, max_num_batched_tokens=40, max_num_seqs=16)
        pending, outputs, extra = list(REQUESTS), {}, itertools.count()
        strangers: list[str] = []
        while pending or engine.has_work:
            if pending:
                engine.add(pending.pop())
                stranger = f"x{next(extra)}"
                engine.add(Request(stranger, _prompt(next(extra) + 100), GREEDY))
                strangers.append(stranger)
            for delta in engine.step():
                outputs.setdefault(delta.request_id, CompletionOutput(0)).extend(delta)
            if strangers and chance.random() < 0.7:
                engine.abort(strangers.pop(chance.randrange(len(strangers))))
                engine.check_integrity()
        assert {name: outputs[name].token_ids for name in alone} == alone
        assert engine.stats().blocks_used == 0

    def test_with_prefixes_that_others_have_computed(
        self,
        alone: dict[str, list[int]],
        make_engine: Callable[..., Engine],
    ) -> None:
        engine = make_engine(blocks=256)
        assert self._run(engine) == alone
        computed = engine.stats().prompt_tokens
        assert self._run(engine) == alone
        stats = engine.stats()
        assert stats.prompt_tokens - computed < computed / 2
        assert stats.reused_tokens + stats.prompt_tokens == 2 * computed
        assert stats.blocks_used == 0 and stats.blocks_known > 0

    def test_without_a_prefix_cache(
        self,
        alone: dict[str, list[int]],
        make_engine: Callable[..., Engine],
    ) -> None:
        engine = make_engine(blocks=256, enable_prefix_caching=False)
        assert self._run(engine) == self._run(engine) == alone
        assert (engine.stats().reused_tokens, engine.stats().blocks_known) == (0, 0)

    def test_as_samples_of_one_prompt(self, make_engine: Callable[..., Engine]) -> None:
        prompt = _prompt(3, 50)
        seeds = [
            SamplingParams(temperature=1.0, seed=i, max_tokens=12, ignore_eos=True)
            for i in range(4)
        ]
        engine = make_engine(enable_prefix_caching=False)
        expected = [_solo(engine, prompt, params).token_ids for params in seeds]
        computed = engine.stats().prompt_tokens
        for index, params in enumerate(seeds):
            engine.add(Request(f"s{index}", prompt, params, fork_of="s0" if index else None))
        outputs = _drain(engine)
        assert [outputs[f"s{index}"].token_ids for index in range(4)] == expected
        assert engine.stats().prompt_tokens - computed == 50 + 3
        assert engine.stats().reused_tokens == 3 * 49

    @pytest.mark.parametrize("fork_of", ["gone", "never was"])
    def test_as_a_fork_of_one_that_has_ended(
        self, make_engine: Callable[..., Engine], fork_of: str
    ) -> None:
        engine, prompt = make_engine(), _prompt(3, 20)
        expected = _solo(engine, prompt, GREEDY).token_ids
        engine.add(Request("gone", prompt, GREEDY))
        engine.abort("gone")
        engine.add(Request("late", prompt, GREEDY, fork_of=fork_of))
        assert _drain(engine)["late"].token_ids == expected


class TestDeadlines:
    def test_a_request_whose_time_has_passed_ends_with_what_it_has(
        self, model: LoadedModel, tokenizer: Tokenizer
    ) -> None:
        now = [100.0]
        options = EngineOptions(model="tiny", kv_cache_memory=10**6, max_num_seqs=1)
        engine = Engine(model, tokenizer, options, clock=lambda: now[0])
        expected = _solo(engine, _prompt(1), GREEDY)
        engine.add(Request("late", _prompt(1), GREEDY, timeout=5.0))
        engine.add(Request("waits", _prompt(2), GREEDY, timeout=5.0))
        engine.add(Request("patient", _prompt(1), GREEDY))
        deltas = [delta for _ in range(4) for delta in engine.step()]
        now[0] = 105.0
        outputs = {delta.request_id: CompletionOutput(0) for delta in deltas}
        for delta in deltas + engine.step():
            outputs.setdefault(delta.request_id, CompletionOutput(0)).extend(delta)
        for name, count in (("late", 4), ("waits", 0)):
            output = outputs[name]
            assert (output.finish_reason, output.stop_reason) == ("abort", "deadline")
            assert output.token_ids == (expected.token_ids[:count])
        assert engine.stats().timeouts == 2
        assert _drain(engine)["patient"].finish_reason == "length"
        assert engine.stats().blocks_used == 0


class TestSalts:
    def test_a_prefix_is_found_by_those_of_the_same_salt_only(
        self, make_engine: Callable[..., Engine]
    ) -> None:
        engine, prompt, reused = make_engine(), _prompt(3, 50), []
        for salt in ("mine", "yours", "mine", ""):
            engine.add(Request("r", prompt, GREEDY, cache_salt=salt))
            _drain(engine)
            reused.append(engine.stats().reused_tokens)
        assert reused == [0, 0, 48, 48]


class TestEnds:
    def test_length(self, make_engine: Callable[..., Engine]) -> None:
        output = _solo(make_engine(), _prompt(1), GREEDY)
        assert (len(output.token_ids), output.finish_reason) == (12, "length")

    def test_a_stop_token(self, make_engine: Callable[..., Engine]) -> None:
        engine, prompt = make_engine(), _prompt(1)
        tokens = _solo(engine, prompt, GREEDY).token_ids
        stop = next(t for i, t in enumerate(tokens) if i >= 3 and t not in tokens[:i])
        params = SamplingParams(
            temperature=0, max_tokens=12, ignore_eos=True, stop_token_ids=[stop]
        )
        output = _solo(engine, prompt, params)
        assert output.token_ids == tokens[: tokens.index(stop) + 1]
        assert (output.finish_reason, output.stop_reason) == ("stop", stop)

    def test_a_stop_string_cuts_the_text(self, make_engine: Callable[..., Engine]) -> None:
        engine, prompt = make_engine(), _prompt(2)
        text = _solo(engine, prompt, GREEDY).text
        stop = text[4:6]
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, stop=stop)
        output = _solo(engine, prompt, params)
        assert output.text == text[: text.index(stop)]
        assert (output.finish_reason, output.stop_reason) == ("stop", stop)

    def test_the_end_of_sequence(
        self, tokenizer: Tokenizer, make_engine: Callable[..., Engine]
    ) -> None:
        (eos,) = tokenizer.eos_token_ids
        biased = SamplingParams(temperature=0, max_tokens=12, logit_bias={eos: 100})
        output = _solo(make_engine(), _prompt(1), biased)
        assert (output.token_ids, output.text, output.finish_reason) == ([eos], "", "stop")
        waiting = SamplingParams(temperature=0, max_tokens=12, min_tokens=5, logit_bias={eos: 100})
        output = _solo(make_engine(), _prompt(1), waiting)
        assert output.token_ids.index(eos) == 5

    def test_the_context_limit(self, make_engine: Callable[..., Engine]) -> None:
        unlimited = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
        output = _solo(make_engine(), _prompt(1, 250), unlimited)
        assert (len(output.token_ids), output.finish_reason) == (6, "length")

    def test_a_sequence_as_large_as_the_pool(self, make_engine: Callable[..., Engine]) -> None:
        unlimited = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
        output = _solo(make_engine(blocks=3), _prompt(1, 40), unlimited)
        assert (len(output.token_ids), output.finish_reason) == (8, "length")


class TestPromptLogprobs:
    @pytest.mark.parametrize("budget", [7, 2048])
    def test_they_equal_a_log_softmax(
        self, model: LoadedModel, make_engine: Callable[..., Engine], budget: int
    ) -> None:
        from support.batches import run_whole

        prompt = _prompt(5, 40)
        params = SamplingParams(max_tokens=0, prompt_logprobs=2)
        engine = make_engine(max_num_batched_tokens=budget, max_num_seqs=1)
        engine.add(Request("r", prompt, params))
        deltas: list[OutputDelta] = []
        while engine.has_work:
            deltas += engine.step()
        (delta,) = deltas
        assert (delta.token_ids, delta.finish_reason) == ((), "length")
        assert delta.prompt_logprobs is not None and len(delta.prompt_logprobs) == 40
        expected = torch.log_softmax(run_whole(model.decoder, prompt).double(), -1)
        assert delta.prompt_logprobs[0] is None
        for position, entry in enumerate(delta.prompt_logprobs[1:], start=1):
            assert entry is not None and entry.chosen.token_id == prompt[position]
            value = float(expected[position - 1, prompt[position]])
            assert entry.chosen.logprob == pytest.approx(value, abs=1e-4)
            assert len(entry.top) == 2

    @pytest.mark.usefixtures("expecting_nothing")
    def test_they_survive_preemption(self, make_engine: Callable[..., Engine]) -> None:
        scored = SamplingParams(temperature=0, max_tokens=30, prompt_logprobs=0, ignore_eos=True)
        plain = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
        expected = [e and e.chosen for e in self._prompt_logprobs(make_engine(), scored, None)]
        engine = make_engine(blocks=6, max_num_batched_tokens=16, max_num_seqs=2)
        actual = [e and e.chosen for e in self._prompt_logprobs(engine, scored, plain)]
        assert engine.stats().preemptions > 0
        assert actual == expected

    def _prompt_logprobs(
        self, engine: Engine, params: SamplingParams, rival: SamplingParams | None
    ) -> list:  # type: ignore[type-arg]
        if rival is not None:
            engine.add(Request("rival", _prompt(8, 45), rival))
        engine.add(Request("r", _prompt(5, 40), params))
        found = []
        while engine.has_work:
            found += [d for d in engine.step() if d.prompt_logprobs is not None]
        (delta,) = found
        assert delta.prompt_logprobs is not None
        return list(delta.prompt_logprobs)


class TestRefusals:
    @pytest.mark.parametrize(
        ("prompt", "params", "message"),
        [
            ((1, 384), GREEDY, "prompt has token id 384: token ids are 0 to 383"),
            ((-1,), GREEDY, "token id -1"),
            ((), GREEDY, "must have 1 or more"),
            (tuple(range(256)), GREEDY, "max_model_len=256"),
            (tuple(range(200)) * 10, GREEDY, "max_model_len=256"),
            ((1,), SamplingParams(stop_token_ids=[999]), "stop_token_ids has token id 999"),
            ((1,), SamplingParams(logit_bias={-5: 1.0}), "logit_bias has token id -5"),
            ((1,), SamplingParams(allowed_token_ids=[384]), "allowed_token_ids has token id 384"),
        ],
    )
    def test_a_request_that_cannot_run(
        self,
        make_engine: Callable[..., Engine],
        prompt: tuple[int, ...],
        params: SamplingParams,
        message: str,
    ) -> None:
        engine = make_engine()
        with pytest.raises(RequestError, match=message):
            engine.add(Request("bad", prompt, params))
        assert not engine.has_work

    def test_a_prompt_larger_than_the_pool(self, make_engine: Callable[..., Engine]) -> None:
        with pytest.raises(RequestError, match="the whole cache has 2"):
            make_engine(blocks=2).add(Request("bad", _prompt(1, 32), GREEDY))

    def test_a_cache_without_memory(self, model: LoadedModel, tokenizer: Tokenizer) -> None:
        with pytest.raises(EngineError, match="do not hold one block"):
            Engine(model, tokenizer, EngineOptions(model="tiny", kv_cache_memory=10))


def test_a_seed_for_the_engine_repeats_but_does_not_make_requests_alike(
    make_engine: Callable[..., Engine],
) -> None:
    params = SamplingParams(temperature=1.5, max_tokens=12, ignore_eos=True)

    def run() -> list[list[int]]:
        engine = make_engine(seed=7)
        return [_solo(engine, _prompt(1), params).token_ids for _ in range(2)]

    first, second = run()
    assert first != second
    assert run() == [first, second]
