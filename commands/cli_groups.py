"""Commands that have commands of their own: ``qtool bench`` and ``qtool kernels``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from qtool.commands.cli_options import bench_options, output_options, parse_engine_options


@click.group()
def bench() -> None:
    """Measure how fast MODEL answers here, by vLLM's definitions."""


@bench.command()
@click.argument("model")
@click.option("--num-prompts", type=int, default=100, show_default=True)
@click.option(
    "--dataset",
    type=click.Path(path_type=Path),
    help="Conversations as ShareGPT's JSON; without it random tokens.",
)
@click.option("--input-len", type=int, default=128, show_default=True, help="Mean, random prompts.")
@click.option("--output-len", type=int, default=128, show_default=True, help="Mean, likewise.")
@click.option(
    "--range-ratio",
    type=float,
    default=0.5,
    show_default=True,
    help="Lengths are uniform within this share of the mean.",
)
@click.option(
    "--shared-prefix",
    type=int,
    default=0,
    show_default=True,
    help="Tokens all random prompts begin with; runs with and without the prefix cache.",
)
@click.option("--static", is_flag=True, help="Run the same in static batches too.")
@bench_options
def throughput(
    model: str,
    num_prompts: int,
    dataset: Path | None,
    static: bool,
    seed: int,
    as_json: bool,
    quiet: bool,
    **values: Any,
) -> None:
    """Requests and tokens a second of many requests that arrive at once; TTFT, TPOT, latency.

    TTFT is the time to a request's first token; TPOT is (latency - TTFT) / (output tokens - 1).
    """
    from qtool.commands import bench as command
    from qtool.commands.bench_load import RandomLoad
    from qtool.commands.console import Show

    lengths = ("input_len", "output_len", "range_ratio", "shared_prefix")
    load = RandomLoad(**{name: values.pop(name) for name in lengths})
    asked = command.ThroughputOptions(
        num_prompts=num_prompts, dataset=dataset, random=load, static=static, seed=seed
    )
    command.run_throughput(parse_engine_options(model, values), asked, Show(as_json, quiet))


@bench.command()
@click.argument("model")
@click.option("--batch-size", type=int, default=8, show_default=True)
@click.option("--input-len", type=int, default=32, show_default=True)
@click.option("--output-len", type=int, default=128, show_default=True)
@click.option("--warmup-iters", type=int, default=3, show_default=True)
@click.option("--iters", type=int, default=10, show_default=True)
@bench_options
def latency(
    model: str,
    batch_size: int,
    input_len: int,
    output_len: int,
    warmup_iters: int,
    iters: int,
    seed: int,
    as_json: bool,
    quiet: bool,
    **values: Any,
) -> None:
    """Time of one batch of equal requests, from its arrival to its last token."""
    from qtool.commands import bench as command
    from qtool.commands.console import Show

    asked = command.LatencyOptions(
        batch_size=batch_size,
        input_len=input_len,
        output_len=output_len,
        warmup_iters=warmup_iters,
        iters=iters,
        seed=seed,
    )
    command.run_latency(parse_engine_options(model, values), asked, Show(as_json, quiet))


@click.group()
def kernels() -> None:
    """The GPU kernels, without a GPU."""


@kernels.command()
@click.option("--all", "everything", is_flag=True, help="Also those without a budget; a long run.")
@click.option("--arch", "arches", multiple=True, help="Only this GPU, such as sm_90; repeatable.")
@output_options
def check(everything: bool, arches: tuple[str, ...], as_json: bool, quiet: bool) -> None:
    """Compile the kernels for GPUs that are not there and count their machine code.

    Exit code 1 if one spills, takes too much shared memory, multiplies with another instruction
    than meant, moves data between threads in its main loop, or exceeds its budget.
    """
    from qtool.commands import kernels as command
    from qtool.commands.console import Show

    command.run(Show(as_json, quiet), everything=everything, arches=arches)
