from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI

from qtool.errors import EngineError, RequestError
from qtool.runtime.outputs import OutputDelta
from support.fake_engine import ByteCodec, FakeEngine, say
from support.http import Running, events, running

CHAT = [{"role": "user", "content": "hi"}]
TEXTS, CHATS = "/v1/completions", "/v1/chat/completions"


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running() as running_server:
        yield running_server


def _assert_error(answer: httpx.Response, status: int, param: str | None) -> str:
    assert answer.status_code == status, answer.text
    assert set(answer.json()) == {"error"}
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param, error
    assert error["message"] and "Traceback" not in error["message"]
    return str(error["message"])


COMMON = [
    ({"n": 0}, "n"),
    ({"n": 65}, "n"),
    ({"n": True}, "n"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": "0.5"}, "temperature"),
    ({"temperature": float("nan")}, "temperature"),
    ({"temperature": float("inf")}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.5}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"presence_penalty": 2.1}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"seed": 2**63}, "seed"),
    ({"seed": "x"}, "seed"),
    ({"stop": [""]}, "stop"),
    ({"stop": ["x"] * 17}, "stop"),
    ({"stop": "x" * 1025}, "stop"),
    ({"stop": [1]}, "stop"),
    ({"stop": {}}, "stop"),
    ({"stop_token_ids": [259]}, "stop_token_ids"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"stop_token_ids": ["a"]}, "stop_token_ids"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 300}, "max_tokens"),
    ({"max_tokens": 10**30}, "max_tokens"),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"logit_bias": {"1": 101}}, "logit_bias"),
    ({"logit_bias": {"259": 1}}, "logit_bias"),
    ({"logit_bias": {"a": 1}}, "logit_bias"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"allowed_token_ids": [999]}, "allowed_token_ids"),
    ({"bad_words": [""]}, "bad_words"),
    ({"bad_words": ["x"] * 129}, "bad_words"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 3}}, "stream_options.include_usage"),
    ({"best_of": 2}, "best_of"),
    ({"use_beam_search": True}, "use_beam_search"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"guided_json": {"type": "object"}}, "guided_json"),
    ({"request_id": "x" * 129}, "request_id"),
    ({"request_id": "a\nb"}, "request_id"),
    ({"priority": 2**40}, "priority"),
    ({"model": 3}, "model"),
]

COMPLETION = [
    ({"prompt": None}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": ["a", 1]}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": [1.5]}, "prompt"),
    ({"prompt": [259]}, "prompt"),
    ({"prompt": [[-1]]}, "prompt"),
    ({"prompt": {"a": 1}}, "prompt"),
    ({"prompt": "", "add_special_tokens": False}, "prompt"),
    ({"prompt": "x" * 256}, "prompt"),
    ({"prompt": "x" * 10_000}, "prompt"),
    ({"prompt": "x" * 10_000, "max_tokens": 0}, "prompt"),
    ({"prompt": ["x"] * 1025}, "prompt"),
    ({"prompt": ["x"] * 20, "n": 64}, "prompt"),
    ({"suffix": "end"}, "suffix"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"echo": "yes"}, "echo"),
]

