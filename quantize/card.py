"""The model card of a result: what it is, what it cost, and how to make it again."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path, PurePath
from typing import Any

from qtool.calibration.sources import parse_source
from qtool.errors import CalibrationError
from qtool.formats.kv_plan import FP8
from qtool.quantize.options import QuantizeOptions
from qtool.quantize.report import FLOAT16_SAFE, Evaluation, Report

CARD_PATH = "README.md"

# Where a result is written and computed is the user's own affair.
_NOT_SHOWN = {"overwrite", "restart", "device", "strict"}

# Options whose flag is spelled otherwise than their field.
_FLAGS = {"layers": "--layer", "formats": "--format"}

# An id on the hub: what the hub's own field for a base model takes.
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def public_name(model: str) -> str:
    """A MODEL without the path of anybody's machine: a hub id stays, a path keeps its last part."""
    return Path(model).resolve().name if Path(model).exists() else model


def command_line(model: str, options: QuantizeOptions) -> str:
    """The command that makes a result again, quoted for a shell, without local paths."""
    words = ["qtool", "quantize", public_name(model), "--out", "OUT"]
    for field in fields(options):
        value = getattr(options, field.name)
        if field.name == "method" or (value != field.default and field.name not in _NOT_SHOWN):
            words += _words(field.name, value)
    return shlex.join(words)


def _words(name: str, value: Any) -> Iterator[str]:
    flag = _FLAGS.get(name, f"--{name.replace('_', '-')}")
    if name == "symmetric":
        yield "--symmetric" if value else "--asymmetric"
    elif value is True:
        yield flag
    else:
        for item in value if isinstance(value, tuple) else (value,):
            yield flag
            yield _public_text(item) if name in ("calibration", "eval_text") else str(item)


def _public_text(spec: str) -> str:
    """A SOURCE[=WEIGHT] without its folder."""
    place, sign, weight = spec.rpartition("=")
    try:
        source = parse_source(place if sign else weight)
    except CalibrationError:
        return re.sub(r".*/", "", spec) if spec.startswith(("/", ".", "~")) else spec
    return re.sub(r".*/", "", spec) if isinstance(source.place, Path) else spec


