"""The HTTP side of an answer: plain JSON or server-sent events, given up when the client leaves.

All of it happens inside one coroutine with the engine's requests as its context, so that no
path (error, disconnect before the first token or in the middle, cancellation) can leave a
request behind. Starlette's StreamingResponse does not promise this: cancelled while it sends,
it leaves its generator suspended.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine, Sequence

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from qtool.errors import QtoolError
from qtool.runtime.outputs import CompletionOutput
from qtool.runtime.request import Request
from qtool.runtime.server.errors import to_http_error
from qtool.runtime.server.interfaces import JsonObject
from qtool.runtime.server.metrics import ServerMetrics
from qtool.runtime.server.reply import Choice, Reply
from qtool.runtime.server.stream import Bridge, Outputs

DONE = b"data: [DONE]\n\n"

_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would collect the events
]


def event(data: JsonObject) -> bytes:
    """One server-sent event. Raises ValueError for numbers that JSON does not have."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return f"data: {text}\n\n".encode()


class GenerationResponse(Response):
    """Submits ``requests`` when it is sent; ``reply`` says what their deltas mean."""

    def __init__(
        self,
        bridge: Bridge,
        metrics: ServerMetrics,
        requests: Sequence[Request],
        reply: Reply,
        *,
        stream: bool,
    ) -> None:
        super().__init__()
        self._bridge = bridge
        self._metrics = metrics
        self._requests = requests
        self._reply = reply
        self._streams = stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer. An error before the first byte is raised, as HttpError."""
        with self._bridge.open(self._requests) as outputs:
            if self._streams:
                work = self._stream(outputs, send)
            else:
                work = self._plain(outputs, scope, receive, send)
            await until_disconnect(receive, work)

    async def _plain(self, outputs: Outputs, scope: Scope, receive: Receive, send: Send) -> None:
        choices = [Choice(CompletionOutput(index)) for index in range(len(self._requests))]
        async for index, delta in outputs:
            choices[index].extend(delta)
        # Naming the 20 likeliest of every token of a long prompt takes a second.
        body = await asyncio.to_thread(self._reply.whole, choices)
        await JSONResponse(body)(scope, receive, send)

    async def _stream(self, outputs: Outputs, send: Send) -> None:
        # The status cannot change once it is sent, so the first token is awaited before it.
        index, delta = await anext(outputs)
        first = [*self._reply.opening(), *self._reply.chunks(index, delta)]
        await send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
        try:
            for chunk in first:
                await _send_part(send, event(chunk))
            async for index, delta in outputs:
                for chunk in self._reply.chunks(index, delta):
                    await _send_part(send, event(chunk))
            for chunk in self._reply.closing():
                await _send_part(send, event(chunk))
            await _send_part(send, DONE)
        except QtoolError as error:
            answer = to_http_error(error)
            self._metrics.error(answer.status)
            await _send_part(send, event(answer.body()))
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def until_disconnect(receive: Receive, work: Coroutine[object, object, None]) -> None:
    """Run ``work``, but cancel it when the client leaves. The body must have been read."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            await working
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _send_part(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": True})
