from __future__ import annotations

import asyncio
from collections.abc import Iterator

import openai
import pytest
from openai import AsyncOpenAI

from support.fake_engine import BOS, TURN, ByteCodec, FakeEngine, say
from support.http import Running, events, running

TEXT = "Grüße, 世界 🌍!"
CHAT = [{"role": "user", "content": "hi"}]
MODEL = "org/toy"


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(FakeEngine(say(TEXT))) as running_server:
        yield running_server


def test_chat_gives_text_usage_and_finish_reason(server: Running) -> None:
    answer = server.openai.chat.completions.create(model=MODEL, messages=CHAT)
    choice = answer.choices[0]
    assert (choice.message.role, choice.message.content) == ("assistant", TEXT)
    assert choice.finish_reason == "stop"
    assert answer.model == MODEL and answer.object == "chat.completion"
    prompt = server.engine.requests[-1].prompt_token_ids
    assert prompt.count(BOS) == 1 and prompt.count(TURN) == 2
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(prompt)
    assert answer.usage.completion_tokens == len(TEXT.encode())
    assert answer.usage.total_tokens == len(prompt) + len(TEXT.encode())


@pytest.mark.parametrize("max_tokens", [1, 5, 9, 10, 11, 17, 200])
def test_joined_stream_deltas_equal_the_plain_text(server: Running, max_tokens: int) -> None:
    ask = {"model": MODEL, "messages": CHAT, "max_completion_tokens": max_tokens}
    plain = server.openai.chat.completions.create(**ask)
    stream = server.openai.chat.completions.create(**ask, stream=True)
    chunks = [chunk.choices[0] for chunk in stream]
    assert "".join(c.delta.content or "" for c in chunks) == plain.choices[0].message.content
    assert chunks[-1].finish_reason == plain.choices[0].finish_reason
    ask = {"model": MODEL, "prompt": "x", "max_tokens": max_tokens}
    text = server.openai.completions.create(**ask).choices[0].text
    parts = server.openai.completions.create(**ask, stream=True)
    assert "".join(chunk.choices[0].text for chunk in parts) == text


def test_chat_stream_follows_the_chunk_rules(server: Running) -> None:
    options = {"include_usage": True}
    answer = server.post(
        "/v1/chat/completions",
        messages=CHAT,
        n=2,
        stream=True,
        stream_options=options,
        request_id="mine",
    )
    assert answer.headers["content-type"].startswith("text/event-stream")
    *chunks, usage, done = events(answer.text)
    assert done == "[DONE]"
    assert {c["id"] for c in chunks} == {"chatcmpl-mine"} == {usage["id"]}
    assert {c["object"] for c in chunks} == {"chat.completion.chunk"}
    assert len({(c["created"], c["model"]) for c in chunks}) == 1
    assert all(c["usage"] is None for c in chunks)
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 2 * len(TEXT.encode())
    for index in (0, 1):
        own = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert own[0]["delta"] == {"role": "assistant", "content": ""}
        assert [c["finish_reason"] for c in own[:-1]] == [None] * (len(own) - 1)
        assert own[-1]["delta"] == {} and own[-1]["finish_reason"] == "stop"
        assert "".join(c["delta"]["content"] for c in own[:-1]) == TEXT


def test_usage_appears_in_chunks_only_when_asked_for(server: Running) -> None:
    plain = events(server.post("/v1/completions", prompt="x", stream=True).text)
    assert all("usage" not in chunk for chunk in plain[:-1])
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": "x", "stream": True, "stream_options": options, "max_tokens": 3}
    chunks = events(server.post("/v1/completions", **body).text)
    assert [c["usage"]["completion_tokens"] for c in chunks[:-1]] == [1, 2, 3, 3]


@pytest.mark.parametrize("prompt", ["ab", ["ab"], [97, 98], [[97, 98]]])
def test_every_form_of_prompt_is_taken(server: Running, prompt: object) -> None:
    answer = server.openai.completions.create(model=MODEL, prompt=prompt, max_tokens=2)  # type: ignore[call-overload]
    assert server.engine.requests[-1].prompt_token_ids[-2:] == (97, 98)
    assert answer.choices[0].text == "Gr"


def test_choices_of_several_prompts_are_merged_by_index(server: Running) -> None:
    answer = server.openai.completions.create(
        model=MODEL, prompt=["a", "b", "c"], n=2, echo=True, max_tokens=1, seed=5
    )
    assert [c.text for c in answer.choices] == ["aG", "aG", "bG", "bG", "cG", "cG"]
    assert [c.index for c in answer.choices] == list(range(6))
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (6, 6)
    assert [r.params.seed for r in server.engine.requests[-6:]] == [5, 6] * 3
    assert all(r.params.n == 1 for r in server.engine.requests[-6:])


def test_echo_with_zero_tokens_scores_the_prompt(server: Running) -> None:
    answer = server.openai.completions.create(
        model=MODEL, prompt="abc", echo=True, logprobs=1, max_tokens=0
    )
    choice = answer.choices[0]
    assert choice.text == "abc" and choice.finish_reason == "length"
    assert choice.logprobs is not None
    assert choice.logprobs.tokens == ["<s>", "a", "b", "c"]
    assert choice.logprobs.token_logprobs == [None, -0.5, -0.5, -0.5]
    assert choice.logprobs.top_logprobs == [None, {"a": -0.5}, {"b": -0.5}, {"c": -0.5}]
    assert choice.logprobs.text_offset == [0, 0, 1, 2]
    assert answer.usage is not None and answer.usage.completion_tokens == 0


