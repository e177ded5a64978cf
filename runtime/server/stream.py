"""Between the engine's thread and the event loop.

One HTTP request is one or more engine requests (n choices, several prompts). :class:`Bridge`
submits them together and merges what they produce; leaving its context, for whatever reason,
aborts those that are not finished, each exactly once.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator, Sequence
from functools import partial

from qtool.errors import EngineError, QtoolError
from qtool.runtime.outputs import DEADLINE, OutputDelta
from qtool.runtime.request import Request
from qtool.runtime.server.errors import HttpError, to_http_error
from qtool.runtime.server.interfaces import EngineClient
from qtool.runtime.server.metrics import ServerMetrics

# Engine requests open at one time, over all clients. Beyond it waiting takes minutes on any
# machine, and a client is better told so.
MAX_OPEN_REQUESTS = 4096


class Outputs:
    """Deltas of the engine requests of one HTTP request, as (index, delta), in any order.

    Iteration ends when all have finished, and raises HttpError when one of them fails. It is
    made, read and closed on the event loop's thread.
    """

    def __init__(self, engine: EngineClient, metrics: ServerMetrics) -> None:
        self._engine = engine
        self._metrics = metrics
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[tuple[int, OutputDelta] | QtoolError] = asyncio.Queue()
        self._begun = time.monotonic()
        self._last_token: dict[str, float] = {}
        self._running: set[str] = set()  # the engine works on them
        self._unread = 0  # not yet told to the reader that they have finished
        self._closed = False

    @property
    def num_running(self) -> int:
        """Engine requests that have not finished."""
        return len(self._running)

    def submit(self, index: int, request: Request) -> None:
        """Hand a request to the engine.

        Raises:
            HttpError: it refused.
        """
        self._running.add(request.request_id)
        self._unread += 1
        on_output = partial(self._from_engine, index, request.request_id)
        try:
            self._engine.submit(request, on_output)
        except QtoolError as error:
            self._running.discard(request.request_id)
            if isinstance(error, EngineError):
                raise HttpError(503, str(error), code="engine_stopped") from error
            raise to_http_error(error) from error

    def fail(self, error: QtoolError) -> None:
        """Let the reader see ``error`` after what is already queued."""
        self._queue.put_nowait(error)

    def close(self) -> None:
        """Abort what has not finished; later items are dropped."""
        self._closed = True
        unfinished, self._running = self._running, set()
        for request_id in unfinished:
            self._metrics.finished("abort", time.monotonic() - self._begun)
            self._engine.abort(request_id)

    def __aiter__(self) -> Outputs:
        return self

    async def __anext__(self) -> tuple[int, OutputDelta]:
        if self._unread == 0:
            raise StopAsyncIteration
        item = await self._queue.get()
        if isinstance(item, QtoolError):
            raise to_http_error(item) from item
        if item[1].finish_reason is not None:
            self._unread -= 1
        return item

    def _from_engine(self, index: int, request_id: str, item: OutputDelta | QtoolError) -> None:
        # The loop can be gone while the engine still runs; nobody is left to be told then, and
        # the engine's thread must not die of it.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._deliver, index, request_id, item)

    def _deliver(self, index: int, request_id: str, item: OutputDelta | QtoolError) -> None:
        if self._closed:
            return
        if isinstance(item, QtoolError):
            self._running.discard(request_id)
            self.fail(item)
        elif item.finish_reason == "abort":
            # Not by us: we are not closed. A client must not take the text for complete.
            self._running.discard(request_id)
            self.fail(_why_aborted(item))
        else:
            self._measure(request_id, item)
            self._queue.put_nowait((index, item))

    def _measure(self, request_id: str, delta: OutputDelta) -> None:
        now = time.monotonic()
        if delta.token_ids:
            last = self._last_token.get(request_id)
            if last is None:
                self._metrics.first_token(now - self._begun)
            else:
                self._metrics.next_tokens(now - last, len(delta.token_ids))
            self._last_token[request_id] = now
        if delta.finish_reason is not None:
            self._running.discard(request_id)
            self._metrics.finished(delta.finish_reason, now - self._begun)


def _why_aborted(delta: OutputDelta) -> QtoolError:
    if delta.stop_reason == DEADLINE:
        message = "The request's timeout has passed; give it more time, or ask for fewer tokens."
        return HttpError(504, message, "timeout", "timeout")
    return EngineError("the engine aborted the request; send it again")


class Bridge:
    """All open requests of one server. Lives on the event loop's thread."""

    def __init__(self, engine: EngineClient, metrics: ServerMetrics) -> None:
        self._engine = engine
        self._metrics = metrics
        self._open: set[Outputs] = set()
        self._shut = False

    @property
    def num_running(self) -> int:
        """Engine requests in flight."""
        return sum(outputs.num_running for outputs in self._open)

    def check_open(self) -> None:
        """Raise HttpError 503 when no request can be taken."""
        if self._shut:
            raise HttpError(503, "The server is shutting down.", code="shutting_down")
        if not self._engine.alive:
            raise HttpError(503, "The engine has stopped; restart it.", code="engine_stopped")

    @contextlib.contextmanager
    def open(self, requests: Sequence[Request]) -> Iterator[Outputs]:
        """Submit ``requests``; what is unfinished when the context ends is aborted.

        Raises:
            HttpError: the server or the engine takes no requests, or refused one of these.
        """
        self.check_open()
        if self.num_running + len(requests) > MAX_OPEN_REQUESTS:
            message = f"{MAX_OPEN_REQUESTS} requests are open; send this one again later."
            raise HttpError(503, message, code="overloaded", headers={"Retry-After": "5"})
        outputs = Outputs(self._engine, self._metrics)
        self._open.add(outputs)
        try:
            for index, request in enumerate(requests):
                outputs.submit(index, request)
            yield outputs
        finally:
            self._open.discard(outputs)
            outputs.close()

    def shut(self) -> None:
        """Take no more requests and end the open ones with an error."""
        self._shut = True
        for outputs in self._open:
            outputs.fail(HttpError(503, "The server is shutting down.", code="shutting_down"))
