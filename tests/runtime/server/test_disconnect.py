from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest

from support.fake_engine import FakeEngine, say
from support.http import Running, running, wait_until

LONG = say("x" * 200)


@pytest.fixture
def server() -> Iterator[Running]:
    with running(FakeEngine(LONG, delay=0.005)) as running_server:
        yield running_server


def _send(server: Running, path: str = "/v1/completions", **body: object) -> socket.socket:
    """Send a request and leave the answer unread."""
    content = json.dumps({"prompt": "a", "max_tokens": 200} | body).encode()
    address = urlsplit(server.url)
    connection = socket.create_connection((address.hostname, address.port), timeout=10)
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    connection.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
    return connection


def _assert_all_aborted_once(server: Running, count: int) -> None:
    wait_until(lambda: len(server.engine.aborted) >= count)
    assert server.engine.open_ids == []
    assert sorted(server.engine.aborted) == sorted(r.request_id for r in server.engine.requests)
    assert len(set(server.engine.aborted)) == count


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_gone_before_the_first_token_frees_all_choices(
    server: Running, stream: bool
) -> None:
    server.engine.gate.clear()
    connection = _send(server, stream=stream, n=3)
    wait_until(lambda: len(server.engine.open_ids) == 3)
    connection.close()
    wait_until(lambda: len(server.engine.aborted) == 3)
    server.engine.gate.set()
    _assert_all_aborted_once(server, 3)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_gone_in_the_middle_frees_all_choices(server: Running, stream: bool) -> None:
    connection = _send(server, stream=stream, n=3, prompt=["a", "b"])
    if stream:
        assert connection.recv(20).startswith(b"HTTP/1.1 200")
    wait_until(lambda: len(server.engine.open_ids) == 6)
    connection.close()
    _assert_all_aborted_once(server, 6)


def test_fifty_clients_that_leave_leave_nothing_behind(server: Running) -> None:
    connections = [_send(server, stream=number % 2 == 0) for number in range(50)]
    wait_until(lambda: len(server.engine.requests) == 50)
    for connection in connections:
        connection.close()
    _assert_all_aborted_once(server, 50)
    assert server.post("/v1/completions", prompt="a").status_code == 200
    text = server.http.get("/metrics").text
    assert 'qtool_requests_finished_total{finish_reason="abort"} 50.0' in text


def test_a_reader_that_stops_reading_and_leaves_frees_its_request() -> None:
    # More than the socket's buffers hold, so that the server waits in the middle of sending.
    def script(request):  # type: ignore[no-untyped-def]
        for delta in say("x" * 200)(request):
            object.__setattr__(delta, "text", "y" * 200_000)
            yield delta

    with running(FakeEngine(script, delay=0.002)) as server:
        connection = _send(server, stream=True, n=2)
        assert connection.recv(20).startswith(b"HTTP/1.1 200")
        wait_until(lambda: server.engine.open_ids)
        connection.close()
        wait_until(lambda: server.engine.open_ids == [])
        wait_until(lambda: server.post("/v1/completions", prompt="a", max_tokens=1).is_success)


def test_only_unfinished_choices_are_aborted() -> None:
    def script(request):  # type: ignore[no-untyped-def]
        return say("x" if request.request_id.endswith("-0") else "x" * 200)(request)

    with running(FakeEngine(script, delay=0.005)) as server:
        connection = _send(server, n=2)
        wait_until(lambda: len(server.engine.requests) == 2 and len(server.engine.open_ids) == 1)
        # The event loop learns of the end a moment after the engine has forgotten the request.
        finished = 'qtool_requests_finished_total{finish_reason="stop"} 1.0'
        wait_until(lambda: finished in server.http.get("/metrics").text)
        connection.close()
        wait_until(lambda: server.engine.aborted)
        assert [name[-2:] for name in server.engine.aborted] == ["-1"]


def test_a_finished_request_is_never_aborted(server: Running) -> None:
    for stream in (False, True):
        body = {"prompt": "a", "max_tokens": 3, "stream": stream}
        server.http.post("/v1/completions", json=body, headers={"connection": "close"})
    assert server.engine.aborted == []
