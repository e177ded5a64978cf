"""A server with the real engine on a tiny model, on a loopback socket."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from openai import OpenAI

from qtool.runtime.engine_thread import EngineThread
from qtool.runtime.options import EngineOptions, ModelOptions
from qtool.runtime.server.app import create_app
from qtool.runtime.server.run import ServerThread
from qtool.runtime.startup import start_engine
from qtool.runtime.tokenizer import Tokenizer


@dataclass(frozen=True)
class RealServer:
    """``url`` is the root; ``openai`` and ``http`` are clients of it."""

    engine: EngineThread
    tokenizer: Tokenizer
    url: str
    http: httpx.Client
    openai: OpenAI

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.http.post(path, json=body)


@contextmanager
def real_server(folder: Path, *, blocks: int = 512, **settings: Any) -> Iterator[RealServer]:
    """Serve ``folder`` as the model ``tiny``, exact kernels in float32, until the block ends."""
    loading = ModelOptions(device="cpu", dtype="fp32", backend="reference")
    # Two layers of two heads for keys and values, each 16 wide, in float32.
    memory = blocks * 16 * 2 * 2 * 2 * 16 * 4
    options = EngineOptions(
        model=str(folder),
        served_model_name="tiny",
        loading=loading,
        kv_cache_memory=memory,
        **settings,
    )
    running = start_engine(options)
    with (
        running.engine as engine,
        ServerThread(create_app(engine, running.tokenizer)) as server,
        httpx.Client(base_url=server.url, timeout=30) as http,
        OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=30) as client,
    ):
        yield RealServer(engine, running.tokenizer, server.url, http, client)
