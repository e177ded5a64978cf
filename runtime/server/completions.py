"""Answers of /v1/completions, whole and in chunks.

Choice i belongs to prompt i // n. With ``echo`` a choice begins with its prompt: text, and
log-probabilities if asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from qtool.runtime.outputs import CompletionOutput, OutputDelta
from qtool.runtime.server.interfaces import JsonObject
from qtool.runtime.server.logprobs import (
    CompletionLogprobs,
    TextOffsets,
    TokenStrings,
    prompt_logprobs,
)
from qtool.runtime.server.prompts import Prompt
from qtool.runtime.server.protocol import CompletionBody
from qtool.runtime.server.reply import Choice, Envelope

_KIND = "text_completion"


class CompletionReply:
    """Holds, per choice, how far its text has come."""

    def __init__(
        self,
        body: CompletionBody,
        envelope: Envelope,
        strings: TokenStrings,
        prompts: Sequence[Prompt],
    ) -> None:
        self._body = body
        self._envelope = envelope
        self._strings = strings
        self._prompts = [prompt for prompt in prompts for _ in range(body.num_choices)]
        self._logprobs = [self._logprobs_builder(prompt) for prompt in self._prompts]
        self._begun = [False] * len(self._prompts)

    def whole(self, choices: Sequence[Choice]) -> JsonObject:
        """The answer to a plain request."""
        tokens = sum(len(choice.output.token_ids) for choice in choices)
        return self._envelope.whole(_KIND, map(self._choice, choices), tokens)

    def opening(self) -> Iterator[JsonObject]:
        """Nothing: text completions have no role."""
        return iter(())

    def chunks(self, index: int, delta: OutputDelta) -> Iterator[JsonObject]:
        """One chunk, unless there is nothing to tell."""
        self._envelope.count(delta)
        scored = self._body.logprobs is not None and bool(delta.token_ids)
        echoes = bool(self._body.echo) and not self._begun[index]
        if delta.text or scored or echoes or delta.finish_reason is not None:
            piece = Choice(CompletionOutput(index))
            piece.extend(delta)
            yield self._envelope.chunk(_KIND, self._fields(piece))

    def closing(self) -> Iterator[JsonObject]:
        """The usage, when asked for."""
        return self._envelope.last(_KIND)

    def _choice(self, choice: Choice) -> JsonObject:
        fields = self._fields(choice)
        if self._body.prompt_logprobs is not None and choice.prompt_logprobs is not None:
            num_top = self._body.prompt_logprobs
            scores = prompt_logprobs(choice.prompt_logprobs, self._strings, num_top)
            fields["prompt_logprobs"] = scores
        return fields

    def _fields(self, piece: Choice) -> JsonObject:
        """One choice's entry, for the whole of it or a piece. The first one has the echo."""
        output = piece.output
        echoes = bool(self._body.echo) and not self._begun[output.index]
        self._begun[output.index] = True
        prompt = self._prompts[output.index] if echoes else Prompt(())
        logprobs = None
        if self._body.logprobs is not None:
            scores = (
                (*(piece.prompt_logprobs or ()), *output.logprobs) if echoes else output.logprobs
            )
            ids = (*prompt.token_ids, *output.token_ids)
            logprobs = self._logprobs[output.index].build(ids, scores)
        return {
            "index": output.index,
            "text": prompt.text + output.text,
            "logprobs": logprobs,
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
        }

    def _logprobs_builder(self, prompt: Prompt) -> CompletionLogprobs:
        show_special = self._body.skip_special_tokens is False
        offsets = TextOffsets(self._strings, prompt.text, show_special)
        return CompletionLogprobs(self._strings, self._body.logprobs or 0, offsets)
