"""Joined deltas of the engine are the plain text, however it is cut and whatever stops it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from qtool.runtime.engine import Engine
from qtool.runtime.options import EngineOptions
from qtool.runtime.outputs import CompletionOutput
from qtool.runtime.request import Request
from qtool.runtime.sampling_params import SamplingParams
from support.scripted_model import scripted_model
from support.text import PIECES, ByteDecoder, cut_bytes, random_stops, stopped_text

CASES, AT_A_TIME = 500, 25
EOS = 0


class _Codec(ByteDecoder):
    """Token 0 ends a text and is not shown; the next ones are prompts, the others pieces."""

    eos_token_ids = frozenset({EOS})

    def __init__(self, prompts: int) -> None:
        super().__init__([b"</s>", *[b"?"] * prompts], special=[EOS])

    def bad_words_ids(self, words: Sequence[str]) -> list[tuple[int, ...]]:
        return []


@dataclass(frozen=True)
class _Case:
    """Tokens the model writes, and when it is stopped."""

    tokens: tuple[int, ...]
    limit: int
    stops: tuple[str, ...]
    include: bool

    def params(self) -> SamplingParams:
        return SamplingParams(
            temperature=0,
            max_tokens=self.limit,
            stop=self.stops,
            include_stop_str_in_output=self.include,
        )

    def expected(self, codec: _Codec) -> tuple[str, str, str | None]:
        """Text, finish reason and stop reason by definition: cut the whole text."""
        written = codec.decode(self.tokens[: self.limit])
        text, stop = stopped_text(written, self.stops, 0, self.include)
        ends = stop is not None or self.limit > len(self.tokens)
        return text, "stop" if ends else "length", stop


def _make_case(rng: random.Random, codec: _Codec) -> _Case:
    text = "".join(rng.choices(PIECES, k=rng.randint(1, 30)))
    data = text.encode()
    if rng.random() < 0.2:
        data = data[: -rng.randint(1, 3)] or data  # the model itself stops inside a character
    first = len(codec.tokens)
    codec.tokens += cut_bytes(data, rng)
    tokens = tuple(range(first, len(codec.tokens)))
    stops = tuple(random_stops(text, rng))
    return _Case(tokens, rng.randint(1, 2 * len(tokens)), stops, rng.random() < 0.5)


def _run(engine: Engine) -> dict[str, list[Any]]:
    deltas: dict[str, list[Any]] = {}
    while engine.has_work:
        for delta in engine.step():
            deltas.setdefault(delta.request_id, []).append(delta)
    return deltas


@pytest.mark.usefixtures("expecting_nothing")
def test_joined_deltas_equal_the_plain_text_in_500_random_cases(tiny_model_folder: Path) -> None:
    rng = random.Random(11)
    reasons, preemptions = {"length": 0, "stop": 0, "end": 0}, 0
    for _ in range(CASES // AT_A_TIME):
        codec = _Codec(AT_A_TIME)
        cases = {prompt: _make_case(rng, codec) for prompt in range(1, AT_A_TIME + 1)}
        scripts = {prompt: case.tokens for prompt, case in cases.items()}
        model = scripted_model(tiny_model_folder, scripts, EOS, len(codec.tokens))
        # Few blocks: some sequences are preempted and computed anew in the middle of a character.
        memory = 28 * 4 * model.decoder.kv_bytes_per_token
        options = EngineOptions(
            model="scripted", kv_cache_memory=memory, max_num_seqs=AT_A_TIME, block_size=4
        )
        engine = Engine(model, codec, options)  # type: ignore[arg-type]
        for prompt, case in cases.items():
            engine.add(Request(str(prompt), (prompt,), case.params()))
        deltas = _run(engine)
        for prompt, case in cases.items():
            output = CompletionOutput(0)
            for delta in deltas[str(prompt)]:
                assert output.finish_reason is None, "nothing comes after the end"
                output.extend(delta)
            expected = case.expected(codec)
            found = (output.text, output.finish_reason, output.stop_reason)
            assert found == expected, (case, [codec.tokens[t] for t in case.tokens])
            reasons["end" if expected[1:] == ("stop", None) else expected[1]] += 1
        preemptions += engine.stats().preemptions
        assert engine.stats().blocks_used == 0
        engine.check_integrity()
    assert min(reasons.values()) > 50, f"the cases must end in every way: {reasons}"
    assert preemptions > 20


@pytest.mark.parametrize("limit", range(1, 9))
def test_a_character_cut_by_the_limit_ends_as_the_decoder_says(
    tiny_model_folder: Path, limit: int
) -> None:
    codec = _Codec(prompts=1)
    codec.tokens += [bytes([byte]) for byte in "é中🙂".encode()]
    tokens = tuple(range(2, len(codec.tokens)))
    model = scripted_model(tiny_model_folder, {1: tokens}, EOS, len(codec.tokens))
    engine = Engine(model, codec, EngineOptions(model="s", kv_cache_memory=10**6))  # type: ignore[arg-type]
    engine.add(Request("r", (1,), SamplingParams(temperature=0, max_tokens=limit)))
    text = "".join(delta.text for delta in _run(engine)["r"])
    assert text == codec.decode(tokens[:limit])
