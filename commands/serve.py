"""``qtool serve``: load, say how it will run, answer until stopped."""

from __future__ import annotations

from dataclasses import dataclass

from qtool.commands import console
from qtool.runtime.options import EngineOptions
from qtool.runtime.request import EngineInfo
from qtool.runtime.startup import start_engine


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """Where the server listens, and who may ask it."""

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None


def run(options: EngineOptions, serving: ServeOptions) -> None:
    """Serve until interrupted. Raises QtoolError."""
    from qtool.runtime.server.app import create_app
    from qtool.runtime.server.run import serve

    with console.status(f"loading {options.model}"):
        running = start_engine(options)
    show_plan(running.engine.info)
    with running.engine:
        app = create_app(running.engine, running.tokenizer, api_key=serving.api_key)
        serve(app, serving.host, serving.port, _announce)


def _announce(url: str) -> None:
    console.err.print(f"listening on {url} (API under {url}/v1; Ctrl-C stops)", highlight=False)


def show_plan(info: EngineInfo) -> None:
    """What runs, what fits, and what was not as asked."""
    tokens = info.num_blocks * info.block_size
    console.err.print(
        f"{info.served_name}: weights {info.quantization}, {console.size(info.weight_bytes)}; "
        f"{info.backend} kernels on {info.device} in {info.dtype}",
        highlight=False,
    )
    console.err.print(
        f"KV cache: {console.size(info.kv_bytes_per_token)} a token, {tokens:,} tokens in "
        f"{info.num_blocks:,} blocks of {info.block_size} "
        f"({tokens / info.max_model_len:.1f} sequences of {info.max_model_len:,})",
        highlight=False,
    )
    for text in info.notes:
        console.note(text)
