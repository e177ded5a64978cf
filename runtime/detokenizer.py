"""Tokens to text while they arrive: whole characters only, cut at stop strings. No torch here.

A client must never see text that later tokens change. Two things can change it: a character
whose bytes are spread over several tokens, and a stop string that is not complete yet.
:class:`TextStream` holds back exactly these. Plain and streamed answers both come from it, so
joined deltas are the plain text by construction.

A tokenizer's decoder may treat the start of a text specially (SentencePiece drops one space),
so a token cannot be decoded alone. The stream decodes a short window that begins with tokens
whose text is already out and takes what is new; that costs O(1) per token, not O(n).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from qtool.runtime.sampling_params import SamplingParams

REPLACEMENT = "\ufffd"

# Text of so many prompt tokens comes before the first output token. One is enough for a
# leading space; more make it likely that not all are special tokens, which have no text.
CONTEXT_TOKENS = 5

# An unfinished character has at most 3 bytes, and a token at least one: what ends in more
# tokens without a whole character holds bytes that belong to none.
MAX_UNFINISHED_TOKENS = 3


class Decoder(Protocol):
    """The part of a tokenizer that a stream needs."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...


class TextStream:
    """Text of one completion, grown token by token.

    ``push`` every output token that belongs to the text (an end-of-sequence or stop token does
    not), then ``finish`` once, whatever ended the generation. After each call ``stop_reason``
    is the stop string that matched, if one did; ``push`` must not be called after that.

    The generation ends with the first character that completes a stop string, wherever the
    tokens are cut; of two completed by the same character the longer one counts. A stop string
    that is itself a special token matches that token, although ``skip_special_tokens`` leaves
    it out of the text. Stop strings lie wholly in the text of the token number ``min_tokens``
    and later ones.

    The text is that of the whole output decoded at once, after the prompt. One case differs: a
    SentencePiece decoder turns every byte token of an invalid run into U+FFFD, the valid ones
    that were sent long ago too; here a valid character stays.
    """

    def __init__(
        self, decoder: Decoder, prompt_token_ids: Sequence[int], params: SamplingParams
    ) -> None:
        self._text = _WindowedText(decoder, prompt_token_ids, params.skip_special_tokens)
        self._stops = StopMatcher(params.stop_strings, params.include_stop_str_in_output)
        self._decoder = decoder
        self._hides_special = params.skip_special_tokens
        self._min_tokens = params.min_tokens
        self._num_tokens = 0

    @property
    def stop_reason(self) -> str | None:
        """The stop string that ended the text."""
        return self._stops.matched

    def push(self, token_id: int) -> str:
        """Text that this token makes final; often empty, and never to be taken back."""
        assert self.stop_reason is None, "the text has ended"
        self._num_tokens += 1
        text = self._text.push(token_id)
        if self._num_tokens < self._min_tokens:
            return text
        hidden = self._hidden_stop(token_id) if not text else None
        if hidden is not None:
            return self._stops.push(self._text.flush()) + self._stops.end(hidden)
        return self._stops.push(text)

    def finish(self) -> str:
        """What was held back: an unfinished character as U+FFFD, and the start of a stop string.

        Empty after a stop string. The rest can itself hold one: see ``stop_reason``.
        """
        if self.stop_reason is not None:
            return ""
        return self._stops.push(self._text.flush()) + self._stops.flush()

    def _hidden_stop(self, token_id: int) -> str | None:
        """The stop string whose special token this is, left out of the text."""
        if not self._hides_special or not self._stops.strings:
            return None
        text = self._decoder.decode([token_id], skip_special_tokens=False)
        return text if text in self._stops.strings else None


