"""What the client wrote to token ids. Runs on the tokenizer's worker thread: it can take long."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from qtool.errors import RequestError
from qtool.runtime.request import EngineInfo
from qtool.runtime.server.errors import HttpError
from qtool.runtime.server.interfaces import TextCodec
from qtool.runtime.server.protocol import (
    ChatBody,
    ChatFields,
    CompletionBody,
    GenerationBody,
    check_messages,
)
from qtool.runtime.server.sampling import asked_tokens, check_token_ids

# Prompts times n. Each is a request of its own in the engine's queue, and a 4 MiB body could
# hold a million of them.
MAX_COMPLETIONS = 1024

# Arguments of the renderer itself; passed as template variables they would override what the
# server decided.
_RESERVED_TEMPLATE_VARIABLES = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "documents",
        "max_length",
        "messages",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)


@dataclass(frozen=True, slots=True)
class Prompt:
    """``text`` is what ``echo`` sends back; it is only filled in when asked for."""

    token_ids: tuple[int, ...]
    text: str = ""


def completion_prompts(body: CompletionBody, codec: TextCodec, info: EngineInfo) -> list[Prompt]:
    """All prompts of a text completion.

    Raises:
        HttpError: 400, no prompt, too many, an empty one, or an id outside the vocabulary.
    """
    sources = _split(body.prompt)
    wanted = len(sources) * body.num_choices
    if wanted > MAX_COMPLETIONS:
        rule = f"at most {MAX_COMPLETIONS} in one request; send several"
        raise HttpError(400, f"{len(sources)} prompts make {wanted} completions: {rule}", "prompt")
    return [_completion_prompt(source, body, codec, info) for source in sources]


def chat_prompt(
    body: ChatBody, codec: TextCodec, info: EngineInfo, allow_chat_template: bool
) -> Prompt:
    """The rendered conversation.

    Raises:
        HttpError, RequestError: 400, no template, one that raises, or fields that contradict.
    """
    if body.add_special_tokens:
        rule = "the chat template already writes them; leave it out"
        raise HttpError(400, f"add_special_tokens=True: {rule}", "add_special_tokens")
    ids = render(body, codec, allow_chat_template)
    return Prompt(_truncate(ids, body, info, "messages"))


def render(body: ChatFields, codec: TextCodec, allow_chat_template: bool) -> list[int]:
    """Token ids of a conversation under the model's chat template, or the client's if allowed."""
    check_messages(body.messages)
    _check_template(body, codec, allow_chat_template)
    continues = bool(body.continue_final_message)
    generates = not continues if body.add_generation_prompt is None else body.add_generation_prompt
    if continues and generates:
        rule = "contradicts add_generation_prompt=true; set one of them"
        raise HttpError(400, f"continue_final_message=True: {rule}", "continue_final_message")
    with _blame("messages"):
        return codec.render_chat(
            [message.template_fields() for message in body.messages],
            add_generation_prompt=generates,
            continue_final_message=continues,
            chat_template=body.chat_template,
            template_kwargs=body.chat_template_kwargs,
        )


def encode(text: str, codec: TextCodec, add_special_tokens: bool | None) -> list[int]:
    """Token ids of a text. Special tokens are added unless the client says false."""
    with _blame("prompt"):
        return codec.encode(text, add_special_tokens is not False)


@contextmanager
def _blame(param: str) -> Iterator[None]:
    """Name the field that a tokenizer's error is about, where the error does not."""
    try:
        yield
    except RequestError as error:
        raise HttpError(400, str(error), error.param or param) from error


def _check_template(body: ChatFields, codec: TextCodec, allowed: bool) -> None:
    if body.chat_template is not None and not allowed:
        reason = "a template is a program and this server runs only the model's own; leave it out"
        raise HttpError(400, f"chat_template: {reason}", "chat_template")
    if body.chat_template is None and not codec.has_chat_template:
        remedy = "send the formatted text to /v1/completions"
        raise HttpError(400, f"The model has no chat template; {remedy}.", "messages")
    reserved = sorted(_RESERVED_TEMPLATE_VARIABLES & set(body.chat_template_kwargs or {}))
    if reserved:
        rule = f"{reserved[0]!r} is set by the server; use the request's own fields"
        raise HttpError(400, f"chat_template_kwargs: {rule}", "chat_template_kwargs")


def _split(prompt: str | list[str] | list[int] | list[list[int]]) -> Sequence[str | list[int]]:
    """The four forms of ``prompt`` as a list of texts and token id lists."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise HttpError(400, "prompt=[]: needs at least one prompt; send one", "prompt")
    ids = [item for item in prompt if isinstance(item, int)]
    return [ids] if ids else [item for item in prompt if not isinstance(item, int)]


def _completion_prompt(
    source: str | list[int], body: CompletionBody, codec: TextCodec, info: EngineInfo
) -> Prompt:
    if isinstance(source, str):
        whole = encode(source, codec, body.add_special_tokens)
    else:
        check_token_ids("prompt", source, info.vocab_size)
        whole = source
    ids = _truncate(whole, body, info, "prompt")
    if not body.echo:
        return Prompt(ids)
    if isinstance(source, str) and len(ids) == len(whole):
        return Prompt(ids, source)
    return Prompt(ids, codec.decode(ids, body.skip_special_tokens is not False))


def _truncate(
    ids: Sequence[int], body: GenerationBody, info: EngineInfo, param: str
) -> tuple[int, ...]:
    """The last ``truncate_prompt_tokens`` ids; -1 keeps what leaves room for the answer."""
    keep = body.truncate_prompt_tokens
    if not ids:
        raise HttpError(400, f"{param}: has no tokens; send at least one", param)
    if keep is None:
        return tuple(ids)
    if keep == -1:
        asked, _ = asked_tokens(body)
        keep = info.max_model_len - (1 if asked is None else asked)
    if keep < 1:
        rule = "must be 1 or more, or -1 for what leaves room for max_tokens in the context"
        value = body.truncate_prompt_tokens
        message = f"truncate_prompt_tokens={value}: {rule}"
        raise HttpError(400, message, "truncate_prompt_tokens")
    return tuple(ids[-keep:])
