"""Options that several commands share, and how errors and signals become exit codes.

Nothing heavy is imported here: ``--help`` is instant.
"""

from __future__ import annotations

import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from typing import Any, NoReturn

import click

from qtool.errors import QtoolError
from qtool.formats.validation.finding import TARGETS
from qtool.runtime.eviction import KV_EVICTIONS
from qtool.runtime.kv_schemes import KV_CACHE_DTYPES

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]

SIZE_UNITS = {"": 1, "K": 1024, "M": 1024**2, "G": 1024**3, "T": 1024**4}


class Terminated(KeyboardInterrupt):
    """SIGTERM, taken like Ctrl-C: what is half done is cleaned up on the way out."""


class ErrorsAsMessages(click.Group):
    """Turns qtool's own errors into a message and their exit code; others keep their traceback.

    Ctrl-C and SIGTERM end with the shell's codes for them, 128 and the signal's number.
    """

    def invoke(self, ctx: click.Context) -> Any:
        _escape_unprintable()
        try:
            with _sigterm_as_exception():
                return super().invoke(ctx)
        except QtoolError as error:
            click.echo(f"error: {error}", err=True)
            ctx.exit(error.exit_code)
        except Terminated:
            click.echo("terminated", err=True)
            ctx.exit(128 + signal.SIGTERM)
        except KeyboardInterrupt:
            click.echo("interrupted", err=True)
            ctx.exit(128 + signal.SIGINT)


@contextmanager
def _sigterm_as_exception() -> Iterator[None]:
    def terminate(*_: object) -> NoReturn:
        raise Terminated

    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers
        return
    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _escape_unprintable() -> None:
    """Text a stream's encoding lacks (Chinese under an ASCII locale) is escaped, not a crash."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def parse_size(value: str) -> int:
    """Bytes of a size: a plain number, or with K, M, G, T (powers of 1024; ``GiB`` is ``G``)."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", value, re.IGNORECASE)
    if match is None:
        raise click.BadParameter(f"{value!r} is no size; write 2G, 512M or a number of bytes")
    return int(float(match[1]) * SIZE_UNITS[match[2].upper()])


def parse_group_size(value: str) -> int | str:
    """``auto``, ``row`` or a number of weights."""
    if value in ("auto", "row"):
        return value
    if not value.isdigit() or int(value) < 1:
        raise click.BadParameter(f"{value!r}: use auto, row, or a number of weights such as 128")
    return int(value)


def parse_bits(value: str) -> int:
    """``4`` or ``8``."""
    if value not in ("4", "8"):
        raise click.BadParameter(f"{value!r} is not one of '4', '8'")
    return int(value)


def options(*decorators: Decorator) -> Decorator:
    """Several options as one decorator, in the order they are listed."""

    def apply(function: Callable[..., Any]) -> Callable[..., Any]:
        for decorator in reversed(decorators):
            function = decorator(function)
        return function

    return apply


# Repeated here so that --help loads no torch; a test holds it against runtime.kernels.
BACKEND_NAMES = ("auto", "reference", "cpu", "triton")


_CACHE_OPTIONS = (
    click.option(
        "--kv-cache-dtype",
        type=click.Choice(KV_CACHE_DTYPES),
        default="auto",
        show_default=True,
        help="Keys and values; auto is the checkpoint's own plan, or wide, the compute dtype, "
        "where it has none. docs/kv-cache.md tells them apart.",
    ),
    click.option(
        "--kv-eviction",
        type=click.Choice(KV_EVICTIONS),
        default="off",
        show_default=True,
        help="heavy-hitter: long sequences give up the blocks that get the least attention.",
    ),
    click.option(
        "--kv-budget", type=int, metavar="TOKENS", help="That a sequence keeps; with eviction."
    ),
)


