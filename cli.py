"""The ``qtool`` command: thin commands that turn options into frozen values and call one function.

Nothing heavy is imported before a command runs, so ``--help`` is instant.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from qtool import __version__
from qtool.errors import QtoolError

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]

SIZE_UNITS = {"": 1, "K": 1024, "M": 1024**2, "G": 1024**3, "T": 1024**4}


class ErrorsAsMessages(click.Group):
    """Turns qtool's own errors into a message and their exit code; others keep their traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except QtoolError as error:
            click.echo(f"error: {error}", err=True)
            ctx.exit(error.exit_code)


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


def options(*decorators: Decorator) -> Decorator:
    """Several options as one decorator, in the order they are listed."""

    def apply(function: Callable[..., Any]) -> Callable[..., Any]:
        for decorator in reversed(decorators):
            function = decorator(function)
        return function

    return apply


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
            type=click.Choice(["auto", "reference", "cpu"]),
            default="auto",
            show_default=True,
            help="Kernels; reference is exact and does not depend on the batch.",
        ),
        click.option(
            "--cpu-compute",
            type=click.Choice(["auto", "int8", "bf16", "fp32"]),
            default="auto",
            show_default=True,
            help="What native CPU kernels multiply in; auto is int8 for quantized weights in bf16.",
        ),
        click.option(
            "--kv-cache-dtype",
            type=click.Choice(["auto", "int8"]),
            default="auto",
            show_default=True,
            help="Keys and values; auto is the compute dtype.",
        ),
        click.option("--strict", is_flag=True, help="Anything that is not as asked is an error."),
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


@click.group(cls=ErrorsAsMessages, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="qtool")
def main() -> None:
    """From checkpoint to endpoint: quantize a language model, prove what it cost, serve it.

    MODEL is a Hugging Face folder, a .gguf file, or a packaged model by name (smollm2-135m).
    SOURCE is "builtin" or a text file.
    """


@main.command()
@click.argument("model")
@click.option("--method", type=click.Choice(["awq", "rtn"]), default="awq", show_default=True)
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder to write.")
@click.option("--bits", type=click.Choice(["4", "8"]), default="4", show_default=True)
@click.option(
    "--group-size",
    type=parse_group_size,
    metavar="auto|N|row",
    default="auto",
    show_default=True,
    help="Weights that share a scale; auto takes the largest of 128, 64, 32 that fits all rows.",
)
@click.option(
    "--symmetric/--asymmetric", default=None, help="Default: asymmetric at 4 bits, symmetric at 8."
)
@click.option("--calibration", metavar="SOURCE", default="builtin", show_default=True)
@click.option("--samples", type=int, default=128, show_default=True, help="Calibration blocks.")
@click.option("--seq-len", type=int, default=512, show_default=True, help="Tokens of a block.")
@click.option("--seed", type=int, default=0, show_default=True, help="Chooses the blocks.")
@click.option(
    "--dtype",
    type=click.Choice(["auto", "bf16", "fp16", "fp32"]),
    default="auto",
    show_default=True,
    help="Dtype of scales and unquantized tensors; auto is the model's.",
)
@click.option(
    "--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True
)
@click.option("--overwrite", is_flag=True, help="Replace a checkpoint at the output folder.")
def quantize(model: str, out: Path, bits: str, **values: Any) -> None:
    """Quantize MODEL into a compressed-tensors checkpoint."""
    from qtool.commands import quantize as command
    from qtool.quantize.options import QuantizeOptions

    command.run(model, out, QuantizeOptions(bits=int(bits), **values))


@main.command("eval")
@click.argument("model")
@click.option("--reference", metavar="MODEL", help="Also measure the distance from this model.")
@click.option("--text", metavar="SOURCE", default="builtin", show_default=True)
@click.option("--seq-len", type=int, default=1024, show_default=True, help="Tokens of a window.")
@click.option("--windows", type=int, default=16, show_default=True, help="Windows to score.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@loading_options(dtype="fp32")
def evaluate(
    model: str,
    reference: str | None,
    text: str,
    seq_len: int,
    windows: int,
    as_json: bool,
    **loading: Any,
) -> None:
    """Perplexity of MODEL; with a reference also KL divergence and top-1 agreement."""
    from qtool.commands import evaluate as command
    from qtool.runtime.options import ModelOptions

    what = command.EvalOptions(text=text, seq_len=seq_len, windows=windows)
    command.run(model, reference, what, ModelOptions(**loading), as_json)


@main.command()
@click.argument("model")
@click.argument("prompt")
@sampling_options
@loading_options()
def generate(
    model: str,
    prompt: str,
    device: str,
    dtype: str,
    backend: str,
    cpu_compute: str,
    kv_cache_dtype: str,
    strict: bool,
    **sampling: Any,
) -> None:
    """Complete PROMPT with MODEL and print the text as it comes."""
    from qtool.commands import generate as command
    from qtool.runtime.options import ModelOptions
    from qtool.runtime.sampling_params import SamplingParams

    loading = ModelOptions(
        device=device,
        dtype=dtype,
        backend=backend,
        cpu_compute=cpu_compute,
        kv_cache_dtype=kv_cache_dtype,
        strict=strict,
    )
    command.run(model, prompt, SamplingParams(**sampling), loading)


@main.command()
@click.argument("model", required=False)
@click.option("--model", "model_option", metavar="MODEL", help="The same as the argument.")
@click.option("--host", default="127.0.0.1", show_default=True)
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True)
@loading_options()
@click.option("--max-num-seqs", type=int, default=256, show_default=True)
@click.option("--max-model-len", type=int, help="Tokens of one sequence; default: the model's.")
@click.option("--max-num-batched-tokens", type=int, default=2048, show_default=True)
@click.option("--gpu-memory-utilization", type=float, default=0.9, show_default=True)
@click.option(
    "--kv-cache-memory", type=parse_size, metavar="SIZE", help="For keys and values, such as 2G."
)
@click.option("--quantization", metavar="NAME", help="Checked against what the checkpoint says.")
@click.option("--tensor-parallel-size", type=int, default=1, show_default=True)
@click.option("--pipeline-parallel-size", type=int, default=1, show_default=True)
@click.option("--api-key", envvar="QTOOL_API_KEY", help="Clients must send it as a bearer token.")
@click.option("--served-model-name", help="Name in the API; default: MODEL.")
@click.option("--seed", type=int, help="Seed of requests that bring none.")
def serve(
    model: str | None,
    model_option: str | None,
    host: str,
    port: int,
    api_key: str | None,
    device: str,
    dtype: str,
    backend: str,
    cpu_compute: str,
    kv_cache_dtype: str,
    strict: bool,
    **engine: Any,
) -> None:
    """Serve MODEL over the OpenAI HTTP API."""
    if (model is None) == (model_option is None):
        raise click.UsageError("give MODEL once: as the argument, or with --model")
    from qtool.commands import serve as command
    from qtool.runtime.options import EngineOptions, ModelOptions

    loading = ModelOptions(
        device=device,
        dtype=dtype,
        backend=backend,
        cpu_compute=cpu_compute,
        kv_cache_dtype=kv_cache_dtype,
        strict=strict,
    )
    chosen = EngineOptions(model=model or model_option or "", loading=loading, **engine)
    command.run(chosen, command.ServeOptions(host=host, port=port, api_key=api_key))


@main.command()
@click.option("--out", type=click.Path(path_type=Path), help="Keep the checkpoint here.")
def demo(out: Path | None) -> None:
    """Quantize a small real model, measure it, serve it and ask it something."""
    from qtool.commands import demo as command

    command.run(out)
