"""A running server in tests: what to wait for and how to read events."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
from openai import OpenAI

from qtool.runtime.server.app import create_app
from qtool.runtime.server.run import ServerThread
from support.fake_engine import ByteCodec, FakeEngine


@dataclass
class Running:
    """A server on a loopback socket with the engine behind it."""

    engine: FakeEngine
    codec: ByteCodec
    url: str
    http: httpx.Client
    openai: OpenAI

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.http.post(path, json=body)


@contextmanager
def running(
    engine: FakeEngine | None = None, codec: ByteCodec | None = None, **options: Any
) -> Iterator[Running]:
    """Start a server with ``create_app``'s options; stop it and the engine at the end."""
    engine, codec = engine or FakeEngine(), codec or ByteCodec()
    try:
        with (
            ServerThread(create_app(engine, codec, **options)) as server,
            httpx.Client(base_url=server.url, timeout=20) as http,
            OpenAI(
                base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=20
            ) as client,
        ):
            yield Running(engine, codec, server.url, http, client)
    finally:
        engine.close()


def wait_until(condition: Callable[[], object], seconds: float = 10) -> None:
    """Return once ``condition()`` is true; fail after ``seconds``."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.005)


def events(text: str) -> list[Any]:
    """Server-sent events, parsed; the last is the string "[DONE]" where it was sent."""
    assert text.endswith("\n\n")
    lines = text.removesuffix("\n\n").split("\n\n")
    assert all(line.startswith("data: ") and "\n" not in line for line in lines)
    data = [line.removeprefix("data: ") for line in lines]
    return [item if item == "[DONE]" else json.loads(item) for item in data]