def loading_options(dtype: str = "auto") -> Decorator:
    """Where and how a model is loaded."""
    return options(
        click.option(
            "--device",
            type=click.Choice(["auto", "cpu", "cuda"]),
            default="auto",
            show_default=True,
        ),
        click.option(
            "--dtype",
            type=click.Choice(["auto", "bf16", "fp16", "fp32"]),
            default=dtype,
            show_default=True,
            help="Compute dtype; auto follows the checkpoint.",
        ),
        click.option(
            "--backend",
            type=click.Choice(BACKEND_NAMES),
            default="auto",
            show_default=True,
            help="Kernels; reference is exact and does not depend on the batch; triton is for "
            "GPUs.",
        ),
        click.option(
            "--cpu-compute",
            type=click.Choice(["auto", "int8", "bf16", "fp32"]),
            default="auto",
            show_default=True,
            help="What native CPU kernels multiply in; auto is int8 for quantized weights in bf16.",
        ),
        *_CACHE_OPTIONS,
        click.option(
            "--batch-invariant",
            is_flag=True,
            help="The same tokens for a request in any company; the load plan says what it costs.",
        ),
        click.option("--strict", is_flag=True, help="Anything that is not as asked is an error."),
        click.option(
            "--self-check/--no-self-check",
            default=True,
            help="Ask a checkpoint's own probe after loading; default: yes.",
        ),
    )


def take_loading(values: dict[str, Any]) -> dict[str, Any]:
    """Move the values of :func:`loading_options` out of a command's; fields of ModelOptions."""
    names = (
        "device",
        "dtype",
        "backend",
        "cpu_compute",
        "kv_cache_dtype",
        "kv_eviction",
        "kv_budget",
        "batch_invariant",
        "strict",
        "self_check",
    )
    return {name: values.pop(name) for name in names}


# Repeated here so that --help loads no torch; a test holds it against quantize.methods.
METHOD_NAMES = (
    "rtn",
    "rtn+clip",
    "gptq",
    "awq",
    "awq+gptq",
    "smoothquant",
    "smoothquant+gptq",
    "fp8",
    "fp8+gptq",
    "none",
)

# Likewise of formats.kv_plan.
KV_CACHE_CHOICES = ("fp8", "int8", "int4", "k8v4", "auto")

# Likewise of formats.registry.
FORMAT_NAMES = ("compressed-tensors", "awq", "gptq", "fp8")

scheme_options = options(
    click.option("--bits", type=parse_bits, metavar="4|8", help="Of weights alone; default 4."),
    click.option(
        "--group-size",
        type=parse_group_size,
        metavar="auto|N|row",
        help="Weights that share a scale; auto, the default, takes the largest of 128, 64, 32 that "
        "fits all rows.",
    ),
    click.option(
        "--symmetric/--asymmetric",
        default=None,
        help="Default: asymmetric at 4 bits, symmetric at 8.",
    ),
    click.option(
        "--activations",
        type=click.Choice(["dynamic", "static"]),
        help="Scales of SmoothQuant's inputs: one a token (default), or one from calibration.",
    ),
    click.option(
        "--granularity",
        type=click.Choice(["tensor", "channel", "block"]),
        help="What shares an FP8 scale: channel (default; inputs by token), tensor (static "
        "inputs), or blocks of 128 x 128 (inputs in groups of 128).",
    ),
    click.option("--weight-only", is_flag=True, help="FP8 weights, inputs in 16 bits."),
    click.option(
        "--layer",
        "layers",
        metavar="PATTERN=SCHEME",
        multiple=True,
        help="Another scheme for some linears: w4, w8 (-sym, -asym, -g64, -row), w8a8 (-static), "
        "fp8 (-tensor, -block, -weights). Patterns as for --ignore; the last one that fits holds.",
    ),
    click.option(
        "--lm-head",
        type=parse_bits,
        metavar="4|8",
        help="Quantize the head too, in this many bits.",
    ),
    click.option(
        "--kv-cache",
        type=click.Choice(KV_CACHE_CHOICES),
        help="How keys and values are stored when the result runs: fp8 calibrates scales, auto "
        "finds a form for each layer; docs/kv-cache.md tells them apart.",
    ),
    click.option(
        "--kv-cache-loss",
        type=float,
        metavar="NATS",
        help="What --kv-cache auto may cost: KL divergence a token; default 0.005.",
    ),
    click.option("--skip-first", type=int, default=0, help="Leave the first N blocks as they are."),
    click.option("--skip-last", type=int, default=0, help="Leave the last N blocks as they are."),
)


