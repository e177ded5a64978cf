"""Bad cases against the real engine: limits, one BOS, odd tokenizers, clients that leave."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from qtool.runtime.outputs import OutputDelta
from support.http import wait_until
from support.models import CHAT_TEMPLATE, make_tokenizer
from support.real_server import RealServer, real_server

TEXTS, CHATS = "/v1/completions", "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]
BOS = 0


@pytest.fixture(scope="module")
def server(tiny_model_folder: Path) -> Iterator[RealServer]:
    with real_server(tiny_model_folder) as running:
        yield running


def _with_tokenizer(folder: Path, **changes: Any) -> Path:
    """The folder with its tokenizer's attributes changed."""
    tokenizer = make_tokenizer(add_bos=changes.pop("add_bos", False))
    for name, value in changes.items():
        setattr(tokenizer, name, value)
    for stale in ("chat_template.jinja", "tokenizer_config.json"):
        (folder / stale).unlink(missing_ok=True)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def with_bos(model_factory: Callable[..., Path]) -> Iterator[RealServer]:
    """A model whose tokenizer and chat template both write BOS, as Llama's do."""
    template = "{{ bos_token }}" + CHAT_TEMPLATE
    with real_server(_with_tokenizer(model_factory(), add_bos=True, chat_template=template)) as it:
        yield it


class TestLimits:
    @pytest.mark.parametrize("length", [254, 255])
    def test_a_prompt_that_leaves_room_is_answered_until_the_context_is_full(
        self, server: RealServer, length: int
    ) -> None:
        answer = server.post(TEXTS, prompt=[5] * length, ignore_eos=True)
        assert answer.status_code == 200
        assert answer.json()["usage"]["completion_tokens"] == 256 - length
        assert answer.json()["choices"][0]["finish_reason"] == "length"

    @pytest.mark.parametrize("length", [256, 257, 2560])
    @pytest.mark.parametrize("max_tokens", [None, 0, 1])
    @pytest.mark.parametrize("stream", [False, True])
    def test_a_prompt_that_fills_the_context_is_a_400(
        self, server: RealServer, length: int, max_tokens: int | None, stream: bool
    ) -> None:
        answer = server.post(TEXTS, prompt=[5] * length, max_tokens=max_tokens, stream=stream)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "prompt"
        assert str(length) in answer.json()["error"]["message"]

    def test_a_conversation_ten_times_the_context_is_a_400(self, server: RealServer) -> None:
        long = [{"role": "user", "content": "fox " * 2560}]
        answer = server.post(CHATS, messages=long)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "messages"

    def test_a_prompt_larger_than_the_whole_cache_is_a_400_and_harms_no_other(
        self, tiny_model_folder: Path
    ) -> None:
        with real_server(tiny_model_folder, blocks=4) as small:
            for stream in (False, True):
                answer = small.post(TEXTS, prompt=[5] * 64, stream=stream)
                assert answer.status_code == 400
                assert "the whole cache has 4" in answer.json()["error"]["message"]
            assert small.post(TEXTS, prompt=[5] * 63, max_tokens=1).status_code == 200


class TestValues:
    @pytest.mark.parametrize("temperature", [1e-6, 1e-30, 5e-324])
    def test_a_tiny_temperature_is_greedy(self, server: RealServer, temperature: float) -> None:
        def ask(value: float) -> str:
            answer = server.post(TEXTS, prompt="The", temperature=value, ignore_eos=True)
            return str(answer.json()["choices"][0]["text"])

        assert ask(temperature) == ask(0)

    @pytest.mark.parametrize("prompt", ["", [], [""], [[]], ["The", ""]])
    def test_an_empty_prompt_is_a_400_where_no_bos_is_added(
        self, server: RealServer, prompt: object
    ) -> None:
        answer = server.post(TEXTS, prompt=prompt)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "prompt"

    @pytest.mark.parametrize(
        ("messages", "param"),
        [
            ([], "messages"),
            (None, "messages"),
            ([{"role": "user", "content": None}], "messages.0.content"),
            ([{"role": "user"}], "messages.0.content"),
        ],
    )
    def test_messages_without_content_are_a_400(
        self, server: RealServer, messages: object, param: str
    ) -> None:
        answer = server.post(CHATS, messages=messages)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == param

    def test_a_message_with_empty_content_is_answered(self, server: RealServer) -> None:
        messages = [{"role": "user", "content": ""}]
        assert server.post(CHATS, messages=messages, max_tokens=2).status_code == 200


