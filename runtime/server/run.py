"""Start and stop the HTTP server: in the foreground, or on a thread of its own."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from types import TracebackType

import uvicorn
from fastapi import FastAPI

from qtool.errors import QtoolError, UsageError

# After this, what is still open when the server stops is cut off.
SHUTDOWN_SECONDS = 5


def serve(
    app: FastAPI, host: str, port: int, on_ready: Callable[[str], None] | None = None
) -> None:
    """Serve until SIGINT or SIGTERM. Port 0 takes a free one.

    Args:
        app: from :func:`qtool.runtime.server.app.create_app`.
        host, port: where to listen.
        on_ready: called with the server's URL once it accepts connections.

    Raises:
        UsageError: the address cannot be used.
    """
    with _bind(host, port) as listener:
        if on_ready is not None:
            on_ready(_url(host, listener))
        _Server(app).run([listener])


def check_address(host: str, port: int) -> None:
    """Whether a server could listen there, before a model is loaded for it.

    Raises:
        UsageError: the address cannot be used.
    """
    _bind(host, port).close()


class ServerThread:
    """A server for the length of a ``with`` block, e.g. in a demo or a test.

    ``url`` is known from the start; connections are accepted once the block begins.
    """

    def __init__(self, app: FastAPI, host: str = "127.0.0.1", port: int = 0) -> None:
        self._listener = _bind(host, port)
        self._server = _Server(app)
        self._thread = threading.Thread(target=self._run, name="qtool-http", daemon=True)
        self.url = _url(host, self._listener)

    def __enter__(self) -> ServerThread:
        self._thread.start()
        self._server.ready.wait()
        if not self._server.started:
            raise QtoolError(f"the server on {self.url} did not start; see the log")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.should_exit = True
        self._thread.join()

    def _run(self) -> None:
        try:
            self._server.run([self._listener])
        finally:
            self._listener.close()
            self._server.ready.set()


class _Server(uvicorn.Server):
    """Uvicorn, with open streams ended before it waits for connections to close."""

    def __init__(self, app: FastAPI) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                ws="none",
                log_config=None,
                access_log=False,
                timeout_graceful_shutdown=SHUTDOWN_SECONDS,
            )
        )
        self._bridge = app.state.service.bridge
        self.ready = threading.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._bridge.shut()
        await super().shutdown(sockets)


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except (OSError, OverflowError) as error:
        raise UsageError(
            f"cannot listen on {host}:{port} ({error}); choose another --host or --port"
        ) from error


def _url(host: str, listener: socket.socket) -> str:
    name = f"[{host}]" if ":" in host else host
    return f"http://{name}:{listener.getsockname()[1]}"
