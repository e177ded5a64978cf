"""Request bodies of the OpenAI API with the extra fields vLLM's clients send.

Bodies are strict (no "0.5" for 0.5), a ``null`` means the same as leaving the field out, and
unknown fields are accepted, because clients send vendor extras. Fields whose silent loss would
change the answer are refused by :func:`check_supported`. Ranges of sampling values are
checked by SamplingParams, once for HTTP and Python.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from qtool.runtime.server.errors import HttpError, shorten

logger = logging.getLogger(__name__)

# torch.Generator.manual_seed takes 64 bits.
Seed = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]

# It comes back in the answer's id, and goes into logs.
RequestId = Annotated[str, Field(pattern=r"^[\w.:-]{1,128}$")]

# Without fail_fast a list of a million wrong items becomes a million error records.
TokenIds = Annotated[list[int], Field(fail_fast=True)]
Strings = Annotated[list[str], Field(fail_fast=True)]

# Values of refused fields that ask for nothing.
_HARMLESS: tuple[object, ...] = (None, False, "", "none", [], {}, {"type": "text"})

_NO_TOOLS = "tool calls are not built yet; leave it out or ask for the call in the prompt"
_NO_GRAMMAR = "constrained output is not built yet; leave it out and check the text yourself"
_REFUSED: Mapping[str, str] = {
    "tools": _NO_TOOLS,
    "tool_choice": _NO_TOOLS,
    "functions": _NO_TOOLS,
    "function_call": _NO_TOOLS,
    "response_format": _NO_GRAMMAR,
    "structured_outputs": _NO_GRAMMAR,
    "guided_json": _NO_GRAMMAR,
    "guided_regex": _NO_GRAMMAR,
    "guided_choice": _NO_GRAMMAR,
    "guided_grammar": _NO_GRAMMAR,
    "use_beam_search": "beam search is not built; sample with n and choose",
    "prompt_embeds": "prompts are text or token ids; send one of these",
    "audio": "only text is generated; leave it out",
    "suffix": "the model only continues text; put everything before the gap into prompt",
}


class Body(BaseModel):
    """What all bodies and their parts share."""

    model_config = ConfigDict(
        strict=True, extra="allow", allow_inf_nan=False, protected_namespaces=()
    )


class StreamOptions(Body):
    """``include_usage`` adds a last chunk with usage, ``continuous_usage_stats`` one to each."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationBody(Body):
    """Fields that chat and text completions share."""

    model: str | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: Seed | None = None
    stop: str | Strings | None = None
    stop_token_ids: TokenIds | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: TokenIds | None = None
    bad_words: Strings | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None
    add_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: Annotated[int, Field(ge=-(2**31), le=2**31 - 1)] | None = None
    request_id: RequestId | None = None
    cache_salt: Annotated[str, Field(max_length=1024)] | None = None
    timeout: Annotated[float, Field(gt=0)] | None = None  # seconds, from arrival to the last token
    best_of: int | None = None

    @property
    def num_choices(self) -> int:
        """``n``, 1 when not given."""
        return 1 if self.n is None else self.n


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    prompt: str | Strings | TokenIds | Annotated[list[TokenIds], Field(fail_fast=True)]
    echo: bool | None = None
    logprobs: int | None = None


class TextPart(Body):
    """A piece of a message's content."""

    type: Literal["text"]
    text: str


class Message(Body):
    """One turn. Other fields (``name``) go to the chat template as they are."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]

    def template_fields(self) -> dict[str, Any]:
        """What the chat template sees: content as one string, parts on lines of their own."""
        fields = self.model_dump(exclude_none=True)
        if not isinstance(self.content, str):
            fields["content"] = "\n".join(part.text for part in self.content)
        return fields


class ChatFields(Body):
    """What chooses the prompt of a conversation, for completions and for /tokenize."""

    messages: Annotated[list[Message], Field(fail_fast=True)]
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, JsonValue] | None = None


class ChatBody(GenerationBody, ChatFields):
    """POST /v1/chat/completions."""

    logprobs: bool | None = None
    top_logprobs: int | None = None
    max_completion_tokens: int | None = None


class TokenizeBody(Body):
    """POST /tokenize: a text, or a conversation with the fields of :class:`ChatFields`."""

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None
    messages: Annotated[list[Message], Field(fail_fast=True)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, JsonValue] | None = None


class DetokenizeBody(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: TokenIds


def check_supported(body: GenerationBody) -> None:
    """Refuse what is not built, log what is not known.

    Raises:
        HttpError: 400, naming the field.
    """
    for name, reason in _REFUSED.items():
        value = getattr(body, name, None)
        if value not in _HARMLESS:
            raise HttpError(400, f"{name}={shorten(repr(value), 80)}: {reason}", name)
    if body.best_of is not None and body.best_of != body.num_choices:
        rule = f"must equal n ({body.num_choices}); ask for more choices with n and choose"
        raise HttpError(400, f"best_of={body.best_of}: {rule}", "best_of")
    if body.stream_options is not None and not body.stream:
        raise HttpError(
            400, "stream_options is only for stream=true; leave it out", "stream_options"
        )
    unknown = sorted(set(body.model_extra or {}) - set(_REFUSED))
    if unknown:
        logger.debug("ignored unknown fields: %s", ", ".join(map(repr, unknown)))


def check_messages(messages: Sequence[Message]) -> None:
    """Refuse an empty conversation and turns that hold tool calls.

    Raises:
        HttpError: 400, naming the message.
    """
    if not messages:
        raise HttpError(400, "messages=[]: needs at least one message; add one", "messages")
    for position, message in enumerate(messages):
        for name in ("tool_calls", "function_call"):
            if (message.model_extra or {}).get(name):
                param = f"messages.{position}.{name}"
                raise HttpError(400, f"{param}: {_NO_TOOLS}", param)