class TestOneBos:
    def _prompt_ids(self, server: RealServer, path: str, **body: Any) -> list[int]:
        """Token ids the engine really saw: those whose log-probabilities came back."""
        answer = server.post(path, max_tokens=1, prompt_logprobs=0, **body)
        assert answer.status_code == 200, answer.text
        owner = answer.json() if path == CHATS else answer.json()["choices"][0]
        scores = owner["prompt_logprobs"]
        assert answer.json()["usage"]["prompt_tokens"] == len(scores)
        return [int(next(reversed(entry))) for entry in scores[1:]]

    def test_a_text_gets_one(self, with_bos: RealServer) -> None:
        (ids,) = {
            tuple(self._prompt_ids(with_bos, TEXTS, prompt=text)) for text in ("The", "<s>The")
        }
        assert BOS not in ids, "the one BOS is the first token, which has no log-probability"
        assert list(ids) == with_bos.tokenizer.encode("The", add_special_tokens=False)

    def test_a_conversation_has_that_of_its_template(self, with_bos: RealServer) -> None:
        ids = self._prompt_ids(with_bos, CHATS, messages=HELLO)
        whole = with_bos.tokenizer.render_chat(HELLO)
        assert whole[0] == BOS and ids == whole[1:] and BOS not in ids

    def test_token_ids_stay_as_they_are(self, with_bos: RealServer) -> None:
        assert self._prompt_ids(with_bos, TEXTS, prompt=[5, 6, 7]) == [6, 7]
        assert self._prompt_ids(with_bos, TEXTS, prompt=[BOS, BOS, 7]) == [BOS, 7]

    def test_an_empty_text_is_the_bos_alone(self, with_bos: RealServer) -> None:
        answer = with_bos.post(TEXTS, prompt="", max_tokens=1)
        assert answer.json()["usage"]["prompt_tokens"] == 1

    def test_the_tokenize_route_says_the_same(self, with_bos: RealServer) -> None:
        by_text = with_bos.post("/tokenize", prompt="The").json()["tokens"]
        assert by_text == [BOS, *self._prompt_ids(with_bos, TEXTS, prompt="The")]
        by_chat = with_bos.post("/tokenize", messages=HELLO).json()["tokens"]
        assert by_chat == [BOS, *self._prompt_ids(with_bos, CHATS, messages=HELLO)]


class TestOddTokenizers:
    def test_neither_pad_nor_bos_is_needed(self, model_factory: Callable[..., Path]) -> None:
        folder = _with_tokenizer(model_factory(), pad_token=None, bos_token=None)
        with real_server(folder) as running:
            answer = running.post(TEXTS, prompt=["The quick brown fox", "a"], max_tokens=3)
            assert answer.status_code == 200 and len(answer.json()["choices"]) == 2
            assert running.post(CHATS, messages=HELLO, max_tokens=3).status_code == 200

    @pytest.mark.parametrize(
        ("template", "message"),
        [
            (None, "no chat template; send the formatted text to /v1/completions"),
            ("{{ raise_exception('no system here') }}", "no system here"),
            ("{{ messages[0].content.nothing.at_all }}", "refused the messages"),
            ("{% for m in messages %}", "refused the messages"),
        ],
    )
    def test_a_missing_or_failing_template_is_a_400(
        self, model_factory: Callable[..., Path], template: str | None, message: str
    ) -> None:
        with real_server(_with_tokenizer(model_factory(), chat_template=template)) as running:
            for stream in (False, True):
                answer = running.post(CHATS, messages=HELLO, stream=stream)
                assert answer.status_code == 400
                assert message in answer.json()["error"]["message"]
            assert running.post(TEXTS, prompt="The", max_tokens=1).status_code == 200


