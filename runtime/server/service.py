"""From a checked body to a response that is ready to be sent: the main flow of the server."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from typing import ParamSpec, TypeVar

from qtool.runtime.request import Request
from qtool.runtime.sampling_params import SamplingParams
from qtool.runtime.server.chat import ChatReply
from qtool.runtime.server.completions import CompletionReply
from qtool.runtime.server.errors import HttpError
from qtool.runtime.server.interfaces import EngineClient, JsonObject, TextCodec
from qtool.runtime.server.logprobs import TokenStrings
from qtool.runtime.server.metrics import ServerMetrics
from qtool.runtime.server.prompts import Prompt, chat_prompt, completion_prompts, encode, render
from qtool.runtime.server.protocol import (
    ChatBody,
    ChatFields,
    CompletionBody,
    DetokenizeBody,
    GenerationBody,
    TokenizeBody,
    check_supported,
)
from qtool.runtime.server.reply import Envelope, Reply
from qtool.runtime.server.responses import GenerationResponse
from qtool.runtime.server.sampling import chat_params, check_token_ids, completion_params
from qtool.runtime.server.stream import Bridge

P = ParamSpec("P")
T = TypeVar("T")


class Service:
    """One engine, its tokenizer, and the requests open on them."""

    def __init__(
        self, engine: EngineClient, codec: TextCodec, *, allow_chat_template: bool
    ) -> None:
        self.engine = engine
        self.metrics = ServerMetrics(engine)
        self.bridge = Bridge(engine, self.metrics)
        self.created = int(time.time())
        self._codec = codec
        self._strings = TokenStrings(codec)
        self._allow_chat_template = allow_chat_template
        # A long prompt takes a second and must not hold up the event loop. One worker: more
        # would take cores from the engine.
        self._tokenizing = ThreadPoolExecutor(1, thread_name_prefix="qtool-tokenize")

    async def chat(self, body: ChatBody) -> GenerationResponse:
        """POST /v1/chat/completions."""
        self._admit(body)
        info, codec = self.engine.info, self._codec
        prompt = await self._tokenize(chat_prompt, body, codec, info, self._allow_chat_template)
        params = chat_params(body, codec.default_sampling, info, len(prompt.token_ids))
        envelope = self._envelope("chatcmpl", body, [prompt])
        reply = ChatReply(body, envelope, self._strings)
        return self._respond(body, envelope.id, [(prompt, params)], reply)

    async def complete(self, body: CompletionBody) -> GenerationResponse:
        """POST /v1/completions."""
        self._admit(body)
        info, codec = self.engine.info, self._codec
        prompts = await self._tokenize(completion_prompts, body, codec, info)
        params = [
            completion_params(body, codec.default_sampling, info, len(prompt.token_ids))
            for prompt in prompts
        ]
        envelope = self._envelope("cmpl", body, prompts)
        reply = CompletionReply(body, envelope, self._strings, prompts)
        return self._respond(body, envelope.id, list(zip(prompts, params, strict=True)), reply)

    async def tokenize(self, body: TokenizeBody) -> JsonObject:
        """POST /tokenize."""
        self._check_model(body.model)
        ids = await self._tokenize(self._encode, body)
        return {
            "tokens": ids,
            "count": len(ids),
            "max_model_len": self.engine.info.max_model_len,
        }

    async def detokenize(self, body: DetokenizeBody) -> JsonObject:
        """POST /detokenize."""
        self._check_model(body.model)
        check_token_ids("tokens", body.tokens, self.engine.info.vocab_size)
        return {"prompt": await self._tokenize(self._codec.decode, body.tokens, False)}

    def models(self) -> JsonObject:
        """GET /v1/models."""
        return {"object": "list", "data": [self.model(self.engine.info.served_name)]}

    def model(self, name: str) -> JsonObject:
        """GET /v1/models/{name}."""
        self._check_model(name)
        return {
            "id": name,
            "object": "model",
            "created": self.created,
            "owned_by": "qtool",
            "max_model_len": self.engine.info.max_model_len,
        }

    def server_info(self) -> JsonObject:
        """GET /server_info: the load plan and the engine's counters.

        Without the place of the model on this machine's disk, which is nobody's business.
        """
        info = asdict(self.engine.info)
        del info["model"]
        return {"plan": info, "stats": asdict(self.engine.stats())}

    def close(self) -> None:
        """Free the worker thread."""
        self._tokenizing.shutdown(wait=False, cancel_futures=True)

    def _admit(self, body: GenerationBody) -> None:
        self.bridge.check_open()
        self._check_model(body.model)
        check_supported(body)

    def _check_model(self, name: str | None) -> None:
        served = self.engine.info.served_name
        if name is not None and name != served:
            message = f"model={name!r} is not served here; use {served!r} or leave it out."
            raise HttpError(404, message, "model", "model_not_found")

    async def _tokenize(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run ``function`` on the tokenizer's thread."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._tokenizing, partial(function, *args, **kwargs))

    def _encode(self, body: TokenizeBody) -> list[int]:
        if body.messages is not None:
            fields = body.model_dump(include=set(ChatFields.model_fields))
            return render(ChatFields(**fields), self._codec, self._allow_chat_template)
        if body.prompt is None:
            raise HttpError(400, "prompt is required; send it or messages", "prompt")
        return encode(body.prompt, self._codec, body.add_special_tokens)

    def _envelope(self, kind: str, body: GenerationBody, prompts: Sequence[Prompt]) -> Envelope:
        id_ = f"{kind}-{body.request_id or uuid.uuid4().hex}"
        prompt_tokens = sum(len(prompt.token_ids) for prompt in prompts)
        model = self.engine.info.served_name
        return Envelope.of(body, id_, int(time.time()), model, prompt_tokens)

    def _respond(
        self,
        body: GenerationBody,
        id_: str,
        work: Sequence[tuple[Prompt, SamplingParams]],
        reply: Reply,
    ) -> GenerationResponse:
        # The client's request_id may repeat; the engine's must not.
        prefix = f"{id_}-{uuid.uuid4().hex[:8]}"
        requests: list[Request] = []
        for prompt, params in work:
            first = f"{prefix}-{len(requests)}"
            for index in range(params.n):
                request = Request(
                    request_id=f"{prefix}-{len(requests)}",
                    prompt_token_ids=prompt.token_ids,
                    params=params.for_choice(index),
                    priority=body.priority or 0,
                    fork_of=first if index else None,
                    cache_salt=body.cache_salt or "",
                    timeout=body.timeout,
                )
                requests.append(request)
        stream = bool(body.stream)
        return GenerationResponse(self.bridge, self.metrics, requests, reply, stream=stream)