def test_streamed_echo_and_logprobs_join_to_the_plain_answer(server: Running) -> None:
    body = {"prompt": ["ab", "世"], "echo": True, "logprobs": 2, "max_tokens": 7}
    plain = server.post("/v1/completions", **body).json()["choices"]
    chunks = events(server.post("/v1/completions", **body, stream=True).text)[:-1]
    for index, whole in enumerate(plain):
        own = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert "".join(c["text"] for c in own) == whole["text"]
        for key, values in whole["logprobs"].items():
            assert [v for c in own for v in c["logprobs"][key]] == values
        assert len(whole["logprobs"]["tokens"]) == len(whole["logprobs"]["token_logprobs"])


def test_chat_logprobs_have_the_bytes_of_split_characters(server: Running) -> None:
    ask = {"model": MODEL, "messages": CHAT, "logprobs": True, "top_logprobs": 2, "max_tokens": 4}
    answer = server.openai.chat.completions.create(**ask)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    assert bytes(b for t in logprobs.content for b in t.bytes or []) == "Grü".encode()
    assert [t.token for t in logprobs.content] == ["G", "r", "bytes:\\xc3", "bytes:\\xbc"]
    assert [len(t.top_logprobs) for t in logprobs.content] == [2] * 4
    stream = server.openai.chat.completions.create(**ask, stream=True)
    got = [c.choices[0].logprobs for c in stream]
    assert [t for part in got if part for t in part.content or []] == logprobs.content


def test_prompt_logprobs_come_with_either_kind(server: Running) -> None:
    body = {"prompt_logprobs": 2, "max_tokens": 1}
    text = server.post("/v1/completions", prompt="ab", **body).json()["choices"][0]
    assert text["logprobs"] is None and text["text"] == "G"
    first, second, _ = text["prompt_logprobs"]
    assert first is None
    assert second["97"] == {"logprob": -0.5, "rank": 1, "decoded_token": "a"}
    chat = server.post("/v1/chat/completions", messages=CHAT, **body).json()
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]


def test_the_stop_that_matched_is_reported() -> None:
    def script(request):  # type: ignore[no-untyped-def]
        for delta in say("x")(request):
            object.__setattr__(delta, "stop_reason", "END")
            yield delta

    with running(FakeEngine(script)) as server:
        body = {"messages": CHAT, "stop": ["END"]}
        choice = server.post("/v1/chat/completions", **body).json()["choices"][0]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "END")
        assert server.engine.requests[-1].params.stop == ("END",)
        chunks = events(server.post("/v1/chat/completions", **body, stream=True).text)
        assert chunks[-2]["choices"][0]["stop_reason"] == "END"


def test_the_clients_value_beats_the_models_and_the_models_the_neutral_one() -> None:
    codec = ByteCodec({"temperature": 0.25, "top_k": 40, "min_p": None, "eos_token_id": 3})
    with running(codec=codec) as server:
        server.post("/v1/completions", prompt="a", top_k=7, temperature=None)
        params = server.engine.requests[-1].params
        assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.25, 7, 1.0, 0.0)


def test_twenty_requests_at_once_get_their_own_answers() -> None:
    def script(request):  # type: ignore[no-untyped-def]
        return say(bytes(request.prompt_token_ids[1:]).decode() * 5)(request)

    async def ask(client: AsyncOpenAI, number: int) -> str:
        prompt = f"<{number}>"
        if number % 2:
            answer = await client.completions.create(model=MODEL, prompt=prompt, max_tokens=99)
            return answer.choices[0].text
        stream = await client.completions.create(
            model=MODEL, prompt=prompt, max_tokens=99, stream=True
        )
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def ask_all(url: str) -> list[str]:
        async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(ask(client, number) for number in range(20)))

    with running(FakeEngine(script, delay=0.001)) as server:
        assert asyncio.run(ask_all(server.url)) == [f"<{n}>" * 5 for n in range(20)]
        assert server.engine.aborted == []


def test_models_are_listed_and_found_by_name(server: Running) -> None:
    assert [model.id for model in server.openai.models.list()] == [MODEL]
    assert server.http.get(f"/v1/models/{MODEL}").json()["max_model_len"] == 256
    assert server.openai.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError) as caught:
        server.openai.models.retrieve("other")
    assert caught.value.code == "model_not_found"


def test_tokenize_and_detokenize_are_inverse(server: Running) -> None:
    answer = server.post("/tokenize", prompt=TEXT, add_special_tokens=False).json()
    assert answer["count"] == len(answer["tokens"]) == len(TEXT.encode())
    assert server.post("/detokenize", tokens=answer["tokens"]).json() == {"prompt": TEXT}
    chat = server.post("/tokenize", messages=CHAT).json()["tokens"]
    server.post("/v1/chat/completions", messages=CHAT, max_tokens=1)
    assert tuple(chat) == server.engine.requests[-1].prompt_token_ids


def test_a_final_message_is_continued(server: Running) -> None:
    messages = [*CHAT, {"role": "assistant", "content": [{"type": "text", "text": "Sure"}]}]
    body = {"messages": messages, "continue_final_message": True, "max_tokens": 1}
    assert server.post("/v1/chat/completions", **body).status_code == 200
    assert bytes(server.engine.requests[-1].prompt_token_ids[-4:]) == b"Sure"


def test_template_variables_and_extra_message_fields_reach_the_template(server: Running) -> None:
    messages = [{"role": "user", "content": "hi", "name": "Ann"}]
    variables = {"enable_thinking": False}
    server.post("/v1/chat/completions", messages=messages, chat_template_kwargs=variables)
    assert server.codec.last_render["template_kwargs"] == variables
    assert server.codec.last_render["messages"] == messages


def test_version_and_health_are_open(server: Running) -> None:
    assert server.http.get("/health").status_code == 200
    assert set(server.http.get("/version").json()) == {"version"}
