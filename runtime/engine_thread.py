"""The engine on a thread of its own: submit from anywhere, outputs come by callback.

Requests and aborts go through one queue and are applied between steps, so nothing but this
thread ever touches the scheduler or the model.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass

from qtool.errors import EngineError, QtoolError, RequestError
from qtool.runtime.engine import Engine
from qtool.runtime.outputs import OutputDelta
from qtool.runtime.request import EngineInfo, EngineStats, Request

OnOutput = Callable[[OutputDelta | QtoolError], None]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Submit:
    request: Request
    on_output: OnOutput


@dataclass(frozen=True, slots=True)
class _Abort:
    request_id: str


class _Close:
    pass


class EngineThread:
    """Owns an engine. Close it, or use it as a context manager.

    A request's callback runs on the engine's thread, gets every delta in order, and gets
    exactly one last item: a delta with a finish reason, or an error. After :meth:`abort`
    nothing more comes. A callback must be quick;
    if it raises, its request is dropped.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._inbox: queue.SimpleQueue[_Submit | _Abort | _Close] = queue.SimpleQueue()
        self._callbacks: dict[str, OnOutput] = {}
        self._lock = threading.Lock()
        self._open = True
        self._stats = engine.stats()
        self._thread = threading.Thread(target=self._run, name="qtool-engine", daemon=True)
        self._thread.start()

    @property
    def info(self) -> EngineInfo:
        """What does not change."""
        return self._engine.info

    @property
    def alive(self) -> bool:
        """False from the moment it stops for good."""
        return self._open

    def stats(self) -> EngineStats:
        """As of the last step."""
        return self._stats

    def submit(self, request: Request, on_output: OnOutput) -> None:
        """Queue a request; one that cannot run gets its RequestError by callback.

        Raises:
            EngineError: the engine has stopped.
        """
        with self._lock:
            if not self._open:
                raise EngineError("the engine has stopped; start it again")
            self._inbox.put(_Submit(request, on_output))

    def abort(self, request_id: str) -> None:
        """Forget a request; unknown and finished ones are no error."""
        self._inbox.put(_Abort(request_id))

    def close(self) -> None:
        """Stop; requests in flight get an EngineError. May be called twice."""
        with self._lock:
            if self._open:
                self._open = False
                self._inbox.put(_Close())
        self._thread.join()

    def __enter__(self) -> EngineThread:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        try:
            while self._receive():
                deltas = self._engine.step()
                # First: who has an answer finds it counted.
                self._stats = self._engine.stats()
                for delta in deltas:
                    self._deliver(delta)
            error = EngineError("the engine was closed")
        except Exception as failure:
            logger.exception("the engine stopped")
            error = EngineError(f"the engine stopped: {type(failure).__name__}: {failure}")
        self._stop(error)

    def _receive(self) -> bool:
        """Apply what has arrived; wait when there is nothing to do. False to stop."""
        while True:
            idle = not self._engine.has_work
            if idle:
                self._stats = self._engine.stats()
            try:
                message = self._inbox.get(block=idle)
            except queue.Empty:
                return True
            if isinstance(message, _Close):
                return False
            if isinstance(message, _Abort):
                self._callbacks.pop(message.request_id, None)
                self._engine.abort(message.request_id)
            else:
                self._admit(message)

    def _admit(self, message: _Submit) -> None:
        try:
            self._engine.add(message.request)
        except RequestError as error:
            self._call(message.on_output, error)
        except Exception as failure:  # such as a token id that is a text; nothing was added
            logger.exception("a request cannot be read; it is dropped")
            refusal = RequestError(
                f"the request cannot be read: {type(failure).__name__}: {failure}"
            )
            self._call(message.on_output, refusal)
        else:
            self._callbacks[message.request.request_id] = message.on_output

    def _deliver(self, delta: OutputDelta) -> None:
        callback = self._callbacks[delta.request_id]
        if delta.finish_reason is not None:
            del self._callbacks[delta.request_id]
        self._call(callback, delta)

    def _call(self, callback: OnOutput, item: OutputDelta | QtoolError) -> None:
        """One client's broken callback must not stop everybody's engine."""
        try:
            callback(item)
        except Exception:
            logger.exception("a request's callback failed; the request is dropped")
            if isinstance(item, OutputDelta):
                self._callbacks.pop(item.request_id, None)
                self._engine.abort(item.request_id)

    def _stop(self, error: EngineError) -> None:
        """Nobody may be left waiting: neither those in flight nor those still in the queue."""
        with self._lock:
            self._open = False
        waiting = list(self._callbacks.values())
        self._callbacks.clear()
        while not self._inbox.empty():
            message = self._inbox.get()
            if isinstance(message, _Submit):
                waiting.append(message.on_output)
        for callback in waiting:
            self._call(callback, error)