class TestClientsThatLeave:
    def _send(self, server: RealServer, **body: Any) -> socket.socket:
        """Send a long request and leave the answer unread."""
        request = {"prompt": "The", "max_tokens": 200, "ignore_eos": True, **body}
        content = json.dumps(request).encode()
        address = urlsplit(server.url)
        connection = socket.create_connection((address.hostname, address.port), timeout=10)
        head = f"POST {TEXTS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        return connection

    def _assert_left(self, server: RealServer, finished: int) -> None:
        """So many completions have ended in all, their blocks are free, the engine works."""
        wait_until(lambda: _finished(server) == finished, seconds=30)
        wait_until(lambda: server.engine.stats().blocks_used == 0)
        stats = server.engine.stats()
        assert (stats.num_running, stats.num_waiting) == (0, 0)
        answer = server.post(TEXTS, prompt="The", max_tokens=4, ignore_eos=True)
        assert answer.json()["usage"]["completion_tokens"] == 4
        wait_until(lambda: server.engine.stats().blocks_used == 0)

    @pytest.mark.parametrize("stream", [False, True])
    def test_before_the_first_token(
        self, server: RealServer, stream: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        before, gate, steps = _finished(server), threading.Event(), threading.Semaphore(0)
        engine = server.engine._engine
        step = engine.step

        def gated_step() -> list[OutputDelta]:
            steps.release()
            gate.wait(20)
            return step()

        monkeypatch.setattr(engine, "step", gated_step)
        connection = self._send(server, prompt=["The", "fox"], stream=stream)
        assert steps.acquire(timeout=10), "the engine never began"
        connection.close()
        wait_until(lambda: _finished(server) == before + 2)
        gate.set()
        self._assert_left(server, before + 2)

    @pytest.mark.parametrize("stream", [False, True])
    def test_in_the_middle(self, server: RealServer, stream: bool) -> None:
        finished, generated = _finished(server), server.engine.stats().generated_tokens
        connection = self._send(server, n=3, stream=stream)
        wait_until(lambda: server.engine.stats().generated_tokens >= generated + 9)
        assert server.engine.stats().blocks_used > 0
        connection.close()
        self._assert_left(server, finished + 3)
        assert server.engine.stats().generated_tokens < generated + 600, "it was not aborted"

    def test_fifty_times(self, server: RealServer) -> None:
        finished = _finished(server)
        for number in range(50):
            wanted = server.engine.stats().steps + 1 + number % 3
            connection = self._send(server, stream=number % 2 == 0)
            wait_until(lambda wanted=wanted: server.engine.stats().steps >= wanted)
            connection.close()
        self._assert_left(server, finished + 50)


def _finished(server: RealServer) -> int:
    """Completions that have ended, for whatever reason."""
    lines = server.http.get("/metrics").text.splitlines()
    name = "qtool_requests_finished_total{"
    return sum(int(float(line.split()[-1])) for line in lines if line.startswith(name))


class TestSharing:
    def test_a_prompt_that_came_before_is_not_computed_again_except_for_another_salt(
        self, tiny_model_folder: Path
    ) -> None:
        with real_server(tiny_model_folder) as server:
            texts, reused = [], []
            for salt in (None, None, "tenant", "tenant"):
                answer = server.post(
                    TEXTS, prompt=[7] * 40, temperature=0, max_tokens=4, cache_salt=salt
                )
                texts.append(answer.json()["choices"][0]["text"])
                wait_until(lambda: server.engine.stats().num_running == 0)
                reused.append(server.engine.stats().reused_tokens)
            assert reused == [0, 32, 32, 64] and len(set(texts)) == 1
            metrics = server.http.get("/metrics").text
            assert "qtool_reused_tokens_total 64.0" in metrics

    def test_choices_of_one_prompt_compute_it_once(self, tiny_model_folder: Path) -> None:
        with real_server(tiny_model_folder, enable_prefix_caching=False) as server:
            answer = server.post(CHATS, messages=HELLO, n=3, max_tokens=4, ignore_eos=True)
            assert len(answer.json()["choices"]) == 3
            length = answer.json()["usage"]["prompt_tokens"]
            wait_until(lambda: server.engine.stats().num_running == 0)
            assert server.engine.stats().reused_tokens == 2 * (length - 1)


class TestTimeouts:
    @pytest.mark.parametrize("stream", [False, True])
    def test_a_request_whose_time_has_passed_is_a_504_and_leaves_nothing(
        self, server: RealServer, stream: bool
    ) -> None:
        body = {"prompt": "The", "max_tokens": 200, "ignore_eos": True, "timeout": 1e-6}
        answer = server.post(TEXTS, stream=stream, **body)
        if stream:
            assert "timeout has passed" in answer.text and "[DONE]" not in answer.text
        else:
            assert answer.status_code == 504
            assert answer.json()["error"]["code"] == "timeout"
        wait_until(lambda: server.engine.stats().blocks_used == 0)
        assert server.post(TEXTS, prompt="The", max_tokens=2, timeout=60.0).status_code == 200

    @pytest.mark.parametrize("timeout", [0, -1.0, "5"])
    def test_a_time_that_is_none_is_a_400(self, server: RealServer, timeout: object) -> None:
        answer = server.post(TEXTS, prompt="The", timeout=timeout)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "timeout"