class _WindowedText:
    """Decodes a growing list of tokens; its text never ends inside a character."""

    def __init__(
        self, decoder: Decoder, prompt_token_ids: Sequence[int], skip_special_tokens: bool
    ) -> None:
        self._decoder = decoder
        self._skip = skip_special_tokens
        # The window is the known and the pending tokens; ``_out`` is how its text begins, as far
        # as that was given out. It never ends with a replacement character.
        self._known, self._out = self._context(prompt_token_ids)
        self._pending: list[int] = []

    def push(self, token_id: int) -> str:
        """Text of all tokens so far, up to the last whole character, less what is out."""
        self._pending.append(token_id)
        text = self._decode(self._known + self._pending)
        if not text.endswith(REPLACEMENT):
            return self._settle(text)
        # Twice, because a decoder may drop the first space of a text.
        if not self._decode([token_id, token_id]):
            self._pending.pop()
            return ""
        delta = self._give_out(text.rstrip(REPLACEMENT))
        return delta + self._give_up_oldest()

    def flush(self) -> str:
        """Text of the pending tokens, unfinished or not."""
        return self._settle(self._decode(self._known + self._pending))

    def _give_out(self, text: str) -> str:
        """What is new in ``text``, the beginning of the window's."""
        if not text.startswith(self._out):
            return ""
        delta = text[len(self._out) :]
        self._out = text
        return delta

    def _settle(self, text: str) -> str:
        """Give out ``text``, all of the window's, and begin the next window."""
        delta = self._new(text, self._pending)
        if delta:
            self._known, self._out = self._pending, self._decode(self._pending)
            self._pending = []
        elif self._out:
            # Tokens without text, such as ignored ends of sequence, must not lengthen the window.
            self._pending = []
        return delta

    def _give_up_oldest(self) -> str:
        """Give out the bytes that can no longer become a character."""
        split = len(self._pending) - MAX_UNFINISHED_TOKENS
        if split < 1 or not self._is_harmless(split):
            return ""
        oldest, self._pending = self._pending[:split], self._pending[split:]
        text = self._decode(self._known + oldest)
        if self._out.startswith(text):
            delta, self._out = "", self._out[len(text) :]
        else:
            delta, self._out = self._new(text, oldest), ""
        # Bytes of no character would spoil what a SentencePiece decoder makes of those after.
        self._known = []
        text = self._decode(self._pending)
        return delta if text.endswith(REPLACEMENT) else delta + self._settle(text)

    def _new(self, text: str, tokens: list[int]) -> str:
        """What ``tokens``, the last of the window, add when the window's text is ``text``."""
        if text.startswith(self._out):
            return text[len(self._out) :]
        return self._decode(tokens)

    def _is_harmless(self, split: int) -> bool:
        """Whether no character is cut in two before ``pending[split]``.

        Cutting a character, finished or not, makes replacement characters of both its parts.
        """
        parts = self._pending[:split], self._pending[split:]
        cut = sum(self._decode(part).count(REPLACEMENT) for part in parts)
        return cut <= self._decode(self._pending).count(REPLACEMENT)

    def _context(self, prompt_token_ids: Sequence[int]) -> tuple[list[int], str]:
        """The last few prompt tokens and their text.

        More of them where byte tokens begin inside a character, which spoils the rest of their
        run; none for a prompt that ends inside one.
        """
        for size in range(CONTEXT_TOKENS, CONTEXT_TOKENS + MAX_UNFINISHED_TOKENS + 1):
            tokens = list(prompt_token_ids[-size:])
            text = self._decode(tokens)
            if not text.endswith(REPLACEMENT):
                return tokens, text
        return [], ""

    def _decode(self, tokens: list[int]) -> str:
        return self._decoder.decode(tokens, skip_special_tokens=self._skip)


class StopMatcher:
    """Finds the first stop string completed in a text that arrives in pieces.

    Each string is searched by the algorithm of Knuth, Morris and Pratt (1977), so a character
    costs O(number of strings), and the state of the search is what has to be held back: the
    longest end of the text that begins some stop string.
    """

    def __init__(self, strings: Sequence[str], include: bool) -> None:
        self.strings = frozenset(strings)
        self.matched: str | None = None
        self._include = include
        # Longest first: of two completed by one character the longer one counts.
        self._searches = [_PrefixSearch(s) for s in sorted(self.strings, key=len, reverse=True)]
        self._held = ""

    def push(self, text: str) -> str:
        """What of the text so far is final; nothing may be pushed after a match."""
        start = len(self._held)
        self._held += text
        if not self._searches:
            return self.flush()
        for end, character in enumerate(text, start=start + 1):
            completed = [s.string for s in self._searches if s.step(character)]
            if completed:
                self._held = self._held[: end - len(completed[0])]
                return self.end(completed[0])
        keep = max(search.length for search in self._searches)
        out = self._held[: len(self._held) - keep]
        self._held = self._held[len(out) :]
        return out

    def end(self, string: str) -> str:
        """End the text with the stop string ``string``; a match found before this one stays."""
        if self.matched is not None:
            return ""
        self.matched = string
        return self.flush() + (string if self._include else "")

    def flush(self) -> str:
        """The text held back."""
        held, self._held = self._held, ""
        return held


class _PrefixSearch:
    """Length of the longest prefix of ``string`` that ends the text read so far."""

    def __init__(self, string: str) -> None:
        self.string = string
        self.length = 0
        self._borders = _borders(string)

    def step(self, character: str) -> bool:
        """Read one character; true if it completes the string."""
        while self.length and self.string[self.length] != character:
            self.length = self._borders[self.length - 1]
        self.length += self.string[self.length] == character
        if self.length < len(self.string):
            return False
        self.length = self._borders[-1]
        return True


def _borders(string: str) -> list[int]:
    """For each prefix the length of its longest proper prefix that is also its end."""
    borders, length = [0], 0
    for character in string[1:]:
        while length and string[length] != character:
            length = borders[length - 1]
        length += string[length] == character
        borders.append(length)
    return borders
