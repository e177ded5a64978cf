"""What stands before the routes: body limit, API key, error count.

Plain ASGI, because Starlette's BaseHTTPMiddleware puts a task and a queue into every stream.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from qtool.runtime.server.errors import HttpError
from qtool.runtime.server.metrics import ServerMetrics


@dataclass(frozen=True, slots=True)
class BodyLimit:
    """Reads the whole body, at most ``max_bytes`` of it, and passes it on as one message.

    Counting while reading also holds for chunked bodies, which do not say their length.
    """

    app: ASGIApp
    max_bytes: int

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        try:
            body = await self._read(scope, receive)
        except HttpError as error:
            return await error.response()(scope, receive, send)
        if body is not None:
            await self.app(scope, _replay(body, receive), send)

    async def _read(self, scope: Scope, receive: Receive) -> bytes | None:
        """The body, or None when the client left before its end."""
        length = Headers(scope=scope).get("content-length", "0")
        if length.isdecimal() and int(length) > self.max_bytes:
            raise self._too_large(f"{length} bytes")
        body = bytearray()
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            body += message.get("body", b"")
            more = message.get("more_body", False)
            if len(body) > self.max_bytes:
                raise self._too_large("more bytes")
        return bytes(body)

    def _too_large(self, found: str) -> HttpError:
        message = f"The body has {found}: the limit is {self.max_bytes}. Send less at a time."
        # The rest of the body stays unread, so the connection cannot be used again.
        return HttpError(413, message, code="body_too_large", headers={"Connection": "close"})


@dataclass(frozen=True, slots=True)
class ApiKey:
    """Asks for ``Authorization: Bearer KEY`` under /v1; preflights (OPTIONS) stay open."""

    app: ASGIApp
    api_key: str

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._admits(scope):
            return await self.app(scope, receive, send)
        headers = {"WWW-Authenticate": "Bearer"}
        message = "Wrong or missing API key; send 'Authorization: Bearer KEY'."
        error = HttpError(401, message, code="invalid_api_key", headers=headers)
        await error.response()(scope, receive, send)

    def _admits(self, scope: Scope) -> bool:
        if scope["type"] != "http" or scope["method"] == "OPTIONS":
            return True
        if not (scope["path"] == "/v1" or scope["path"].startswith("/v1/")):
            return True
        scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        # Digests have one length, so the comparison's time tells nothing about the key's.
        # Headers are read as Latin-1; this gives the client's bytes back.
        given = _digest(key.strip().encode("latin-1"))
        return scheme.lower() == "bearer" and hmac.compare_digest(
            given, _digest(self.api_key.encode())
        )


@dataclass(frozen=True, slots=True)
class CountErrors:
    """Counts answers of status 400 and above."""

    app: ASGIApp
    metrics: ServerMetrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def counting(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] >= 400:
                self.metrics.error(message["status"])
            await send(message)

        await self.app(scope, receive, counting)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _replay(body: bytes, receive: Receive) -> Receive:
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Message:
        return messages.pop() if messages else await receive()

    return replayed
