"""``qtool demo``: the whole main job on a small real model, in a few minutes, with its figures."""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from qtool.commands import console, evaluate, quantize, serve
from qtool.errors import UsageError
from qtool.formats.model_source import resolve_model
from qtool.quantize.options import QuantizeOptions
from qtool.runtime.evaluate import Quality
from qtool.runtime.options import EngineOptions, ModelOptions
from qtool.runtime.startup import start_engine

MODEL = "smollm2-135m"
# One that 4-bit weights answer at length, whatever they were calibrated on.
QUESTION = "What is photosynthesis?"
MAX_TOKENS = 64

# Small enough for a laptop's coffee break; `qtool quantize` takes 128 samples unasked.
QUANTIZE = QuantizeOptions(
    method="awq", bits=4, samples=8, seq_len=512, eval_windows=1, overwrite=True
)
EVALUATE = evaluate.EvalOptions(seq_len=512, windows=8)


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer over HTTP, with its speed as the client saw it."""

    text: str
    tokens: int
    seconds: float
    first_token_seconds: float | None = None

    @property
    def tokens_per_second(self) -> float:
        """Decode speed: tokens after the first, over the time after it."""
        if self.first_token_seconds is None or self.tokens < 2:
            return self.tokens / self.seconds
        return (self.tokens - 1) / (self.seconds - self.first_token_seconds)


def run(out: Path | None) -> None:
    """Quantize, prove, serve, ask; ``out`` keeps the checkpoint. Raises QtoolError."""
    _require_client()
    with tempfile.TemporaryDirectory(prefix="qtool-demo-") as temporary:
        folder = out or Path(temporary) / f"{MODEL}-awq"
        _heading(f"1. Quantize {MODEL} to 4 bits with AWQ")
        quantize.run(MODEL, folder, QUANTIZE)
        _heading("2. Prove what it cost, on held-out text")
        loading = ModelOptions(dtype="fp32")
        quality = evaluate.run(str(folder), MODEL, EVALUATE, loading)
        _heading("3. Serve it, and ask over HTTP")
        plain, streamed = _serve_and_ask(folder)
        _heading("4. Summary")
        console.out.print(_summary(resolve_model(MODEL), folder, quality, streamed))
        if out is not None:
            console.out.print(f"The checkpoint stays in {out}; try: qtool serve {out}")


def _require_client() -> None:
    try:
        import openai  # noqa: F401
    except ImportError:
        raise UsageError("the demo asks with the openai client; run: pip install openai") from None


def _heading(text: str) -> None:
    console.out.print(f"\n[bold]{text}[/]", highlight=False)


def _serve_and_ask(folder: Path) -> tuple[Answer, Answer]:
    from qtool.runtime.server.app import create_app
    from qtool.runtime.server.run import ServerThread

    with console.status(f"loading {folder.name}"):
        running = start_engine(EngineOptions(model=str(folder), served_model_name=MODEL))
    serve.show_plan(running.engine.info, console.err)
    with running.engine, ServerThread(create_app(running.engine, running.tokenizer)) as server:
        console.out.print(f"listening on {server.url}", highlight=False)
        console.out.print(f"[bold]question:[/] {QUESTION}", highlight=False)
        plain = _ask(server.url)
        console.out.print(f"[bold]plain:[/]    {plain.text.strip()}", highlight=False)
        console.out.print("[bold]streamed:[/] ", end="", highlight=False)
        streamed = _ask_streaming(server.url)
        console.out.print("")
    return plain, streamed


def _client(url: str) -> Any:
    from openai import OpenAI

    return OpenAI(base_url=f"{url}/v1", api_key="none")


def _request() -> dict[str, Any]:
    messages = [{"role": "user", "content": QUESTION}]
    return {"model": MODEL, "messages": messages, "max_tokens": MAX_TOKENS, "temperature": 0}


def _ask(url: str) -> Answer:
    start = time.perf_counter()
    with _client(url) as client:
        reply = client.chat.completions.create(**_request())
    seconds = time.perf_counter() - start
    return Answer(reply.choices[0].message.content, reply.usage.completion_tokens, seconds)


def _ask_streaming(url: str) -> Answer:
    start = time.perf_counter()
    first, text, tokens = None, "", 0
    with _client(url) as client:
        usage = {"include_usage": True}
        for chunk in client.chat.completions.create(
            **_request(), stream=True, stream_options=usage
        ):
            if chunk.usage is not None:
                tokens = chunk.usage.completion_tokens
            delta = chunk.choices[0].delta.content if chunk.choices else None
            if delta:
                first = first or time.perf_counter() - start
                text += delta
                console.out.print(delta, end="", highlight=False, markup=False)
    return Answer(text, tokens, time.perf_counter() - start, first)


def _summary(source: Path, folder: Path, quality: Quality, answer: Answer) -> Table:
    before, after = quantize.folder_bytes(source), quantize.folder_bytes(folder)
    assert quality.reference_perplexity is not None
    assert quality.kl is not None and quality.top1 is not None
    table = Table()
    for column in ("", "original", "AWQ 4 bits"):
        table.add_column(column, justify="left" if not column else "right")
    ratio = f"{console.size(after)} ({before / after:.2f}x smaller)"
    table.add_row("size on disk", console.size(before), ratio)
    table.add_row("perplexity", f"{quality.reference_perplexity:.2f}", f"{quality.perplexity:.2f}")
    table.add_row("KL to original", "-", f"{quality.kl:.4f}")
    table.add_row("same likeliest token", "-", f"{quality.top1:.1%}")
    table.add_row("tokens per second", "-", f"{answer.tokens_per_second:.1f}")
    first = answer.first_token_seconds
    table.add_row("time to first token", "-", "-" if first is None else f"{first * 1000:.0f} ms")
    return table
