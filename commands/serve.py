"""``qtool serve``: load, say how it will run, answer until stopped."""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import Console

from qtool.commands import console
from qtool.runtime.options import EngineOptions
from qtool.runtime.request import EngineInfo, PlannedPart
from qtool.runtime.startup import start_engine


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """Where the server listens, and who may ask it; or nothing but the load plan."""

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    only_plan: bool = False


def run(options: EngineOptions, serving: ServeOptions) -> None:
    """Serve until interrupted, or print the load plan and stop. Raises QtoolError."""
    from qtool.runtime.server.app import create_app
    from qtool.runtime.server.run import check_address, serve

    if not serving.only_plan:
        check_address(serving.host, serving.port)
    with console.status(f"loading {options.model}"):
        running = start_engine(options)
    with running.engine:
        show_plan(running.engine.info, console.out if serving.only_plan else console.err)
        if serving.only_plan:
            return
        app = create_app(running.engine, running.tokenizer, api_key=serving.api_key)
        serve(app, serving.host, serving.port, _announce)


def _announce(url: str) -> None:
    console.err.print(f"listening on {url} (API under {url}/v1; Ctrl-C stops)", highlight=False)


def show_plan(info: EngineInfo, where: Console) -> None:
    """What runs, what fits, and what was not as asked."""
    lines = [
        f"{info.served_name}: weights {info.quantization}, {console.size(info.weight_bytes)}; "
        f"{info.backend} kernels on {info.device} in {info.dtype} ({info.backend_reason})",
        *(_part_line(part, info.backend_reason) for part in info.parts),
        f"KV cache: {info.kv_cache_dtype} ({info.kv_cache_reason}), "
        f"{console.size(info.kv_bytes_per_token)} a token; "
        f"{info.num_cache_tokens:,} tokens in {info.num_blocks:,} blocks of {info.block_size} "
        f"({info.num_full_sequences:.1f} sequences of {info.max_model_len:,}){_tails(info)}",
        f"scheduler: {info.scheduling_policy}, at most {info.max_num_seqs} sequences and "
        f"{info.max_num_batched_tokens:,} tokens a step; prefixes are "
        f"{'kept' if info.prefix_caching else 'not kept'} for requests that begin alike",
    ]
    if info.key_smoothing:
        lines.insert(-1, f"keys: smoothed {info.key_smoothing}")
    if info.kv_groups:
        lines.insert(-1, f"block tables: {info.kv_groups}{_windows(info)}")
    if info.kv_eviction:
        lines.append(f"eviction: {info.kv_eviction}")
    if info.batch_invariance:
        lines.append(f"batch-invariant, which costs: {info.batch_invariance}")
    for line in lines:
        where.print(line, highlight=False, markup=False)
    for text in info.notes:
        console.note(text)


def _windows(info: EngineInfo) -> str:
    if not info.kv_full_bytes_per_token:
        return ""
    return (
        f"; a token takes {console.size(info.kv_full_bytes_per_token)} behind the windows, a "
        f"sequence {console.size(info.kv_window_bytes)} within them"
    )


def _tails(info: EngineInfo) -> str:
    size = console.size(info.kv_tail_bytes)
    return f", and {size} for pages that are not full" if info.kv_tail_bytes else ""


def _part_line(part: PlannedPart, common_reason: str) -> str:
    size = f", {console.size(part.num_bytes)}" if part.num_bytes else ""
    why = "" if part.why == common_reason else f" ({part.why})"
    return f"  {part.count:>4} x {part.part}: {part.kernel}{size}{why}"
