"""Answers of /v1/chat/completions, whole and in chunks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from qtool.runtime.outputs import Logprobs, OutputDelta
from qtool.runtime.server.interfaces import JsonObject
from qtool.runtime.server.logprobs import TokenStrings, chat_logprobs, prompt_logprobs
from qtool.runtime.server.protocol import ChatBody
from qtool.runtime.server.reply import Choice, Envelope

_CHUNK = "chat.completion.chunk"


@dataclass(frozen=True, slots=True)
class ChatReply:
    """Per choice: a chunk with the role, chunks with content, one with ``finish_reason``."""

    body: ChatBody
    envelope: Envelope
    strings: TokenStrings

    def whole(self, choices: Sequence[Choice]) -> JsonObject:
        """The answer to a plain request."""
        tokens = sum(len(choice.output.token_ids) for choice in choices)
        answer = self.envelope.whole("chat.completion", map(self._choice, choices), tokens)
        scores = choices[0].prompt_logprobs
        if self.body.prompt_logprobs is not None and scores is not None:
            num_top = self.body.prompt_logprobs
            answer["prompt_logprobs"] = prompt_logprobs(scores, self.strings, num_top)
        return answer

    def opening(self) -> Iterator[JsonObject]:
        """The role, once for every choice."""
        for index in range(self.body.num_choices):
            yield self._chunk(index, {"role": "assistant", "content": ""})

    def chunks(self, index: int, delta: OutputDelta) -> Iterator[JsonObject]:
        """A content chunk if there is text or a log-probability, and the end if it is there."""
        self.envelope.count(delta)
        if delta.text or (self.body.logprobs and delta.logprobs):
            scores = self._logprobs(delta.logprobs)
            yield self._chunk(index, {"content": delta.text}, logprobs=scores)
        if delta.finish_reason is not None:
            reasons = {"finish_reason": delta.finish_reason, "stop_reason": delta.stop_reason}
            yield self._chunk(index, {}, **reasons)

    def closing(self) -> Iterator[JsonObject]:
        """The usage, when asked for."""
        return self.envelope.last(_CHUNK)

    def _choice(self, choice: Choice) -> JsonObject:
        output = choice.output
        return {
            "index": output.index,
            "message": {"role": "assistant", "content": output.text, "refusal": None},
            "logprobs": self._logprobs(output.logprobs),
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
        }

    def _chunk(self, index: int, delta: JsonObject, **fields: object) -> JsonObject:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        return self.envelope.chunk(_CHUNK, choice | fields)

    def _logprobs(self, positions: Sequence[Logprobs]) -> JsonObject | None:
        if not self.body.logprobs:
            return None
        return chat_logprobs(positions, self.strings, self.body.top_logprobs or 0)
