"""Log-probabilities in the two shapes of the OpenAI API, and vLLM's ``prompt_logprobs``."""

from __future__ import annotations

import codecs
import math
from collections.abc import Sequence

from qtool.errors import EngineError
from qtool.runtime.outputs import Logprobs, TokenLogprob
from qtool.runtime.server.interfaces import JsonObject, TextCodec

# JSON has no infinity. OpenAI sends this for a token of probability zero.
LOWEST_LOGPROB = -9999.0


def finite(logprob: float) -> float:
    """A number JSON can hold. Raises EngineError for NaN: the model's output is broken."""
    if math.isnan(logprob):
        raise EngineError("a log-probability is NaN: the model computed no distribution; reload it")
    return max(logprob, LOWEST_LOGPROB)


class TokenStrings:
    """Names of tokens in answers, looked up once each."""

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        self._names: dict[int, str] = {}

    def name(self, token_id: int) -> str:
        r"""The token's text; ``bytes:\xe4\xbd`` when its bytes are no whole characters.

        The text alone would be U+FFFD for all of these, and a mapping keyed by it lose tokens.
        """
        name = self._names.get(token_id)
        if name is None:
            name = self._names[token_id] = self._compute(token_id)
        return name

    def raw(self, token_id: int) -> bytes:
        """The token's bytes."""
        return self._codec.token_bytes(token_id)

    def in_text(self, token_id: int) -> bool:
        """False for a special token, which decoding leaves out."""
        ids = [token_id]
        return self._codec.decode(ids, True) == self._codec.decode(ids, False)

    def _compute(self, token_id: int) -> str:
        raw = self.raw(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


class TextOffsets:
    """Where in the text each token begins, counted in characters.

    Special tokens take no room unless the text shows them; a token that begins inside a
    character gets that character's place.
    """

    def __init__(self, strings: TokenStrings, known_text: str, show_special: bool) -> None:
        self._strings = strings
        self._known_text = known_text
        self._show_special = show_special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._position = 0

    def take(self, token_id: int) -> int:
        """Offset of the next token."""
        start = self._position
        if self._visible(token_id):
            self._position += len(self._decoder.decode(self._strings.raw(token_id)))
        return start

    def _visible(self, token_id: int) -> bool:
        if self._show_special or self._strings.in_text(token_id):
            return True
        return self._known_text.startswith(self._strings.name(token_id), self._position)


class CompletionLogprobs:
    """Builds the ``logprobs`` object of /v1/completions, over one choice's chunks."""

    def __init__(self, strings: TokenStrings, num_top: int, offsets: TextOffsets) -> None:
        self._strings = strings
        self._num_top = num_top
        self._offsets = offsets

    def build(self, token_ids: Sequence[int], positions: Sequence[Logprobs | None]) -> JsonObject:
        """One entry a token; ``None`` stands where nothing precedes the token."""
        return {
            "tokens": [self._strings.name(t) for t in token_ids],
            "token_logprobs": [None if p is None else finite(p.chosen.logprob) for p in positions],
            "top_logprobs": [None if p is None else self._top(p) for p in positions],
            "text_offset": [self._offsets.take(t) for t in token_ids],
        }

    def _top(self, position: Logprobs) -> dict[str, float]:
        """The likeliest tokens, and the one that stands there: up to ``num_top`` + 1 entries."""
        top: dict[str, float] = {}
        for entry in (*position.top[: self._num_top], position.chosen):
            # Of two tokens with one name the likelier one stays.
            top.setdefault(self._strings.name(entry.token_id), finite(entry.logprob))
        return top


def chat_logprobs(positions: Sequence[Logprobs], strings: TokenStrings, num_top: int) -> JsonObject:
    """The ``logprobs`` object of a chat choice or chunk."""

    def entry(token: TokenLogprob) -> JsonObject:
        return {
            "token": strings.name(token.token_id),
            "logprob": finite(token.logprob),
            "bytes": list(strings.raw(token.token_id)),
        }

    content = [
        {**entry(p.chosen), "top_logprobs": [entry(t) for t in p.top[:num_top]]} for p in positions
    ]
    return {"content": content, "refusal": None}


def prompt_logprobs(
    positions: Sequence[Logprobs | None], strings: TokenStrings, num_top: int
) -> list[JsonObject | None]:
    """vLLM's extension: token id (as text) to logprob, rank and name, per prompt position."""

    def entry(token: TokenLogprob) -> JsonObject:
        name = strings.name(token.token_id)
        return {"logprob": finite(token.logprob), "rank": token.rank, "decoded_token": name}

    def entries(position: Logprobs) -> JsonObject:
        return {str(t.token_id): entry(t) for t in (*position.top[:num_top], position.chosen)}

    return [None if position is None else entries(position) for position in positions]
