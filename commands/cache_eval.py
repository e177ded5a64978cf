"""``qtool eval --kv-cache``: what each form of the cache costs, in one table."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.table import Table

from qtool.calibration.data import evaluation_windows, held_out_documents, load_tokenizer
from qtool.commands import console
from qtool.commands.needle_eval import (
    Cells,
    NeedleOptions,
    find_needles,
    make_texts,
    needle_table,
    to_json,
)
from qtool.errors import UsageError
from qtool.formats.checkpoint import CONFIG_NAME, read_json
from qtool.formats.kv_plan import declared_plan
from qtool.formats.model_source import resolve_model
from qtool.runtime.cache_cases import cache_cases
from qtool.runtime.cache_quality import CacheQuality, compare_cases
from qtool.runtime.config import parse_decoder_config
from qtool.runtime.kv_schemes import FOLLOW, SCHEMES, WIDE
from qtool.runtime.loaded_model import load_model
from qtool.runtime.options import ModelOptions

# What the checkpoint declares, among the forms to compare.
PLAN = "plan"


def parse_names(text: str) -> list[str]:
    """Names of forms as given, the compute dtype's before all of them.

    Raises:
        UsageError: there is none of a name.
    """
    asked = [name.strip() for name in text.split(",") if name.strip()]
    known = (PLAN, *SCHEMES)
    for name in asked:
        if name not in known:
            raise UsageError(f"--kv-cache {name!r}: use one of {', '.join(known)}")
    return list(dict.fromkeys([WIDE.name, *asked]))


def run(
    model: str,
    names: list[str],
    text: str,
    seq_len: int,
    count: int,
    loading: ModelOptions,
    show: console.Show = console.TEXT,
    needles: NeedleOptions | None = None,
) -> list[CacheQuality]:
    """Score ``count`` windows of ``seq_len`` tokens under each form, and show the table.

    With eviction each form has a second row, in which sequences keep no more than the budget.

    Raises:
        UsageError: the options ask for one form as well, or the checkpoint has no plan.
        QtoolError: the model or the text cannot be read.
    """
    if loading.kv_cache_dtype != FOLLOW:
        raise UsageError(
            "--kv-cache-dtype has no meaning with --kv-cache, which compares forms; leave one out"
        )
    folder = resolve_model(model)
    if PLAN in names:
        _require_plan(folder)
    tokenizer = load_tokenizer(folder)
    source = held_out_documents(text).render(tokenizer)
    windows = evaluation_windows(source, tokenizer, seq_len, count)
    hays = make_texts(needles or NeedleOptions(), source, tokenizer)
    longest, budget = max([seq_len, *hays]), loading.kv_budget
    with show.status(f"loading {model}"):
        plain = replace(loading, kv_eviction="off", kv_budget=None)
        loaded = load_model(folder, plain, longest)
    forms = [FOLLOW if name == PLAN else name for name in names]
    cases = cache_cases(loaded, forms, budget, longest)
    cases = [replace(case, name=case.name.replace(FOLLOW, PLAN)) for case in cases]
    for note in loaded.notes:
        show.note(note)
    with show.steps() as steps:
        results = compare_cases(
            cases, windows, lambda done, total: steps.update("evaluate", done, total)
        )
    found = find_needles(cases, hays, show) if hays else {}
    facts = {
        "model": model,
        "text": source.name,
        "text_sha256": source.fingerprint,
        "seq_len": seq_len,
        "windows": len(windows),
        "dtype": str(loaded.decoder.dtype).removeprefix("torch."),
        "quantization": loaded.quantization,
    }
    _show(results, found, facts, show)
    return results


def _show(
    results: list[CacheQuality], found: Cells, facts: dict[str, Any], show: console.Show
) -> None:
    for result in results:
        for note in result.notes:
            show.note(f"{result.name}: {note}")
    if show.as_json:
        rows = [result.to_dict() | {"needles": to_json(found, result.name)} for result in results]
        console.emit("result", facts | {"caches": rows})
        return
    tables = [_cost_table(results), _position_table(results)]
    for table in tables + [needle_table(found)] * bool(found):
        console.out.print(table)
    console.out.print(
        f"{facts['text']}: {facts['windows']} windows of {facts['seq_len']} tokens, "
        f"{facts['dtype']}; bytes are of a token, KL and agreement are with the first row",
        highlight=False,
    )


def _require_plan(folder: Path) -> None:
    config = read_json(folder / CONFIG_NAME)
    if declared_plan(folder, config, parse_decoder_config(config).num_layers) is None:
        raise UsageError(
            f"--kv-cache {PLAN}: the checkpoint declares none; qtool quantize --kv-cache writes one"
        )


def _cost_table(results: list[CacheQuality]) -> Table:
    table = Table()
    for column in ("cache", "bytes", "bits", "perplexity", "NLL", "+NLL", "KL", "top-1"):
        table.add_column(column, justify="left" if column == "cache" else "right")
    for result in results:
        table.add_row(
            result.name,
            f"{result.bytes_per_token:,}",
            f"{result.bits:.2f}",
            f"{result.to_dict()['perplexity']:.3f}",
            f"{result.nll:.4f}",
            f"{result.nll - results[0].nll:+.4f}",
            f"{result.kl:.5f}",
            f"{result.top1:.1%}",
        )
    return table


def _position_table(results: list[CacheQuality]) -> Table:
    table = Table(title="perplexity by position (KL)")
    table.add_column("cache")
    for part in results[0].ranges:
        table.add_column(f"{part.start}-{part.end - 1}", justify="right")
    for result in results:
        cells = (f"{part.perplexity:.3f} ({part.kl:.4f})" for part in result.ranges)
        table.add_row(result.name, *cells)
    return table
