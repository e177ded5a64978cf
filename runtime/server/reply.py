"""What both kinds of answers share: envelope, usage, and the choices a whole answer grows from.

A reply is pure: deltas go in, JSON objects come out. It knows nothing of sockets.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from qtool.runtime.outputs import CompletionOutput, Logprobs, OutputDelta
from qtool.runtime.server.interfaces import JsonObject
from qtool.runtime.server.protocol import GenerationBody


class Reply(Protocol):
    """An answer in the making. ``index`` numbers engine requests and choices alike."""

    def whole(self, choices: Sequence[Choice]) -> JsonObject:
        """The answer to a plain request."""
        ...

    def opening(self) -> Iterator[JsonObject]:
        """Chunks before the first token."""
        ...

    def chunks(self, index: int, delta: OutputDelta) -> Iterator[JsonObject]:
        """Chunks for one delta."""
        ...

    def closing(self) -> Iterator[JsonObject]:
        """Chunks after the last token."""
        ...


@dataclass(slots=True)
class Choice:
    """All deltas of one engine request."""

    output: CompletionOutput
    prompt_logprobs: tuple[Logprobs | None, ...] | None = None

    def extend(self, delta: OutputDelta) -> None:
        """Append a delta."""
        self.output.extend(delta)
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = delta.prompt_logprobs


def usage(prompt_tokens: int, completion_tokens: int) -> JsonObject:
    """The ``usage`` object. A prompt counts once, however many completions it gets."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


@dataclass(slots=True)
class Envelope:
    """The fields around the choices, the same in every chunk of one answer."""

    id: str
    created: int  # seconds since 1970
    model: str
    prompt_tokens: int
    include_usage: bool = False
    usage_in_chunks: bool = False
    completion_tokens: int = field(default=0, init=False)

    @classmethod
    def of(
        cls, body: GenerationBody, id_: str, created: int, model: str, prompt_tokens: int
    ) -> Envelope:
        """With what ``stream_options`` ask for."""
        options = body.stream_options
        include = options is not None and bool(options.include_usage)
        continuous = include and options is not None and bool(options.continuous_usage_stats)
        return cls(id_, created, model, prompt_tokens, include, continuous)

    def count(self, delta: OutputDelta) -> None:
        """Add a delta's tokens to the usage."""
        self.completion_tokens += len(delta.token_ids)

    def whole(self, kind: str, choices: Iterable[JsonObject], tokens: int) -> JsonObject:
        """A plain answer whose choices have ``tokens`` tokens together."""
        return {**self._head(kind, choices), "usage": usage(self.prompt_tokens, tokens)}

    def chunk(self, kind: str, choice: JsonObject) -> JsonObject:
        """One chunk. With ``include_usage`` only the last one has usage, the others ``null``."""
        chunk = self._head(kind, [choice])
        if self.include_usage:
            chunk["usage"] = self._usage_so_far() if self.usage_in_chunks else None
        return chunk

    def last(self, kind: str) -> Iterator[JsonObject]:
        """The chunk without choices that ``include_usage`` asks for."""
        if self.include_usage:
            yield {**self._head(kind, []), "usage": self._usage_so_far()}

    def _usage_so_far(self) -> JsonObject:
        return usage(self.prompt_tokens, self.completion_tokens)

    def _head(self, kind: str, choices: Iterable[JsonObject]) -> JsonObject:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": list(choices),
        }
