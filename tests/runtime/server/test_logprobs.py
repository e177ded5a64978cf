from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qtool.errors import EngineError
from qtool.runtime.outputs import Logprobs, TokenLogprob
from qtool.runtime.server.logprobs import (
    CompletionLogprobs,
    TextOffsets,
    TokenStrings,
    finite,
    prompt_logprobs,
)
from support.fake_engine import BOS, EOS, ByteCodec, position

STRINGS = TokenStrings(ByteCodec())


def _offsets(ids: list[int], known_text: str = "", show_special: bool = False) -> list[int]:
    offsets = TextOffsets(STRINGS, known_text, show_special)
    return [offsets.take(token) for token in ids]


@given(st.text())
def test_a_token_begins_where_its_character_does(text: str) -> None:
    places = [place for place, char in enumerate(text) for _ in char.encode()]
    assert _offsets(list(text.encode())) == places


def test_special_tokens_take_room_only_where_the_text_shows_them() -> None:
    ids = [BOS, 97, EOS, 98]
    assert _offsets(ids) == [0, 0, 1, 1]
    assert _offsets(ids, show_special=True) == [0, 3, 4, 8]
    assert _offsets(ids, known_text="a</s>b") == [0, 0, 1, 5]


def test_pieces_of_characters_are_named_by_their_bytes() -> None:
    assert [STRINGS.name(t) for t in (97, 0xE4, BOS)] == ["a", "bytes:\\xe4", "<s>"]


def test_top_logprobs_hold_the_chosen_token_even_if_unlikely() -> None:
    chosen = TokenLogprob(98, -7.0, 30)
    likely = Logprobs(chosen, position(97, 2).top)
    builder = CompletionLogprobs(STRINGS, 2, TextOffsets(STRINGS, "", False))
    assert builder.build([98], [likely])["top_logprobs"] == [{"a": -0.5, "b": -1.5}]
    unlikely = Logprobs(TokenLogprob(122, -7.0, 30), position(97, 2).top)
    assert builder.build([122], [unlikely])["top_logprobs"] == [{"a": -0.5, "b": -1.5, "z": -7.0}]


def test_fewer_top_tokens_are_shown_than_computed() -> None:
    scores = prompt_logprobs([None, position(97, 5)], STRINGS, 1)
    assert scores == [None, {"97": {"logprob": -0.5, "rank": 1, "decoded_token": "a"}}]


def test_no_infinity_and_no_nan_comes_out() -> None:
    assert finite(-math.inf) == -9999.0
    assert finite(-1.5) == -1.5
    with pytest.raises(EngineError, match="NaN"):
        finite(math.nan)
