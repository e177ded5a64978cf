from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qtool.runtime.outputs import CompletionOutput, OutputDelta
from qtool.runtime.server.chat import ChatReply
from qtool.runtime.server.completions import CompletionReply
from qtool.runtime.server.logprobs import TokenStrings
from qtool.runtime.server.prompts import Prompt
from qtool.runtime.server.protocol import ChatBody, CompletionBody
from qtool.runtime.server.reply import Choice, Envelope, Reply
from support.fake_engine import ByteCodec, position

STRINGS = TokenStrings(ByteCodec())
PROMPT = Prompt((80, 58), "P:")
USAGE = {"include_usage": True}


def _reply(kind: str, n: int, **fields: Any) -> Reply:
    if kind == "chat":
        body = ChatBody(messages=[{"role": "user", "content": "x"}], n=n, **fields)
        return ChatReply(body, Envelope.of(body, "id", 1, "m", 2), STRINGS)
    text = CompletionBody(prompt="P:", n=n, **fields)
    return CompletionReply(text, Envelope.of(text, "id", 1, "m", 2), STRINGS, [PROMPT])


def _delta(text: str, finish: Any = None) -> OutputDelta:
    ids = tuple(text.encode())
    scores = tuple(position(token, 1) for token in ids)
    return OutputDelta("r", text, ids, scores, None, finish)


@st.composite
def schedules(draw: st.DrawFn) -> tuple[int, list[tuple[int, OutputDelta]]]:
    """Deltas of up to three choices, merged in any order that keeps each choice's own."""
    pieces = draw(st.lists(st.lists(st.text(max_size=3), max_size=5), min_size=1, max_size=3))
    queues = [
        [*(_delta(text) for text in texts), _delta("!", draw(st.sampled_from(["stop", "length"])))]
        for texts in pieces
    ]
    merged = []
    while any(queues):
        index = draw(st.sampled_from([i for i, queue in enumerate(queues) if queue]))
        merged.append((index, queues[index].pop(0)))
    return len(pieces), merged


def _whole(reply: Reply, n: int, deltas: list[tuple[int, OutputDelta]]) -> dict[str, Any]:
    choices = [Choice(CompletionOutput(index)) for index in range(n)]
    for index, delta in deltas:
        choices[index].extend(delta)
    return reply.whole(choices)


def _chunks(reply: Reply, deltas: list[tuple[int, OutputDelta]]) -> Iterator[dict[str, Any]]:
    yield from reply.opening()
    for index, delta in deltas:
        yield from reply.chunks(index, delta)
    yield from reply.closing()


@pytest.mark.parametrize("kind", ["chat", "text"])
@given(schedules())
def test_chunks_join_to_the_whole_answer(
    kind: str, schedule: tuple[int, list[tuple[int, OutputDelta]]]
) -> None:
    n, deltas = schedule
    extra = {"echo": True} if kind == "text" else {}
    whole = _whole(_reply(kind, n, **extra), n, deltas)
    stream = _reply(kind, n, stream=True, stream_options=USAGE, **extra)
    *chunks, usage = _chunks(stream, deltas)
    assert usage["usage"] == whole["usage"]
    for choice in whole["choices"]:
        own = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        if kind == "chat":
            text = "".join(c["delta"].get("content", "") for c in own)
            assert text == choice["message"]["content"]
        else:
            assert "".join(c["text"] for c in own) == choice["text"]
        ends = [c["finish_reason"] for c in own]
        assert ends == [None] * (len(own) - 1) + [choice["finish_reason"]]


def test_a_delta_without_text_makes_no_chunk_unless_something_is_to_tell() -> None:
    held_back = OutputDelta("r", "", (0xE4,), (position(0xE4, 1),))
    assert list(_reply("chat", 1).chunks(0, held_back)) == []
    assert list(_reply("text", 1).chunks(0, held_back)) == []
    assert len(list(_reply("chat", 1, logprobs=True).chunks(0, held_back))) == 1
    assert len(list(_reply("text", 1, logprobs=0).chunks(0, held_back))) == 1


def test_tokens_held_back_count_in_the_usage() -> None:
    reply = _reply("chat", 1, stream=True, stream_options=USAGE)
    deltas = [(0, OutputDelta("r", "", (0xE4,))), (0, OutputDelta("r", "", (), (), None, "stop"))]
    *_, usage = _chunks(reply, deltas)
    assert usage["usage"] == {"prompt_tokens": 2, "completion_tokens": 1, "total_tokens": 3}


def test_the_echo_comes_once_and_first() -> None:
    reply = _reply("text", 2, echo=True)
    chunks = _chunks(reply, [(1, _delta("a")), (0, _delta("b")), (1, _delta("c"))])
    texts = [(c["choices"][0]["index"], c["choices"][0]["text"]) for c in chunks]
    assert texts == [(1, "P:a"), (0, "P:b"), (1, "c")]
