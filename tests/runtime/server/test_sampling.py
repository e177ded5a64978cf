from __future__ import annotations

from typing import Any

import pytest

from qtool.errors import RequestError
from qtool.runtime.sampling_params import SamplingParams
from qtool.runtime.server.errors import HttpError
from qtool.runtime.server.protocol import ChatBody, CompletionBody
from qtool.runtime.server.sampling import chat_params, completion_params
from support.fake_engine import fake_info

INFO = fake_info(max_model_len=100)


def _completion(prompt_len: int = 10, defaults: Any = None, **body: Any) -> SamplingParams:
    return completion_params(CompletionBody(prompt="x", **body), defaults or {}, INFO, prompt_len)


def _chat(prompt_len: int = 10, defaults: Any = None, **body: Any) -> SamplingParams:
    messages = [{"role": "user", "content": "x"}]
    return chat_params(ChatBody(messages=messages, **body), defaults or {}, INFO, prompt_len)


def test_every_field_arrives_under_its_name() -> None:
    fields: dict[str, Any] = {
        "n": 2,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "seed": 7,
        "stop": ["a", "b"],
        "stop_token_ids": [1],
        "include_stop_str_in_output": True,
        "ignore_eos": True,
        "max_tokens": 9,
        "min_tokens": 3,
        "allowed_token_ids": [1, 2],
        "bad_words": ["no"],
        "skip_special_tokens": False,
        "prompt_logprobs": 2,
    }
    expected = SamplingParams(**fields, logit_bias={5: -1.0}, logprobs=None)
    for build in (_completion, _chat):
        assert build(**fields, logit_bias={"5": -1.0}) == expected


def test_null_means_left_out() -> None:
    fields = dict.fromkeys(CompletionBody.model_fields.keys() - {"prompt"})
    assert _completion(**fields) == _completion()


def test_completions_stop_after_sixteen_tokens_and_chat_when_the_context_is_full() -> None:
    assert _completion().max_tokens == 16
    assert _completion(prompt_len=95).max_tokens == 5
    assert _chat().max_tokens == 90
    assert _chat(defaults={"max_tokens": 30}).max_tokens == 30
    assert _chat(defaults={"max_tokens": 300}).max_tokens == 90
    assert _completion(defaults={"max_tokens": 30}).max_tokens == 16


def test_max_completion_tokens_wins_over_max_tokens() -> None:
    assert _chat(max_tokens=3, max_completion_tokens=4).max_tokens == 4
    assert _chat(max_tokens=3).max_tokens == 3


@pytest.mark.parametrize(
    ("prompt_len", "asked", "param"),
    [(100, None, "prompt"), (100, 1, "prompt"), (101, 0, "prompt"), (90, 11, "max_tokens")],
)
def test_what_does_not_fit_names_the_field_to_change(
    prompt_len: int, asked: int | None, param: str
) -> None:
    with pytest.raises(HttpError) as caught:
        _completion(prompt_len, max_tokens=asked)
    assert (caught.value.param, caught.value.code) == (param, "context_length_exceeded")


def test_what_just_fits_is_taken() -> None:
    assert _completion(100, max_tokens=0).max_tokens == 0
    assert _completion(90, max_tokens=10).max_tokens == 10


def test_echo_scores_the_prompt_with_the_larger_of_both_numbers() -> None:
    assert _completion(logprobs=3).prompt_logprobs is None
    assert _completion(logprobs=3, echo=True).prompt_logprobs == 3
    assert _completion(logprobs=3, echo=True, prompt_logprobs=5).prompt_logprobs == 5
    assert _completion(echo=True).prompt_logprobs is None
    assert _completion(logprobs=0, echo=True).prompt_logprobs == 0


def test_chat_counts_its_top_logprobs() -> None:
    assert _chat(logprobs=True).logprobs == 0
    assert _chat(logprobs=True, top_logprobs=4).logprobs == 4
    assert _chat(logprobs=False).logprobs is None


def test_the_models_defaults_are_taken_only_for_sampling_values() -> None:
    defaults = {"temperature": 0.3, "n": 9, "seed": 1, "top_p": None}
    params = _completion(defaults=defaults)
    assert (params.temperature, params.n, params.seed, params.top_p) == (0.3, 1, None, 1.0)
    assert _completion(defaults=defaults, temperature=0).temperature == 0


def test_ranges_are_those_of_sampling_params() -> None:
    with pytest.raises(RequestError) as caught:
        _completion(top_p=0)
    assert caught.value.param == "top_p"
