"""The unmodified ``openai`` client against a server with the real engine on a tiny model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from support.real_server import RealServer, real_server

CHAT: list[Any] = [
    {"role": "system", "content": "Answer briefly."},
    {"role": "user", "content": "你好 🙂"},
]
# Without end-of-sequence tokens the tiny model's answers have a length to rely on.
LONG = {"ignore_eos": True}


@pytest.fixture(scope="module")
def server(tiny_model_folder: Path) -> Iterator[RealServer]:
    with real_server(tiny_model_folder) as running:
        yield running


@pytest.fixture
def client(server: RealServer) -> openai.OpenAI:
    return server.openai


class TestCompletions:
    def test_a_plain_answer_counts_its_tokens(
        self, client: openai.OpenAI, server: RealServer
    ) -> None:
        answer = client.completions.create(
            model="tiny", prompt="The quick brown", max_tokens=9, temperature=0, extra_body=LONG
        )
        assert answer.object == "text_completion" and answer.model == "tiny"
        (choice,) = answer.choices
        assert choice.finish_reason == "length" and choice.text
        assert answer.usage is not None
        prompt_len = len(server.tokenizer.encode("The quick brown"))
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (prompt_len, 9)

    @pytest.mark.parametrize("temperature", [0, 1.5])
    def test_a_stream_joins_to_the_plain_answer(
        self, client: openai.OpenAI, temperature: float
    ) -> None:
        asked: dict[str, Any] = {
            "model": "tiny",
            "prompt": ["The quick", "世界"],
            "n": 2,
            "max_tokens": 24,
            "temperature": temperature,
            "seed": 7,
            "extra_body": LONG,
        }
        plain = client.completions.create(**asked)
        texts, reasons = [""] * 4, [""] * 4
        for chunk in client.completions.create(**asked, stream=True):
            for choice in chunk.choices:
                texts[choice.index] += choice.text
                reasons[choice.index] = choice.finish_reason or reasons[choice.index]
        assert texts == [choice.text for choice in plain.choices]
        assert reasons == ["length"] * 4
        distinct = len(set(texts))
        assert distinct == 2 if temperature == 0 else distinct == 4

    def test_a_seed_repeats_an_answer_and_another_gives_another(
        self, client: openai.OpenAI
    ) -> None:
        def ask(seed: int) -> str:
            answer = client.completions.create(
                model="tiny", prompt="The", max_tokens=16, temperature=1.5, seed=seed
            )
            return answer.choices[0].text

        assert ask(1) == ask(1) != ask(2)

    def test_echo_and_logprobs_describe_the_text(self, client: openai.OpenAI) -> None:
        prompt = "The quick brown fox"
        answer = client.completions.create(
            model="tiny", prompt=prompt, echo=True, logprobs=2, max_tokens=4, temperature=0,
            extra_body=LONG,
        )  # fmt: skip
        (choice,) = answer.choices
        assert choice.text.startswith(prompt)
        scores = choice.logprobs
        assert scores is not None and scores.token_logprobs and scores.tokens
        assert scores.text_offset and scores.top_logprobs
        assert scores.token_logprobs[0] is None
        assert all(value < 0 for value in scores.token_logprobs[1:] if value is not None)
        # Greedy: what was generated is the likeliest at its place.
        for token, top in list(zip(scores.tokens, scores.top_logprobs, strict=True))[-4:]:
            assert max(top, key=lambda name: top[name]) == token

    def test_a_stop_string_ends_the_text_before_it(self, client: openai.OpenAI) -> None:
        asked: dict[str, Any] = {"model": "tiny", "prompt": "The", "temperature": 0}
        whole = client.completions.create(**asked, max_tokens=20, extra_body=LONG).choices[0].text
        stop = whole[5:8]
        stopped = client.completions.create(**asked, max_tokens=20, stop=[stop, "###"])
        assert stopped.choices[0].text == whole[: whole.index(stop)]
        assert stopped.choices[0].finish_reason == "stop"


class TestChat:
    def test_an_answer_is_the_completion_of_the_rendered_conversation(
        self, client: openai.OpenAI, server: RealServer
    ) -> None:
        answer = client.chat.completions.create(
            model="tiny", messages=CHAT, max_completion_tokens=8, temperature=0, extra_body=LONG
        )
        ids = server.tokenizer.render_chat(CHAT)
        same = client.completions.create(
            model="tiny", prompt=ids, max_tokens=8, temperature=0, extra_body=LONG
        )
        (choice,) = answer.choices
        assert (choice.message.role, choice.finish_reason) == ("assistant", "length")
        assert choice.message.content == same.choices[0].text
        assert answer.usage is not None and answer.usage.prompt_tokens == len(ids)

    def test_a_stream_has_roles_deltas_logprobs_and_usage(self, client: openai.OpenAI) -> None:
        asked: dict[str, Any] = {
            "model": "tiny", "messages": CHAT, "max_tokens": 12, "temperature": 1.2, "seed": 3,
            "n": 2, "logprobs": True, "top_logprobs": 2, "extra_body": LONG,
        }  # fmt: skip
        plain = client.chat.completions.create(**asked)
        texts: list[str] = ["", ""]
        tokens: list[list[float]] = [[], []]
        roles, usage = set(), None
        stream = client.chat.completions.create(
            **asked, stream=True, stream_options={"include_usage": True}
        )
        for chunk in stream:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
                roles |= {(choice.index, choice.delta.role)} if choice.delta.role else set()
                if choice.logprobs and choice.logprobs.content:
                    tokens[choice.index] += [t.logprob for t in choice.logprobs.content]
        assert texts == [choice.message.content for choice in plain.choices]
        assert roles == {(0, "assistant"), (1, "assistant")}
        assert usage is not None and usage.completion_tokens == 24
        for choice, streamed in zip(plain.choices, tokens, strict=True):
            assert choice.logprobs is not None and choice.logprobs.content is not None
            assert [t.logprob for t in choice.logprobs.content] == streamed
            assert all(len(t.top_logprobs) == 2 for t in choice.logprobs.content)


class TestErrors:
    @pytest.mark.parametrize(
        ("change", "kind", "param"),
        [
            ({"temperature": -1}, openai.BadRequestError, "temperature"),
            ({"max_tokens": 10_000}, openai.BadRequestError, "max_tokens"),
            ({"prompt": [1, 384]}, openai.BadRequestError, "prompt"),
            ({"logit_bias": {"384": 1}}, openai.BadRequestError, "logit_bias"),
            ({"extra_body": {"stop_token_ids": [384]}}, openai.BadRequestError, "stop_token_ids"),
            ({"model": "gpt-x"}, openai.NotFoundError, "model"),
        ],
    )
    def test_a_refusal_is_the_clients_own_exception(
        self,
        client: openai.OpenAI,
        change: dict[str, Any],
        kind: type[openai.APIStatusError],
        param: str,
    ) -> None:
        for stream in (False, True):
            with pytest.raises(kind) as caught:
                client.completions.create(
                    **{"model": "tiny", "prompt": "The", "stream": stream, **change}
                )
            assert caught.value.param == param
            assert param in str(caught.value)

    def test_an_empty_conversation_is_one_too(self, client: openai.OpenAI) -> None:
        with pytest.raises(openai.BadRequestError, match="at least one message"):
            client.chat.completions.create(model="tiny", messages=[])


def test_models_are_listed(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "qtool"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_leaving_a_stream_early_frees_its_blocks(client: openai.OpenAI, server: RealServer) -> None:
    from support.http import wait_until

    with client.completions.create(
        model="tiny", prompt="The", max_tokens=200, stream=True, extra_body=LONG
    ) as stream:
        next(iter(stream))
    wait_until(lambda: server.engine.stats().blocks_used == 0)
    assert server.engine.stats().num_running == 0
