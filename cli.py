"""The ``qtool`` command: thin commands that turn options into frozen values and call one function.

Nothing heavy is imported before a command runs, so ``--help`` is instant.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from qtool import __version__
from qtool.commands.cli_groups import bench, kernels
from qtool.commands.cli_options import (
    FORMAT_NAMES,
    METHOD_NAMES,
    ErrorsAsMessages,
    engine_options,
    loading_options,
    output_options,
    parse_engine_options,
    run_options,
    sampling_options,
    scheme_options,
    take_loading,
    targets_option,
)


@click.group(cls=ErrorsAsMessages, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="qtool")
def main() -> None:
    """From checkpoint to endpoint: quantize a language model, prove what it cost, serve it.

    MODEL is a Hugging Face folder, a .gguf file, a packaged model by name (smollm2-135m), or a
    model's id on the hub (org/name).
    SOURCE is text: "builtin", a file (.txt .jsonl .json .csv .parquet), or a dataset of the hub
    (org/name). Where it has columns, ":COLUMN" chooses one. docs/calibration.md says it all.
    """


@main.command()
@click.argument("model")
@click.option(
    "--method",
    type=click.Choice(METHOD_NAMES),
    default="awq",
    show_default=True,
    help="+clip and +gptq are further steps; none leaves weights as they are, for --kv-cache. "
    "docs/quantization.md tells them apart.",
)
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder to write.")
@click.option(
    "--format",
    "formats",
    type=click.Choice(FORMAT_NAMES),
    multiple=True,
    default=["compressed-tensors"],
    show_default=True,
    help="How weights lie on disk; may be repeated, then others lie beside --out as OUT-FORMAT.",
)
@scheme_options
@click.option(
    "--ignore",
    metavar="PATTERN",
    multiple=True,
    help="Linears left as they are: whole dotted parts of their names (layers.0, down_proj), or "
    "re: and a regular expression; may be repeated.",
)
@click.option(
    "--calibration",
    metavar="SOURCE[=WEIGHT]",
    multiple=True,
    default=["builtin"],
    show_default=True,
    help='May be repeated; weights are shares of the samples. "self" is text the model says.',
)
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
@run_options
@output_options
def quantize(
    model: str, out: Path, dry_run: bool, as_json: bool, quiet: bool, **values: Any
) -> None:
    """Quantize MODEL into a checkpoint that other engines load."""
    from qtool.commands import dry_run as forecast
    from qtool.commands import quantize as command
    from qtool.commands.console import Show
    from qtool.quantize.options import QuantizeOptions

    chosen = QuantizeOptions(**values)
    given = click.get_current_context().get_parameter_source("calibration")
    if given is ParameterSource.COMMANDLINE and not chosen.needs_calibration:
        raise click.UsageError(
            f"--calibration: method {chosen.method} uses no calibration text; leave the option out"
        )
    run = forecast.run if dry_run else command.run
    run(model, out, chosen, Show(as_json, quiet))


@main.command()
@click.argument("model")
@click.option(
    "--format", "target", type=click.Choice(FORMAT_NAMES), required=True, help="To write."
)
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder to write.")
@click.option("--overwrite", is_flag=True, help="Replace a checkpoint at the output folder.")
@output_options
def convert(
    model: str, target: str, out: Path, overwrite: bool, as_json: bool, quiet: bool
) -> None:
    """Write the quantized MODEL in another format, with the same weights to the bit.

    What would be lost is an error that names it. docs/formats.md says who loads which format.
    """
    from qtool.commands import convert as command
    from qtool.commands.console import Show

    command.run(model, out, target, Show(as_json, quiet), overwrite=overwrite)


@main.command("eval")
@click.argument("model")
@click.option("--reference", metavar="MODEL", help="Also measure the distance from this model.")
@click.option("--text", metavar="SOURCE", default="builtin", show_default=True)
@click.option("--seq-len", type=int, default=1024, show_default=True, help="Tokens of a window.")
@click.option("--windows", type=int, default=16, show_default=True, help="Windows to score.")
@click.option(
    "--kv-cache",
    metavar="FORM[,FORM]",
    help="Compare forms of the cache on the windows, such as plan,fp8,int8,k8v4,int4, with the "
    "compute dtype's; plan is what the checkpoint declares. docs/kv-cache.md tells them apart. "
    "With --kv-eviction each of them twice.",
)
@click.option(
    "--needle-lengths",
    metavar="N[,N]",
    help="Also hide facts in texts of so many tokens, such as 512,1024, and ask for them; with "
    "--kv-cache or --kv-eviction.",
)
@click.option(
    "--needle-depths", type=int, default=5, show_default=True, help="Facts in a text, evenly."
)
@click.option("--needle-texts", type=int, default=4, show_default=True, help="Of each length.")
@click.option(
    "--tasks",
    type=click.Choice(["builtin-cloze"]),
    multiple=True,
    help="Accuracy on questions, instead of perplexity; builtin-cloze asks for last words.",
)
@click.option(
    "--tasks-file",
    type=click.Path(path_type=Path),
    multiple=True,
    help="The same with questions of your own, as JSON lines: cloze or multiple choice.",
)
@click.option(
    "--harness",
    metavar="TASK[,TASK]",
    help="Tasks of lm-evaluation-harness, instead of perplexity (needs the extra lm-eval).",
)
@click.option(
    "--include-path", type=click.Path(path_type=Path), help="Folder with more tasks for --harness."
)
@click.option("--limit", type=click.IntRange(1), help="Only the first questions of each task.")
@click.option(
    "--batch-size",
    type=click.IntRange(1),
    default=8,
    show_default=True,
    help="Questions at a time; it changes the speed, and scores by rounding at most.",
)
@loading_options(dtype="fp32")
@output_options
def evaluate(
    model: str,
    reference: str | None,
    as_json: bool,
    quiet: bool,
    **chosen: Any,
) -> None:
    """Perplexity of MODEL, or its accuracy on tasks; with a reference also the distance from it.

    A line of a tasks file is {"context": TEXT, "target": TEXT}, or {"question": TEXT, "choices":
    [TEXT, ...], "answer": CHOICE OR INDEX}; "context" in place of "question" is taken as it is.
    """
    from qtool.commands import evaluate as command
    from qtool.commands.console import Show
    from qtool.runtime.options import ModelOptions

    loading = ModelOptions(**take_loading(chosen))
    source = click.get_current_context().get_parameter_source
    given = {name for name in chosen if source(name) is ParameterSource.COMMANDLINE}
    command.run_chosen(model, reference, chosen, given, loading, Show(as_json, quiet))


@main.command()
@click.argument("model")
@click.argument("prompt")
@click.option("--chat", is_flag=True, help="Send PROMPT through the model's chat template.")
@sampling_options
@loading_options()
def generate(
    model: str,
    prompt: str,
    chat: bool,
    **sampling: Any,
) -> None:
    """Complete PROMPT with MODEL and print the text as it comes."""
    from qtool.commands import generate as command
    from qtool.runtime.options import ModelOptions
    from qtool.runtime.sampling_params import SamplingParams

    loading = ModelOptions(**take_loading(sampling))
    command.run(model, prompt, SamplingParams(**sampling), loading, chat=chat)


@main.command()
@click.argument("model", required=False)
@click.option("--model", "model_option", metavar="MODEL", help="The same as the argument.")
@click.option("--host", default="127.0.0.1", show_default=True)
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True)
@loading_options()
@engine_options
@click.option("--quantization", metavar="NAME", help="Checked against what the checkpoint says.")
@click.option("--tensor-parallel-size", type=int, default=1, show_default=True)
@click.option("--pipeline-parallel-size", type=int, default=1, show_default=True)
@click.option("--api-key", envvar="QTOOL_API_KEY", help="Clients must send it as a bearer token.")
@click.option("--served-model-name", help="Name in the API; default: MODEL.")
@click.option("--seed", type=int, help="Seed of requests that bring none.")
@click.option("--plan", is_flag=True, help="Load, print what would run and what fits, and stop.")
def serve(
    model: str | None,
    model_option: str | None,
    host: str,
    port: int,
    api_key: str | None,
    plan: bool,
    **engine: Any,
) -> None:
    """Serve MODEL over the OpenAI HTTP API."""
    if (model is None) == (model_option is None):
        raise click.UsageError("give MODEL once: as the argument, or with --model")
    from qtool.commands import serve as command

    chosen = parse_engine_options(model or model_option or "", engine)
    serving = command.ServeOptions(host=host, port=port, api_key=api_key, only_plan=plan)
    command.run(chosen, serving)


@main.command()
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@targets_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def validate(folder: Path, targets: tuple[Any, ...], as_json: bool) -> None:
    """Would the loaders of vLLM, transformers and qtool take the checkpoint in DIR?

    Rules on files, config and headers; nothing is loaded. The exit code is 1 if there are errors.
    """
    from qtool.commands import validate as command
    from qtool.commands.console import Show

    command.run(folder, targets, Show(as_json))


@main.command("inspect")
@click.argument("path", metavar="DIR|FILE", type=click.Path(path_type=Path))
@click.option("--all", "every", is_flag=True, help="A row for each module.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def look(path: Path, every: bool, as_json: bool) -> None:
    """What a checkpoint is: parameters, bits, schemes, sizes, and the quality its report records.

    DIR is a model folder of any format, FILE a .safetensors or .gguf file. Only headers are read.
    """
    from qtool.commands import inspect as command
    from qtool.commands.console import Show

    command.run(path, Show(as_json), every=every)


@main.command()
@click.option("--build", is_flag=True, help="Compile the native CPU code now, or fail.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def doctor(build: bool, as_json: bool) -> None:
    """What this machine has, and which kernels each operation would take here."""
    from qtool.commands import doctor as command
    from qtool.commands.console import Show

    command.run(Show(as_json), build)


@main.command()
@click.argument("model")
@loading_options()
@output_options
def tune(model: str, as_json: bool, quiet: bool, **loading: Any) -> None:
    """Measure on this GPU which tiles MODEL's quantized linears and experts run fastest in.

    The table is kept in qtool's cache and read by later loads, until Triton or qtool's layout
    changes. Without it tiles follow from rules.
    """
    from qtool.commands import tune as command
    from qtool.commands.console import Show
    from qtool.runtime.options import ModelOptions

    command.run(model, ModelOptions(**take_loading(loading)), Show(as_json, quiet))


@main.command()
@click.option("--out", type=click.Path(path_type=Path), help="Keep the checkpoint here.")
def demo(out: Path | None) -> None:
    """Quantize a small real model, measure it, serve it and ask it something."""
    from qtool.commands import demo as command

    command.run(out)


main.add_command(bench)
main.add_command(kernels)
