"""What the server needs from an engine and a tokenizer, and no more."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from qtool.errors import QtoolError
from qtool.runtime.outputs import OutputDelta
from qtool.runtime.request import EngineInfo, EngineStats, Request

# One item of one request. An error is the last item of its request.
OnOutput = Callable[[OutputDelta | QtoolError], None]

# A JSON object on its way to a client.
JsonObject = dict[str, Any]


class EngineClient(Protocol):
    """An engine that runs on a thread of its own. Every method returns at once."""

    @property
    def info(self) -> EngineInfo: ...

    @property
    def alive(self) -> bool:
        """False from the moment it stops for good."""
        ...

    def submit(self, request: Request, on_output: OnOutput) -> None:
        """Queue a request; ``on_output`` is called on the engine's thread.

        Raises:
            RequestError: the request can never run (or ``on_output`` gets this error).
            EngineError: the engine has stopped.
        """
        ...

    def abort(self, request_id: str) -> None:
        """Forget a request; one that is unknown or already finished is no error."""
        ...

    def stats(self) -> EngineStats: ...


class TextCodec(Protocol):
    """A tokenizer with the model's chat template and generation defaults; any thread may call it.

    ``encode`` and ``render_chat`` raise RequestError for what the client can mend.
    """

    @property
    def has_chat_template(self) -> bool: ...

    @property
    def default_sampling(self) -> Mapping[str, Any]:
        """Sampling values of the model's generation_config.json, by SamplingParams' names."""
        ...

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]: ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...

    def token_bytes(self, token_id: int) -> bytes: ...
