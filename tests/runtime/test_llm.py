"""``from qtool import LLM, SamplingParams``, as users of other engines write it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from qtool import LLM, SamplingParams
from qtool.errors import EngineError, RequestError, UsageError

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tiny_model_folder: Path) -> Iterator[LLM]:
    with LLM(
        model=str(tiny_model_folder),
        tensor_parallel_size=1,
        gpu_memory_utilization=0.9,
        device="cpu",
        dtype="fp32",
        backend="reference",
        kv_cache_memory=10**7,
    ) as llm:
        yield llm


def test_one_prompt_and_many(llm: LLM) -> None:
    params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=8)
    (single,) = llm.generate("The quick brown", params)
    assert single.prompt == "The quick brown"
    assert isinstance(single.outputs[0].text, str)
    prompts = ["The quick", "你好，世界", "🙂🙃"]
    results = llm.generate(prompts, GREEDY)
    assert [result.prompt for result in results] == prompts
    assert [len(result.outputs[0].token_ids) for result in results] == [8, 8, 8]
    again = llm.generate(prompts[1], GREEDY)
    assert again[0].outputs[0].text == results[1].outputs[0].text


def test_token_ids_are_a_prompt_too(llm: LLM) -> None:
    (by_text,) = llm.generate("The quick brown", GREEDY)
    (by_ids,) = llm.generate(by_text.prompt_token_ids, GREEDY)
    assert by_ids.outputs[0].token_ids == by_text.outputs[0].token_ids
    assert by_ids.prompt is None


def test_n_completions_differ_and_repeat_with_a_seed(llm: LLM) -> None:
    params = SamplingParams(n=3, temperature=1.5, seed=5, max_tokens=8, ignore_eos=True)
    first, second = (llm.generate("The", params)[0] for _ in range(2))
    texts = [output.text for output in first.outputs]
    assert [output.index for output in first.outputs] == [0, 1, 2]
    assert len(set(texts)) == 3
    assert [output.text for output in second.outputs] == texts


def test_each_prompt_can_have_its_own_parameters(llm: LLM) -> None:
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (2, 5)]
    results = llm.generate(["a", "b"], params)
    assert [len(result.outputs[0].token_ids) for result in results] == [2, 5]
    with pytest.raises(UsageError, match="2 sampling_params for 3 prompts"):
        llm.generate(["a", "b", "c"], params)


def test_chat_renders_the_template(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hello"}]
    (single,) = llm.chat(messages, GREEDY)
    assert single.prompt == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    both = llm.chat([messages, messages], GREEDY)
    assert {result.outputs[0].text for result in both} == {single.outputs[0].text}


def test_a_stream_gives_the_same_text_and_may_be_left_early(llm: LLM) -> None:
    (plain,) = llm.generate("The quick", GREEDY)
    deltas = list(llm.stream("The quick", GREEDY))
    assert "".join(delta.text for delta in deltas) == plain.outputs[0].text
    for _ in llm.stream("The quick", SamplingParams(max_tokens=200, ignore_eos=True)):
        break
    assert llm.generate("The quick", GREEDY)[0].outputs[0].text == plain.outputs[0].text


def test_a_conversation_streams_too(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hello"}]
    (plain,) = llm.chat(messages, GREEDY)
    assert "".join(d.text for d in llm.stream(messages, GREEDY)) == plain.outputs[0].text


def test_one_bad_prompt_fails_the_call_and_leaves_nothing_running(llm: LLM) -> None:
    with pytest.raises(RequestError, match="must have 1 or more"):
        llm.generate(["good", []], GREEDY)
    assert len(llm.generate("good", GREEDY)) == 1


@pytest.mark.parametrize("prompt", [["1"], [[1, 2.5]], [None]])
def test_a_prompt_of_wrong_types_is_refused_and_the_engine_goes_on(llm: LLM, prompt: Any) -> None:
    with pytest.raises(RequestError, match="list of token ids"):
        llm.generate([prompt] if prompt == ["1"] else prompt, GREEDY)
    assert len(llm.generate("good", GREEDY)) == 1


@pytest.mark.parametrize("name", ["n", "top_k", "max_tokens", "min_tokens", "logprobs", "seed"])
def test_fractions_are_no_numbers_of_tokens(name: str) -> None:
    with pytest.raises(RequestError, match=f"{name}=1.5: must be a whole number"):
        SamplingParams(**{name: 1.5})  # type: ignore[arg-type]


def test_prompt_logprobs_come_with_the_result(llm: LLM) -> None:
    (result,) = llm.generate("The quick brown fox", SamplingParams(max_tokens=1, prompt_logprobs=1))
    assert result.prompt_logprobs is not None
    assert len(result.prompt_logprobs) == len(result.prompt_token_ids)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tensor_parallel_size": 2}, "tensor_parallel_size=2: this version runs on one device"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size=2"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization=1.5"),
        ({"max_model_len": 1000}, "made for at most 256 tokens"),
        ({"quantization": "awq"}, "the checkpoint is not quantized"),
        ({"dtype": "int3"}, "use one of auto, bf16, fp16, fp32"),
    ],
)
def test_settings_that_cannot_be_are_refused(
    tiny_model_folder: Path, settings: dict[str, object], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        LLM(model=str(tiny_model_folder), device="cpu", **settings)  # type: ignore[arg-type]


def test_unknown_settings_are_refused(tiny_model_folder: Path) -> None:
    with pytest.raises(TypeError, match="max_seqs"):
        LLM(model=str(tiny_model_folder), max_seqs=2)  # type: ignore[call-arg]


def _thread(function: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=function)
    thread.start()
    return thread


def test_threads_that_generate_chat_and_stream_at_once_get_what_they_get_alone(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hello"}]
    calls: dict[str, Callable[[], str]] = {
        "generate": lambda: llm.generate("The quick", GREEDY, progress=False)[0].outputs[0].text,
        "chat": lambda: llm.chat(messages, GREEDY)[0].outputs[0].text,
        "stream": lambda: "".join(delta.text for delta in llm.stream("brown fox", GREEDY)),
    }
    alone = {name: call() for name, call in calls.items()}
    found: list[tuple[str, str]] = []

    def client(name: str) -> None:
        found.extend((name, calls[name]()) for _ in range(3))

    threads = [_thread(partial(client, name)) for name in calls for _ in range(3)]
    for thread in threads:
        thread.join(timeout=60)
    assert len(found) == 27 and all(text == alone[name] for name, text in found)


def test_samples_of_a_prompt_share_its_computation(llm: LLM) -> None:
    before = llm.stats()
    params = SamplingParams(n=4, temperature=1.0, seed=1, max_tokens=4, ignore_eos=True)
    llm.generate([list(range(100, 150))], params)
    after = llm.stats()
    assert after.prompt_tokens - before.prompt_tokens == 50 + 3
    assert after.reused_tokens - before.reused_tokens == 3 * 49


def test_closing_ends_a_call_in_another_thread_and_the_engine_for_good(
    tiny_model_folder: Path,
) -> None:
    llm = LLM(str(tiny_model_folder), device="cpu", backend="reference", kv_cache_memory=10**6)
    long, errors = SamplingParams(max_tokens=200, ignore_eos=True), list[Exception]()
    begun = threading.Event()

    def stream() -> None:
        try:
            for _ in llm.stream("The", long):
                begun.set()
        except EngineError as error:
            errors.append(error)

    thread = _thread(stream)
    assert begun.wait(30)
    llm.close()
    thread.join(timeout=30)
    assert not thread.is_alive() and len(errors) == 1 and "closed" in str(errors[0])
    for call in (llm.generate, lambda prompt: list(llm.stream(prompt))):
        with pytest.raises(EngineError, match="has stopped"):
            call("The")
    llm.close()
    assert not llm._engine._thread.is_alive()


def test_a_seed_of_the_engine_repeats_what_requests_without_one_get(
    tiny_model_folder: Path,
) -> None:
    texts = []
    for _ in range(2):
        with LLM(
            str(tiny_model_folder),
            device="cpu",
            backend="reference",
            max_model_len=64,
            max_num_seqs=2,
            enable_prefix_caching=False,
            kv_cache_dtype="auto",
            seed=3,
        ) as llm:
            assert (llm.info.max_model_len, llm.info.prefix_caching) == (64, False)
            results = llm.generate(["a", "b", "c"], SamplingParams(max_tokens=8, ignore_eos=True))
            texts.append([result.outputs[0].text for result in results])
    assert texts[0] == texts[1] and len(set(texts[0])) == 3


def test_a_call_ends_with_what_it_has_when_its_time_is_over(llm: LLM) -> None:
    long = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    (cut,) = llm.generate("The", long, timeout=1e-3)
    assert cut.outputs[0].finish_reason == "abort" and len(cut.outputs[0].token_ids) < 200
    (whole,) = llm.chat([{"role": "user", "content": "Hi"}], GREEDY, timeout=600)
    assert whole.outputs[0].finish_reason == "length"
    with pytest.raises(RequestError, match="timeout=0: must be above 0 seconds"):
        llm.generate("The", GREEDY, timeout=0)


def test_calls_of_other_salts_share_no_prefix(llm: LLM) -> None:
    prompt = list(range(10, 90))
    for salt, reused in (("a", 0), ("a", 64), ("b", 0)):
        before = llm.stats().reused_tokens
        list(llm.stream(prompt, GREEDY, cache_salt=salt))
        assert llm.stats().reused_tokens - before == reused