CONVERSATION = [
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [{"role": "user"}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": None}]}, "messages.0.content"),
    ({"messages": [*CHAT, {"role": "robot", "content": "x"}]}, "messages.1.role"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content"),
    (
        {"messages": [{"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}]},
        "messages.0.tool_calls",
    ),
    ({"messages": [{"role": "user", "content": "x" * 300}]}, "messages"),
    ({"logprobs": 1}, "logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
    ({"max_completion_tokens": -1}, "max_completion_tokens"),
    ({"max_completion_tokens": 999}, "max_completion_tokens"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"tool_choice": "auto"}, "tool_choice"),
    ({"add_special_tokens": True}, "add_special_tokens"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ({"chat_template": "{{ 1 }}"}, "chat_template"),
    ({"chat_template_kwargs": {"tokenize": False}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"fail": True}}, "messages"),
]

CASES = [
    *((TEXTS, {"prompt": "a"} | body, param) for body, param in COMMON + COMPLETION),
    *((CHATS, {"messages": CHAT} | body, param) for body, param in COMMON + CONVERSATION),
    (TEXTS, {}, "prompt"),
    (CHATS, {}, "messages"),
    ("/tokenize", {}, "prompt"),
    ("/tokenize", {"messages": []}, "messages"),
    ("/detokenize", {"tokens": [1000]}, "tokens"),
    ("/detokenize", {}, "tokens"),
]


@pytest.mark.parametrize(("path", "body", "param"), CASES)
def test_a_bad_value_is_a_400_that_names_its_field(
    server: Running, path: str, body: dict[str, Any], param: str
) -> None:
    asked = len(server.engine.requests)
    content = json.dumps(body)  # httpx refuses NaN, clients do not
    headers = {"content-type": "application/json"}
    answer = server.http.post(path, content=content, headers=headers)
    message = _assert_error(answer, 400, param)
    assert len(message) <= 1000
    assert len(server.engine.requests) == asked


@pytest.mark.parametrize(
    "body",
    [
        {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}},
        {"best_of": 1, "user": "me", "stream_options": None, "top_p": None},
        {"vendor_extra": {"a": 1}, "parallel_tool_calls": True},
    ],
)
def test_harmless_and_unknown_fields_are_accepted(server: Running, body: dict[str, Any]) -> None:
    assert server.post(CHATS, messages=CHAT, **body).status_code == 200


@pytest.mark.parametrize("content", [b"{", b"", b"nope", b'{"prompt": "\xff"}', b"[" * 100_000])
def test_a_body_that_is_no_json_is_a_400(server: Running, content: bytes) -> None:
    headers = {"content-type": "application/json"}
    _assert_error(server.http.post(TEXTS, content=content, headers=headers), 400, None)


def test_a_body_without_its_content_type_is_a_400_that_says_so(server: Running) -> None:
    answer = server.http.post(TEXTS, content=b'{"prompt": "a"}')
    assert "Content-Type" in _assert_error(answer, 400, None)


def test_a_lone_surrogate_is_a_400(server: Running) -> None:
    headers = {"content-type": "application/json"}
    answer = server.http.post(TEXTS, content=b'{"prompt": "\\ud800"}', headers=headers)
    _assert_error(answer, 400, "prompt")


def test_a_prompt_may_fill_the_context_but_not_pass_it(server: Running) -> None:
    def ask(length: int, **body: Any) -> httpx.Response:
        return server.post(TEXTS, prompt=[1] * length, **body)

    assert ask(255).json()["usage"]["completion_tokens"] == 1
    assert ask(256, max_tokens=0, echo=True).status_code == 200
    assert ask(250, max_tokens=6).status_code == 200
    answer = ask(256)
    _assert_error(answer, 400, "prompt")
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    _assert_error(ask(250, max_tokens=7), 400, "max_tokens")
    assert ask(2560, truncate_prompt_tokens=-1).json()["usage"]["prompt_tokens"] == 255
    body = {"truncate_prompt_tokens": -1, "max_tokens": 56}
    assert ask(2560, **body).json()["usage"]["prompt_tokens"] == 200


def test_unknown_models_and_routes_are_404_and_wrong_methods_405(server: Running) -> None:
    answer = server.post(CHATS, model="gpt-4", messages=CHAT)
    _assert_error(answer, 404, "model")
    assert answer.json()["error"]["code"] == "model_not_found"
    _assert_error(server.http.get("/v2/nothing"), 404, None)
    answer = server.http.get(CHATS)
    _assert_error(answer, 405, None)
    assert answer.headers["allow"] == "POST"


def test_the_openai_client_sees_the_nested_error(server: Running) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        server.openai.completions.create(model="org/toy", prompt="a", temperature=-1)
    assert caught.value.param == "temperature"


def test_a_model_without_chat_template_says_what_to_do() -> None:
    codec = ByteCodec()
    codec.has_chat_template = False
    with running(codec=codec) as server:
        answer = server.post(CHATS, messages=CHAT)
        assert "/v1/completions" in _assert_error(answer, 400, "messages")


def test_a_clients_template_is_used_only_where_the_server_allows_it() -> None:
    with running(allow_chat_template=True) as server:
        assert server.post(CHATS, messages=CHAT, chat_template="{{ 1 }}").status_code == 200
        assert server.codec.last_render["chat_template"] == "{{ 1 }}"


@pytest.fixture(scope="module")
def locked() -> Iterator[Running]:
    with running(api_key="secret") as running_server:
        yield running_server


@pytest.mark.parametrize("key", [None, "Bearer wrong", "secret", "Basic secret", "Bearer"])
def test_a_wrong_key_is_a_401_under_v1_only(locked: Running, key: str | None) -> None:
    headers = {} if key is None else {"authorization": key}
    answer = locked.http.get("/v1/models", headers=headers)
    _assert_error(answer, 401, None)
    assert answer.headers["www-authenticate"] == "Bearer"
    assert locked.http.post(CHATS, json={}, headers=headers).status_code == 401
    for path in ("/health", "/metrics", "/version"):
        assert locked.http.get(path, headers=headers).status_code == 200
    assert locked.http.options("/v1/models", headers=headers).status_code == 405


def test_the_right_key_opens_v1(locked: Running) -> None:
    with OpenAI(base_url=f"{locked.url}/v1", api_key="secret") as client:
        assert client.models.list().data[0].id == "org/toy"


def test_a_body_over_the_limit_is_a_413_with_and_without_its_length() -> None:
    with running(max_body_bytes=1000, engine=FakeEngine(max_model_len=2000)) as server:
        at_limit = json.dumps({"prompt": "x" * (1000 - len('{"prompt": ""}'))}).encode()
        over = at_limit + b" "
        headers = {"content-type": "application/json"}
        for content, status in ((at_limit, 200), (over, 413)):
            answer = server.http.post(TEXTS, content=content, headers=headers)
            assert answer.status_code == status
            pieces = (content[i : i + 100] for i in range(0, len(content), 100))
            answer = server.http.post(TEXTS, content=pieces, headers=headers)
            assert answer.status_code == status
        assert answer.json()["error"]["code"] == "body_too_large"


def test_a_dead_engine_is_a_503_also_for_health() -> None:
    with running() as server:
        server.engine.die()
        _assert_error(server.post(TEXTS, prompt="a"), 503, None)
        _assert_error(server.post(CHATS, messages=CHAT, stream=True), 503, None)
        _assert_error(server.http.get("/health"), 503, None)
        assert server.http.get("/metrics").status_code == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "param"),
    [(RequestError("too long", "prompt"), 400, "prompt"), (EngineError("no memory"), 500, None)],
)
def test_an_engines_error_before_the_first_token_is_a_real_status(
    stream: bool, error: Exception, status: int, param: str | None
) -> None:
    with running(FakeEngine(lambda _: iter([error]))) as server:  # type: ignore[list-item]
        _assert_error(server.post(TEXTS, prompt="a", stream=stream), status, param)
        assert server.engine.aborted == []


def test_an_engines_error_in_the_middle_of_a_stream_is_its_last_event() -> None:
    def script(request):  # type: ignore[no-untyped-def]
        yield OutputDelta(request.request_id, "He", (72, 101))
        yield EngineError("no memory")

    with running(FakeEngine(script)) as server:
        answer = server.post(CHATS, messages=CHAT, stream=True)
        assert answer.status_code == 200
        role, text, error = events(answer.text)
        assert text["choices"][0]["delta"] == {"content": "He"}
        assert error["error"]["message"] == "no memory"
        stream = server.openai.completions.create(model="org/toy", prompt="a", stream=True)
        with pytest.raises(openai.APIError, match="no memory"):
            list(stream)


def test_one_failing_choice_aborts_its_siblings() -> None:
    def script(request):  # type: ignore[no-untyped-def]
        if request.request_id.endswith("-1"):
            yield EngineError("no memory")
        yield from say("x" * 100)(request)

    with running(FakeEngine(script, delay=0.01)) as server:
        _assert_error(server.post(TEXTS, prompt="a", n=3, max_tokens=100), 500, None)
        assert sorted(name[-2:] for name in server.engine.aborted) == ["-0", "-2"]
        assert server.engine.open_ids == []


def test_a_request_the_engine_aborts_is_an_error_and_no_answer() -> None:
    with running(FakeEngine(say("Hi", finish="abort"))) as server:
        _assert_error(server.post(TEXTS, prompt="a"), 500, None)


def test_nan_from_the_model_never_reaches_json() -> None:
    def script(request):  # type: ignore[no-untyped-def]
        for delta in say("Hi")(request):
            for entry in delta.logprobs:
                object.__setattr__(entry.chosen, "logprob", float(value))
            yield delta

    with running(FakeEngine(script)) as server:
        value = "-inf"
        answer = server.post(TEXTS, prompt="a", logprobs=0)
        assert answer.json()["choices"][0]["logprobs"]["token_logprobs"] == [-9999.0] * 2
        value = "nan"
        _assert_error(server.post(TEXTS, prompt="a", logprobs=0), 500, None)
        _assert_error(server.post(CHATS, messages=CHAT, logprobs=True, stream=True), 500, None)


def test_a_bug_in_the_server_is_a_500_without_its_traceback() -> None:
    codec = ByteCodec()
    codec.encode = None  # type: ignore[assignment,method-assign]
    with running(codec=codec) as server:
        message = _assert_error(server.post(TEXTS, prompt="a"), 500, None)
        assert "TypeError" in message
        assert server.http.get("/health").status_code == 200
