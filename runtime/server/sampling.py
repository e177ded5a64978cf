"""Request bodies to SamplingParams: the client's value, else the model's, else neutral."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from qtool.errors import RequestError
from qtool.runtime.request import EngineInfo
from qtool.runtime.sampling_params import SamplingParams
from qtool.runtime.server.errors import HttpError
from qtool.runtime.server.protocol import ChatBody, CompletionBody, GenerationBody

# OpenAI's default for text completions. Chat has none: the model's own if it has one, else all
# that fits. Mixing them up is a common complaint.
DEFAULT_COMPLETION_TOKENS = 16

# What a model's generation_config.json may set.
MODEL_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")

_COPIED = (
    *MODEL_DEFAULTS,
    "n",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "min_tokens",
    "allowed_token_ids",
    "bad_words",
    "skip_special_tokens",
)


def completion_params(
    body: CompletionBody, defaults: Mapping[str, Any], info: EngineInfo, prompt_len: int
) -> SamplingParams:
    """Parameters for one prompt of ``prompt_len`` tokens. With ``echo`` the prompt is scored too.

    Raises:
        RequestError, HttpError: a value out of range, or no room in the context.
    """
    room = _room(prompt_len, info.max_model_len, body.max_tokens, "max_tokens", "prompt")
    max_tokens = body.max_tokens
    if max_tokens is None:
        max_tokens = min(DEFAULT_COMPLETION_TOKENS, room)
    wanted = [body.prompt_logprobs, body.logprobs if body.echo else None]
    scored = max((k for k in wanted if k is not None), default=None)
    return _build(
        body,
        defaults,
        info,
        max_tokens=max_tokens,
        logprobs=body.logprobs,
        prompt_logprobs=scored,
    )


def chat_params(
    body: ChatBody, defaults: Mapping[str, Any], info: EngineInfo, prompt_len: int
) -> SamplingParams:
    """Parameters for a conversation of ``prompt_len`` tokens; by default all that fits may follow.

    Raises:
        RequestError, HttpError: a value out of range, or no room in the context.
    """
    asked, name = asked_tokens(body)
    if asked is not None and asked < 0:
        raise HttpError(400, f"{name}={asked}: must be 0 or more", name)
    room = _room(prompt_len, info.max_model_len, asked, name, "messages")
    return _build(
        body,
        defaults,
        info,
        max_tokens=min(defaults.get("max_tokens") or room, room) if asked is None else asked,
        logprobs=_chat_logprobs(body),
        prompt_logprobs=body.prompt_logprobs,
    )


def asked_tokens(body: GenerationBody) -> tuple[int | None, str]:
    """The client's limit on new tokens and the field it came from."""
    if isinstance(body, ChatBody) and body.max_completion_tokens is not None:
        return body.max_completion_tokens, "max_completion_tokens"
    return body.max_tokens, "max_tokens"


def check_token_ids(param: str, ids: Iterable[int], vocab_size: int) -> None:
    """Raise HttpError 400 for the first id outside [0, ``vocab_size``)."""
    for token in ids:
        if not 0 <= token < vocab_size:
            rule = f"the vocabulary has ids 0 to {vocab_size - 1}; drop it"
            raise HttpError(400, f"{param} has token id {token}: {rule}", param)


def _chat_logprobs(body: ChatBody) -> int | None:
    if body.logprobs:
        try:
            return SamplingParams(logprobs=body.top_logprobs or 0).logprobs
        except RequestError as error:
            message = str(error).replace("logprobs", "top_logprobs", 1)
            raise HttpError(400, message, "top_logprobs") from error
    if body.top_logprobs:
        message = f"top_logprobs={body.top_logprobs}: needs logprobs=true; set it"
        raise HttpError(400, message, "top_logprobs")
    return None


def _room(prompt_len: int, limit: int, asked: int | None, name: str, prompt_name: str) -> int:
    """Tokens that may follow the prompt; 400 when fewer than asked for (or than one)."""
    room = limit - prompt_len
    needed = 1 if asked is None else asked
    if room >= needed:
        return room
    message = (
        f"The prompt has {prompt_len} tokens and {name}={needed} more are asked for: the context "
        f"holds {limit}. Shorten the prompt or set truncate_prompt_tokens or {name}."
    )
    param = name if prompt_len < limit else prompt_name
    raise HttpError(400, message, param, "context_length_exceeded")


def _build(
    body: GenerationBody, defaults: Mapping[str, Any], info: EngineInfo, **settings: int | None
) -> SamplingParams:
    values: dict[str, Any] = dict(settings)
    values |= {k: defaults[k] for k in MODEL_DEFAULTS if defaults.get(k) is not None}
    values |= {k: v for k in _COPIED if (v := getattr(body, k)) is not None}
    values["logit_bias"] = _logit_bias(body.logit_bias or {})
    params = SamplingParams(**values)
    for name in ("stop_token_ids", "logit_bias", "allowed_token_ids"):
        check_token_ids(name, getattr(params, name) or (), info.vocab_size)
    if body.stream and body.prompt_logprobs is not None:
        rule = "is not sent with stream=true; drop one of the two"
        raise HttpError(400, f"prompt_logprobs={body.prompt_logprobs}: {rule}", "prompt_logprobs")
    return params


def _logit_bias(bias: Mapping[str, float]) -> dict[int, float]:
    """JSON has only string keys; these are token ids."""
    try:
        return {int(token): value for token, value in bias.items()}
    except ValueError as error:
        raise HttpError(
            400, f"logit_bias: keys are token ids in decimal; {error}", "logit_bias"
        ) from error
