"""``qtool eval``: perplexity and the distance from a reference model, or accuracy on tasks."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from rich.table import Table
from torch import Tensor

from qtool.calibration.data import evaluation_windows, held_out_documents, load_tokenizer
from qtool.calibration.documents import Text
from qtool.commands import cache_eval, console, harness, needle_eval, tasks
from qtool.errors import CalibrationError, UsageError
from qtool.formats.model_source import resolve_model
from qtool.runtime.evaluate import Quality, evaluate
from qtool.runtime.loaded_model import LoadedModel, load_model
from qtool.runtime.options import ModelOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalOptions:
    """``windows`` of ``seq_len`` tokens of ``text`` (a SOURCE) are scored."""

    text: str = "builtin"
    seq_len: int = 1024
    windows: int = 16


_NEEDLES = ("needle_lengths", "needle_depths", "needle_texts")
# Options that belong to one kind of evaluation.
_OWN_OPTIONS = {
    "--harness": ("harness", "include_path", "limit", "batch_size"),
    "--tasks": ("tasks", "tasks_file", "limit", "batch_size"),
    "--kv-cache": ("kv_cache", "text", "seq_len", "windows", *_NEEDLES),
    "perplexity": ("text", "seq_len", "windows"),
}


def run_chosen(
    model: str,
    reference: str | None,
    values: Mapping[str, Any],
    given: Collection[str],
    loading: ModelOptions,
    show: console.Show,
) -> None:
    """Run the one kind of evaluation that the command line asks for.

    Args:
        model, reference, loading, show: see :func:`run`.
        values: of all options of all kinds.
        given: names of those that a user wrote.

    Raises:
        UsageError: one given belongs to another kind.
        QtoolError: see the kinds.
    """
    kind = _kind(values, loading)
    if others := sorted(set(given) - set(_OWN_OPTIONS[kind])):
        option = f"--{others[0].replace('_', '-')}"
        raise UsageError(f"{option} has no meaning with {kind}; leave one of them out")
    if kind == "perplexity":
        what = EvalOptions(**{name: values[name] for name in _OWN_OPTIONS[kind]})
        run(model, reference, what, loading, show)
        return
    if kind == "--kv-cache":
        if reference is not None:
            raise UsageError("--reference has no meaning with --kv-cache; leave one of them out")
        names = cache_eval.parse_names(values["kv_cache"] or "")
        size = values["seq_len"], values["windows"]
        needles = needle_eval.NeedleOptions.parse(values)
        cache_eval.run(model, names, values["text"], *size, loading, show, needles)
        return
    shared = {name: values[name] for name in ("limit", "batch_size")}
    if kind == "--tasks":
        asked = tasks.TaskOptions(names=values["tasks"], files=values["tasks_file"], **shared)
        tasks.run(model, reference, asked, loading, show)
    else:
        wanted = tuple(name.strip() for name in values["harness"].split(",") if name.strip())
        folder = values["include_path"]
        chosen = harness.HarnessOptions(tasks=wanted, include_path=folder, **shared)
        harness.run(model, reference, chosen, loading, show)


def _kind(values: Mapping[str, Any], loading: ModelOptions) -> str:
    """Where blocks are evicted, perplexity is shown beside what it is without."""
    if values["harness"] is not None:
        return "--harness"
    if values["kv_cache"] is not None:
        return "--kv-cache"
    if values["tasks"] or values["tasks_file"]:
        return "--tasks"
    return "--kv-cache" if loading.evicts else "perplexity"


def run(
    model: str,
    reference: str | None,
    options: EvalOptions,
    loading: ModelOptions,
    show: console.Show = console.TEXT,
) -> Quality:
    """Evaluate and show the result. Raises QtoolError."""
    documents = held_out_documents(options.text)
    tokenizer = load_tokenizer(resolve_model(model))
    source = documents.render(tokenizer)
    windows = evaluation_windows(source, tokenizer, options.seq_len, options.windows)
    loaded = load_for_eval(model, options.seq_len, loading, show)
    loaded_reference = None
    if reference is not None:
        loaded_reference = load_for_eval(reference, options.seq_len, loading, show)
        _check_same_tokens(loaded, loaded_reference, source, windows, options)
    with show.steps() as steps:
        quality = evaluate(
            loaded.decoder,
            windows,
            None if loaded_reference is None else loaded_reference.decoder,
            lambda done, total: steps.update("evaluate", done, total),
        )
    facts = {
        "model": model,
        "reference": reference,
        "text": source.name,
        "text_sha256": source.fingerprint,
        "seq_len": options.seq_len,
        "windows": len(windows),
        "dtype": str(loaded.decoder.dtype).removeprefix("torch."),
        "quantization": loaded.quantization,
    }
    if show.as_json:
        console.emit("result", facts | quality.to_dict())
    else:
        console.out.print(quality_table(model, reference, quality))
        console.out.print(
            f"{facts['text']}: {len(windows)} windows of {options.seq_len} tokens, "
            f"{facts['dtype']}, {quality.tokens} tokens predicted",
            highlight=False,
        )
    return quality


def load_for_eval(
    model: str, seq_len: int, loading: ModelOptions, show: console.Show
) -> LoadedModel:
    """Load a MODEL for windows of ``seq_len`` tokens, and say what was not as asked."""
    with show.status(f"loading {model}"):
        loaded = load_model(resolve_model(model), loading, seq_len)
    for text in loaded.notes:
        show.note(text)
    return loaded


def _check_same_tokens(
    model: LoadedModel, reference: LoadedModel, text: Text, windows: Tensor, options: EvalOptions
) -> None:
    """Predictions can be compared only if both models read the same token ids."""
    tokenizer = load_tokenizer(reference.folder)
    theirs = evaluation_windows(text, tokenizer, options.seq_len, len(windows))
    if not theirs.equal(windows):
        raise CalibrationError(
            f"{reference.folder} and {model.folder} split the text into different tokens; a "
            "reference is the model that was quantized"
        )


def quality_table(model: str, reference: str | None, quality: Quality) -> Table:
    """Perplexity of one model, or of two side by side with their distance."""
    table = Table()
    for column in ("model", "perplexity", "NLL", "KL to reference", "top-1 agreement"):
        table.add_column(column, justify="left" if column == "model" else "right")
    if reference is not None:
        assert quality.reference_perplexity is not None and quality.reference_nll is not None
        table.add_row(
            reference,
            f"{quality.reference_perplexity:.3f}",
            f"{quality.reference_nll:.4f}",
            "-",
            "-",
        )
    distance = (
        ("-", "-")
        if quality.kl is None or quality.top1 is None
        else (f"{quality.kl:.4f}", f"{quality.top1:.1%}")
    )
    table.add_row(model, f"{quality.perplexity:.3f}", f"{quality.nll:.4f}", *distance)
    return table