sampling_options = options(
    click.option("--max-tokens", type=int, default=256, show_default=True),
    click.option("--min-tokens", type=int, default=0, show_default=True),
    click.option("--temperature", type=float, default=0.8, show_default=True, help="0 is greedy."),
    click.option("--top-p", type=float, default=0.95, show_default=True),
    click.option("--top-k", type=int, default=0, show_default=True, help="0 keeps all tokens."),
    click.option("--min-p", type=float, default=0.0, show_default=True),
    click.option("--repetition-penalty", type=float, default=1.0, show_default=True),
    click.option("--seed", type=int, help="Makes sampling reproducible."),
    click.option("--stop", multiple=True, help="Text that ends the output; may be repeated."),
    click.option("--ignore-eos", is_flag=True, help="Go on after end-of-sequence tokens."),
)


targets_option = click.option(
    "--for",
    "targets",
    type=click.Choice(TARGETS),
    multiple=True,
    help="Whose loader; may be repeated. Default: all of them.",
)


# How a quantization runs, whatever its method.
run_options = options(
    click.option(
        "--eval-windows",
        type=int,
        default=4,
        show_default=True,
        help="Windows of held-out text to compare the result with the original on; 0 for none.",
    ),
    click.option(
        "--eval-text", metavar="SOURCE", default="builtin", show_default=True, help="Held-out text."
    ),
    click.option(
        "--strict", is_flag=True, help="A module that does not get what is asked is an error."
    ),
    click.option(
        "--restart", is_flag=True, help="Discard what an unfinished run has left in OUT.work."
    ),
    click.option(
        "--dry-run",
        is_flag=True,
        help="Write nothing; say what each module gets, and the memory, disk and time it takes.",
    ),
)


output_options = options(
    click.option(
        "--json",
        "as_json",
        is_flag=True,
        help="One JSON object a line: progress, notes, and the result as the last one.",
    ),
    click.option("--quiet", is_flag=True, help="No progress; notes, result and errors remain."),
)


# The size of an engine, and who comes first.
engine_options = options(
    click.option("--max-num-seqs", type=int, default=256, show_default=True),
    click.option("--max-model-len", type=int, help="Tokens of one sequence; default: the model's."),
    click.option("--max-num-batched-tokens", type=int, default=2048, show_default=True),
    click.option(
        "--block-size",
        type=int,
        help="Tokens of a cache block; default: 16, and 64 for k8v4 and int4.",
    ),
    click.option(
        "--enable-prefix-caching/--no-enable-prefix-caching",
        default=True,
        help="Requests that begin alike share what of it is computed; default: yes.",
    ),
    click.option(
        "--scheduling-policy",
        type=click.Choice(["priority", "fcfs"]),
        default="priority",
        show_default=True,
        help="priority: lower first, then by arrival; fcfs: by arrival, priorities are refused.",
    ),
    click.option("--gpu-memory-utilization", type=float, default=0.9, show_default=True),
    click.option(
        "--kv-cache-memory",
        type=parse_size,
        metavar="SIZE",
        help="For keys and values, such as 2G.",
    ),
)


bench_options = options(
    loading_options(),
    engine_options,
    click.option("--seed", type=int, default=0, show_default=True, help="Of the prompts."),
    output_options,
)


def parse_engine_options(model: str, values: dict[str, Any]) -> Any:
    """EngineOptions of the values that loading and engine options gave."""
    from qtool.runtime.options import EngineOptions, ModelOptions

    loading = ModelOptions(**take_loading(values))
    return EngineOptions(model=model, loading=loading, **values)