def model_card(report: Report, plots: Sequence[str] = ()) -> str:
    """The card in Markdown, with the header that the Hugging Face hub reads.

    ``plots`` are paths of pictures beside it.
    """
    parts = [_header(report), _title(report)]
    if report.evaluation is not None:
        parts.append(_quality(report.evaluation, calibrated_on=report.calibrated_on_held_out))
    if report.kv_cache is not None:
        parts.append(_cache(report.kv_cache))
    parts += [_layers(plots), _how(report), _warnings(report), _use(report)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _header(report: Report) -> str:
    lines = ["---"]
    if _HUB_ID.fullmatch(report.base_model):
        lines += [f"base_model: {report.base_model}", "base_model_relation: quantized"]
    lines += ["library_name: transformers", "pipeline_tag: text-generation"]
    lines += [
        "tags:",
        "- quantized",
        *(f"- {tag}" for tag in _tags(report)),
        "- qtool",
        "---",
    ]
    return "\n".join(lines)


def _tags(report: Report) -> Iterable[str]:
    """Format and method; a method may have the name of a format, and ``none`` is no method."""
    if not report.modules:
        return (report.format, "kv-cache")
    return dict.fromkeys((report.format, report.method))


def _title(report: Report) -> str:
    if not report.modules:
        return _kept_title(report)
    schemes = list(dict.fromkeys(record.used for record in report.modules))
    name = report.base_model or "A model"
    return (
        f"# {name.rpartition('/')[2]}, {report.method}\n\n"
        f"{name}, quantized to {', '.join(schemes)}: {report.bits_per_weight:.2f} bits per "
        f"quantized weight, {report.bits_per_parameter:.2f} per parameter of the whole model, "
        f"{report.total_bytes / 1e6:.0f} MB. All that is not quantized is in {report.dtype}."
    )


def _kept_title(report: Report) -> str:
    name, cache = report.base_model or "A model", report.kv_cache
    what = "" if cache is None else f", {cache['name']} cache"
    return (
        f"# {name.rpartition('/')[2]}{what}\n\n"
        f"{name} with its weights as they are, in {report.dtype}: {report.bits_per_parameter:.2f} "
        f"bits per parameter, {report.total_bytes / 1e6:.0f} MB. What is smaller is the cache of "
        "keys and values."
    )


def _quality(evaluation: Evaluation, *, calibrated_on: bool) -> str:
    quality: Mapping[str, Any] = evaluation.quality
    rows = ["| | original | quantized |", "|---|---|---|"]
    for label, key in (("perplexity", "perplexity"), ("NLL, nats per token", "nll")):
        rows.append(
            f"| {label} | {_figure(quality, f'reference_{key}')} | {_figure(quality, key)} |"
        )
    rows.append(f"| KL from the original, nats per token | | {_figure(quality, 'kl')} |")
    rows.append(f"| same likeliest token | | {_figure(quality, 'top1_agreement')} |")
    seen = (
        "which was calibrated on as well: other text may lose more"
        if calibrated_on
        else "which was not calibrated on"
    )
    return (
        "## Quality\n\n" + "\n".join(rows) + f"\n\nOn {evaluation.windows} windows of "
        f"{evaluation.seq_len} tokens of `{evaluation.text}`, {seen}. The "
        f"checkpoint was read back from disk and ran in {evaluation.engine}."
    )


def _cache(plan: Mapping[str, Any]) -> str:
    names = plan["layers"]
    layers = ", ".join(f"{names.count(name)} {name}" for name in dict.fromkeys(names))
    text = f"Keys and values are to be stored as {plan['name']} (layers: {layers})"
    if plan["bits"] is not None:
        text += f": {plan['bits']:.2f} bits an element, {plan['bytes_per_token']} bytes a token"
    if plan["smoothed_layers"]:
        text += (
            f"; keys of {plan['smoothed_layers']} layers are smoothed by factors from calibration"
        )
    if measured := plan["measured"]:
        text += (
            f". That costs {measured['kl']:.5f} nats per token, as KL divergence from the same "
            f"weights with keys and values in the compute dtype, on {measured['windows']} windows "
            f"of {measured['seq_len']} tokens of `{measured['text']}`"
        )
    how = "engines that read `kv_cache_scheme`" if plan["name"] == FP8 else "qtool"
    return f"## Cache of keys and values\n\n{text}. Followed by {how}."


def _layers(plots: Sequence[str]) -> str:
    pictures = [f"![{PurePath(path).stem} by layer]({path})" for path in plots]
    return "## By layer\n\n" + "\n\n".join(pictures) if pictures else ""


def _figure(quality: Mapping[str, Any], key: str) -> str:
    value = quality.get(key)
    return "-" if value is None else f"{value:.4f}"


def _how(report: Report) -> str:
    data = ""
    if report.calibration is not None:
        sources = ", ".join(str(entry["source"]) for entry in report.calibration["sources"])
        data = (
            f"\n\nCalibrated on {report.calibration['samples']} samples of "
            f"{report.calibration['seq_len']} tokens of {sources}."
        )
    return (
        f"## Command\n\n    {report.command}\n\nWith qtool {report.qtool_version}; "
        f"`qtool/report.json` has {'every module' if report.modules else 'all figures'}.{data}"
    )


def _warnings(report: Report) -> str:
    lines = []
    if report.fallbacks:
        names = ", ".join(f"`{r.name}` ({r.fallback})" for r in report.fallbacks)
        lines.append(f"- {len(report.fallbacks)} modules did not get what was asked: {names}.")
    if report.float16_risks:
        worst = max(report.float16_risks, key=lambda name: report.float16_risks[name])
        lines.append(
            f"- bfloat16 only: activations of `{worst}` reach {report.float16_risks[worst]:.0f}; "
            f"beyond {FLOAT16_SAFE:.0f} float16, whose largest value is 65504, may overflow."
        )
    return "## Limits\n\n" + "\n".join(lines) if lines else ""


def _use(report: Report) -> str:
    commands = ["qtool serve FOLDER"]
    # See the warnings of formats/gptq.py.
    if report.format != "gptq" or report.scheme is None or report.scheme["symmetric"]:
        commands.append("vllm serve FOLDER")
    return "## Use\n\n" + "\n".join(f"    {command}" for command in commands)
