"""Joined deltas are the plain text, whatever way characters and stop strings are cut."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from qtool.runtime.detokenizer import REPLACEMENT, Decoder, StopMatcher, TextStream
from qtool.runtime.sampling_params import SamplingParams
from support.models import TRAINING_TEXT, make_tokenizer
from support.text import (
    PIECES,
    ByteDecoder,
    cut_bytes,
    make_byte_fallback_tokenizer,
    random_stops,
    stopped_text,
)


@cache
def _byte_level() -> Tokenizer:
    return make_tokenizer().backend_tokenizer


_byte_fallback = cache(make_byte_fallback_tokenizer)


def _encode(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False).ids


def _stream(
    decoder: Decoder, ids: Sequence[int], prompt: Sequence[int] = (), **params: object
) -> tuple[list[str], str | None]:
    """Deltas of a stream over ``ids`` that obeys its stop strings, and its stop reason."""
    stream = TextStream(decoder, prompt, SamplingParams(**{"max_tokens": None, **params}))
    deltas = []
    for token in ids:
        deltas.append(stream.push(token))
        if stream.stop_reason is not None:
            break
    return [*deltas, stream.finish()], stream.stop_reason


def _text(decoder: Decoder, ids: Sequence[int], prompt: Sequence[int] = (), **kw: object) -> str:
    return "".join(_stream(decoder, ids, prompt, **kw)[0])


def test_joined_deltas_equal_the_plain_text_in_500_random_cases() -> None:
    rng = random.Random(3)
    hits = 0
    for case in range(500):
        text = "".join(rng.choices(PIECES, k=rng.randint(1, 40)))
        data = text.encode()
        if case % 5 == 0:
            data = data[: -rng.randint(1, 3)]  # the limit cuts a character
        decoder = ByteDecoder(cut_bytes(data, rng))
        ids = range(len(decoder.tokens))
        plain = decoder.decode(ids)
        stops, include = random_stops(text, rng), rng.random() < 0.5
        min_tokens = rng.choice([0, 0, rng.randint(1, 12)])
        params = {"stop": stops, "include_stop_str_in_output": include, "min_tokens": min_tokens}

        assert _text(decoder, ids) == plain
        deltas, reason = _stream(decoder, ids, **params)

        free = len("".join(_stream(decoder, ids)[0][: max(min_tokens - 1, 0)]))
        expected = stopped_text(plain, stops, free, include)
        assert ("".join(deltas), reason) == expected, (case, decoder.tokens, params)
        hits += reason is not None
    assert hits > 150, "the cases must exercise stop strings"


@pytest.mark.parametrize("make", [_byte_level, _byte_fallback], ids=["bytes", "fallback"])
def test_a_real_tokenizer_streams_what_it_decodes_at_once(
    make: Callable[[], Tokenizer],
) -> None:
    real, rng = make(), random.Random(4)
    for _ in range(150):
        ids = _encode(real, "".join(rng.choices([*TRAINING_TEXT, *PIECES], k=3)))
        split = rng.randint(1, len(ids))
        whole, prompt = real.decode(ids), real.decode(ids[:split])
        if prompt.endswith(REPLACEMENT):  # it ends inside a character
            continue
        assert prompt + _text(real, ids[split:], ids[:split]) == whole


# A special token, characters with half a neighbour, halves, and bytes of no character.
AWKWARD = [b"</s>", b"a\x80", b"b\xe5", b"\xa5\xbd", b"\xa5\xbd\xf0\x9f", b"\x99\x82\xff", b"\x80"]


@settings(max_examples=400)
@given(
    st.lists(st.integers(0, len(AWKWARD) - 1) | st.integers(0, 255 + len(AWKWARD))), st.booleans()
)
def test_any_bytes_come_out_as_decoded_at_once(ids: list[int], skip: bool) -> None:
    decoder = ByteDecoder([*AWKWARD, *(bytes([byte]) for byte in range(256))], special=[0])
    assert _text(decoder, ids, skip_special_tokens=skip) == decoder.decode(ids, skip)


@given(st.lists(st.sampled_from([0x80, 0xE5, 0xA5, 0xBD, 0xF0, 0x9F, 0x99, 0x82, 0x41])))
def test_a_broken_character_is_held_for_three_tokens_at_most(ids: list[int]) -> None:
    decoder = ByteDecoder([bytes([byte]) for byte in range(256)])
    stream = TextStream(decoder, (), SamplingParams())
    out = ""
    for count, token in enumerate(ids, start=1):
        out += stream.push(token)
        # Every token is one byte, and three bytes make at most three characters.
        assert len(decoder.decode(ids[:count])) - len(out) <= 3


def test_an_unfinished_character_is_held_back_until_it_is_whole() -> None:
    decoder = ByteDecoder([b"x", b"\xf0", b"\x9f\x99", b"\x82", b"y"])
    assert _stream(decoder, range(5))[0] == ["x", "", "", "🙂", "y", ""]


def test_whole_characters_before_an_unfinished_one_are_not_held_back() -> None:
    decoder = ByteDecoder(["中".encode() + b"\xe6", b"\x96\x87" + b"\xe5"])
    assert _stream(decoder, range(2))[0] == ["中", "文", REPLACEMENT]


def test_a_character_cut_by_the_limit_ends_as_a_replacement_character() -> None:
    decoder = ByteDecoder([b"ok ", b"\xf0\x9f", b"\x99"])
    assert _text(decoder, range(3)) == decoder.decode(range(3)) == "ok \ufffd"


def test_a_valid_byte_token_survives_a_broken_neighbour() -> None:
    real = _byte_fallback()
    good, bad = _encode(real, "字")[-3:], real.token_to_id("<0xFF>")
    assert _text(real, [*good, bad, *good]) == f"字{REPLACEMENT}字"
    assert _text(real, [*good, *good[:2]]) == f"字{REPLACEMENT}{REPLACEMENT}"
    space = real.token_to_id("<0x20>")
    assert _text(real, [good[0], space, *_encode(real, "x")[1:]]) == f"{REPLACEMENT * 2}x"


def test_a_leading_space_after_the_prompt_stays() -> None:
    real = _byte_fallback()
    word = [real.token_to_id("▁"), *_encode(real, "zfox")[2:]]
    assert real.decode(word) == "fox"
    assert _text(real, word, prompt=_encode(real, "The quick brown")) == " fox"


def test_a_skipped_token_does_not_cost_the_space_after_it() -> None:
    real = _byte_fallback()
    space, eos = real.token_to_id("▁"), real.token_to_id("</s>")
    ids = [*_encode(real, "dog"), eos, space, *_encode(real, "fox")]
    assert _text(real, ids, prompt=[eos], ignore_eos=True) == real.decode(ids)


def test_skipped_tokens_inside_a_character_leave_it_whole() -> None:
    decoder = ByteDecoder([b"\xe5", b"</s>", b"\xa5\xbd"], special=[1])
    assert _stream(decoder, [0, 1, 1, 1, 1, 2])[0] == ["", "", "", "", "", "好", ""]


def test_an_endless_run_of_skipped_or_broken_tokens_costs_the_same_each() -> None:
    class Counting(ByteDecoder):
        longest = 0

        def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
            self.longest = max(self.longest, len(ids))
            return super().decode(ids, skip_special_tokens)

    decoder = Counting([b"x", b"</s>", b"\x80"], special=[1])
    text = _text(decoder, [0, *[1] * 500, *[2] * 500, 0])
    assert text == "x" + REPLACEMENT * 500 + "x"
    assert decoder.longest <= 8, "the decoded window must not grow with the output"


def test_a_stop_string_split_over_tokens_is_never_shown_in_part() -> None:
    decoder = ByteDecoder([b"one", b" #", b"#", b"#END", b" two"])
    deltas, reason = _stream(decoder, range(5), stop=["###"])
    assert (deltas, reason) == (["one", " ", "", "", ""], "###")


def test_what_only_looked_like_a_stop_string_comes_out_with_the_next_token() -> None:
    decoder = ByteDecoder([b"a#", b"#", b"b"])
    assert _stream(decoder, range(3), stop="###")[0] == ["a", "", "##b", ""]


def test_the_start_of_a_stop_string_comes_out_at_the_end() -> None:
    decoder = ByteDecoder([b"a#", b"#"])
    assert _stream(decoder, range(2), stop="###") == (["a", "", "##"], None)


def test_a_stop_string_inside_a_token_cuts_the_text_there() -> None:
    decoder = ByteDecoder([b"left STOP right"])
    assert _stream(decoder, [0], stop="STOP") == (["left ", ""], "STOP")
    assert _text(decoder, [0], stop="STOP", include_stop_str_in_output=True) == "left STOP"


@pytest.mark.parametrize("tokens", [[b"abcd"], [b"a", b"b", b"c", b"d"], [b"ab", b"cd"]])
@pytest.mark.parametrize(
    ("stops", "text", "reason"),
    [
        (["ab", "abc"], "", "ab"),  # one begins the other: the shorter is complete first
        (["bcd", "c"], "ab", "c"),  # one inside the other
        (["c", "bc"], "a", "bc"),  # complete at once: the longer
        (["d", "b"], "a", "b"),
        (["x"], "abcd", None),
    ],
)
def test_the_first_completed_stop_string_wins_however_the_text_is_cut(
    tokens: list[bytes], stops: list[str], text: str, reason: str | None
) -> None:
    decoder = ByteDecoder(tokens)
    deltas, found = _stream(decoder, range(len(tokens)), stop=stops)
    assert ("".join(deltas), found) == (text, reason)


def test_stop_strings_are_not_looked_for_before_min_tokens() -> None:
    decoder = ByteDecoder([b"x.", b"y.", b"z."])
    assert _text(decoder, range(3), stop=".", min_tokens=2) == "x.y"
    assert _text(decoder, range(3), stop=".y", min_tokens=2) == "x.y.z."


def test_a_stop_string_that_is_a_hidden_special_token_stops() -> None:
    decoder = ByteDecoder([b"hi <", b"<|end|>", b" more"], special=[1])
    stops = ["<|end|>", "<|other|>"]
    assert _stream(decoder, range(3), stop=stops) == (["hi ", "<", ""], "<|end|>")
    shown = _text(decoder, range(3), stop=stops, include_stop_str_in_output=True)
    assert shown == "hi <<|end|>"
    assert _text(decoder, range(3), stop=stops, skip_special_tokens=False) == "hi <"
    assert _text(decoder, range(3), stop=stops, min_tokens=3) == "hi < more"


def test_a_hidden_stop_token_after_half_a_character_lets_the_half_out() -> None:
    decoder = ByteDecoder([b"\xf0\x9f", b"<|end|>"], special=[1])
    assert _stream(decoder, range(2), stop="<|end|>") == (["", REPLACEMENT, ""], "<|end|>")


@given(st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=5), max_size=4))
def test_only_a_possible_beginning_of_a_stop_string_is_held_back(
    text: str, stops: list[str]
) -> None:
    matcher, out = StopMatcher(stops, include=False), ""
    for end, character in enumerate(text, start=1):
        out += matcher.push(character)
        if matcher.matched is not None:
            break
        beginnings = {stop[:size] for stop in stops for size in range(len(stop))} | {""}
        longest = max(len(b) for b in beginnings if text[:end].endswith(b))
        assert out == text[: end - longest]
    assert (out + matcher.flush(), matcher.matched) == stopped_text(text, stops, 0, include=False)


def test_a_long_repetitive_stop_string_is_searched_in_linear_time() -> None:
    matcher = StopMatcher(["a" * 1023 + "b"], include=True)
    out = "".join(matcher.push("a" * 100) for _ in range(200))
    assert len(out) == 200 * 100 - 1023
    assert matcher.push("b") == "a" * 1023 + "b"
