from __future__ import annotations

import os
import signal
import socket
import threading
import time

import httpx
import pytest

from qtool.commands import serve as serve_command
from qtool.errors import UsageError
from qtool.runtime.options import EngineOptions
from qtool.runtime.server.app import create_app
from qtool.runtime.server.run import ServerThread, serve
from support.fake_engine import ByteCodec, FakeEngine, say
from support.http import events, wait_until


def test_port_zero_becomes_a_real_port() -> None:
    engine = FakeEngine()
    with ServerThread(create_app(engine, ByteCodec())) as first:
        assert not first.url.endswith(":0")
        with ServerThread(create_app(engine, ByteCodec())) as second:
            assert first.url != second.url
            assert httpx.get(f"{second.url}/health").status_code == 200
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{first.url}/health")
    engine.close()


def test_a_port_in_use_is_an_error_that_names_it() -> None:
    engine = FakeEngine()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=f"127.0.0.1:{port}.*--port"):
            ServerThread(create_app(engine, ByteCodec()), port=port)
    engine.close()


def test_a_port_in_use_is_an_error_before_a_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loaded: list[EngineOptions] = []
    monkeypatch.setattr(serve_command, "start_engine", loaded.append)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=f"127.0.0.1:{port}.*--port"):
            serve_command.run(EngineOptions(model="m"), serve_command.ServeOptions(port=port))
    assert not loaded


def test_stopping_the_server_ends_streams_and_plain_requests() -> None:
    engine = FakeEngine(say("x" * 200), delay=0.02)
    answers: dict[bool, httpx.Response] = {}

    def ask(url: str, stream: bool) -> None:
        body = {"prompt": "a", "max_tokens": 200, "stream": stream}
        answers[stream] = httpx.post(f"{url}/v1/completions", json=body, timeout=20)

    with ServerThread(create_app(engine, ByteCodec())) as server:
        clients = [threading.Thread(target=ask, args=(server.url, s)) for s in (False, True)]
        for client in clients:
            client.start()
        begun_both = "qtool_time_to_first_token_seconds_count 2.0"
        wait_until(lambda: begun_both in httpx.get(f"{server.url}/metrics").text)
        begun = time.monotonic()
    assert time.monotonic() - begun < 3
    for client in clients:
        client.join()
    assert answers[False].status_code == 503
    assert events(answers[True].text)[-1]["error"]["code"] == "shutting_down"
    assert len(engine.aborted) == 2 and engine.open_ids == []
    engine.close()


def test_serve_reports_its_url_and_stops_on_a_signal() -> None:
    engine, urls = FakeEngine(), []

    def check_and_stop(url: str) -> None:
        urls.append(url)
        wait_until(lambda: _is_healthy(url))
        os.kill(os.getpid(), signal.SIGINT)

    def on_ready(url: str) -> None:
        threading.Thread(target=check_and_stop, args=(url,)).start()

    with pytest.raises(KeyboardInterrupt):
        serve(create_app(engine, ByteCodec()), "127.0.0.1", 0, on_ready)
    assert urls and not _is_healthy(urls[0])
    engine.close()


def _is_healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health").status_code == 200
    except httpx.TransportError:
        return False
