"""What the engine hands back, token by token and as a whole. No torch here."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "abort"]

# The stop reason of a request that was aborted because its time had passed.
DEADLINE = "deadline"


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability of one token under the unmodified model (float, finite, <= 0)."""

    token_id: int
    logprob: float
    rank: int  # 1 is the likeliest


@dataclass(frozen=True, slots=True)
class Logprobs:
    """One position: the token that stands there, then the likeliest ones in order."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True)
class OutputDelta:
    """What one engine step added to one request.

    ``text`` may be empty (characters split over tokens and possible stop strings are held
    back) and may hold text of earlier tokens. The last delta of a request has
    ``finish_reason``. ``prompt_logprobs`` comes once, in the first delta, when asked for; its
    first entry is ``None`` (nothing precedes the first token).
    """

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[Logprobs, ...] = ()
    prompt_logprobs: tuple[Logprobs | None, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None  # the stop string or stop token that matched


@dataclass(slots=True)
class CompletionOutput:
    """One completion of a prompt, grown from deltas."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None

    def extend(self, delta: OutputDelta) -> None:
        """Append a delta."""
        self.text += delta.text
        self.token_ids.extend(delta.token_ids)
        self.logprobs.extend(delta.logprobs)
        self.finish_reason = delta.finish_reason
        self.stop_reason = delta.stop_reason


@dataclass(slots=True)
class RequestOutput:
    """A prompt and its completions, as ``LLM.generate`` returns them."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[Logprobs | None] | None = None
