"""``quantize --kv-cache``: the runtime's figures on caches for the offline half.

The written checkpoint runs with its cache in the compute dtype, and with the forms in question.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.table import Table
from torch import Tensor

from qtool.errors import ModelError
from qtool.formats.checkpoint import CONFIG_NAME, read_json
from qtool.formats.kv_plan import AUTO, FP8, KEYS_BY_TOKEN, KeyExponents, KVPlan
from qtool.quantize.cache_search import frontier, search
from qtool.quantize.kv_cache import SCORED_EVERY, SWEPT, CacheTask
from qtool.runtime.cache_quality import CacheQuality, compare_caches
from qtool.runtime.cache_sweep import layer_losses
from qtool.runtime.config import parse_decoder_config
from qtool.runtime.key_smoothing import calibrated_exponents
from qtool.runtime.kv_schemes import PAGE_SIZE, SCHEMES, WIDE, LayerSchemes
from qtool.runtime.loaded_model import LoadedModel, choose_cache, load_model
from qtool.runtime.options import ModelOptions

# Bytes of an element of the compute dtype that sizes are reckoned beside.
WIDE_BYTES = 2

Report = Callable[[str, int, int], None]


def require_runtime(folder: Path, asked: str | None) -> None:
    """Refuse, before any work, a plan that nothing would follow.

    FP8 scales are an exchange format's, and other engines use them.

    Raises:
        ModelError: our runtime does not run the model in ``folder``.
    """
    if asked in (None, FP8):
        return
    try:
        parse_decoder_config(read_json(folder / CONFIG_NAME))
    except ModelError as error:
        raise ModelError(
            f"--kv-cache {asked}: only qtool's own runtime follows such a plan, and it does not "
            f"run this model ({error}); ask for --kv-cache fp8, or leave it out"
        ) from None


def plan(task: CacheTask, report: Report) -> KVPlan:
    """Choose where that is asked, and measure.

    Args:
        task: see there.
        report: told the phase, what is done of it, and how much there is.
    """
    config = read_json(task.folder / CONFIG_NAME)
    try:
        decoder = parse_decoder_config(config)
    except ModelError:
        # FP8 scales of a family that only other engines run.
        return KVPlan.uniform(task.asked, int(config["num_hidden_layers"]))
    layers, exponents = decoder.num_layers, calibrated_exponents(task.key_peaks, decoder)
    model = _load(task, exponents)
    chosen = (
        KVPlan.uniform(task.asked, layers) if task.asked != AUTO else _choose(model, task, report)
    )
    form = FP8 if task.asked == FP8 else LayerSchemes.of(chosen.layers)
    size = _page_bytes(model, form)
    elements = PAGE_SIZE * 2 * layers * model.decoder.config.num_kv_heads
    return replace(
        chosen,
        bits=8 * size / (elements * model.decoder.config.head_dim),
        bytes_per_token=-(-size // PAGE_SIZE),
        measured=_measured(model, form, task, report),
        key_exponents=_kept(exponents, chosen, model),
    )


def _kept(
    exponents: Sequence[KeyExponents], plan: KVPlan, model: LoadedModel
) -> tuple[KeyExponents | None, ...] | None:
    """Exponents of the layers whose scheme has a use for them, and that could be smoothed."""
    kept = tuple(
        heads
        if plan.layers[layer] in KEYS_BY_TOKEN and layer not in model.smoothed.refused
        else None
        for layer, heads in enumerate(exponents)
    )
    return kept if any(kept) else None


def _load(task: CacheTask, exponents: Sequence[KeyExponents]) -> LoadedModel:
    lengths = [task.samples.shape[1]] if task.samples is not None else []
    lengths += [task.held_out.ids.shape[1]] if task.held_out is not None else []
    loading = ModelOptions(
        device=task.device.type, dtype="fp32", self_check=False, kv_cache_dtype=WIDE.name
    )
    return load_model(task.folder, loading, max(lengths, default=None), exponents or None)


def _choose(model: LoadedModel, task: CacheTask, report: Report) -> KVPlan:
    """Look at every layer alone, choose by sum, and measure the choice."""
    samples = task.samples
    assert samples is not None
    losses = layer_losses(
        model.decoder,
        samples,
        SWEPT,
        SCORED_EVERY,
        lambda done, total: report("kv cache sweep", done, total),
    )
    sizes = {name: _scheme_bytes(model, name) for name in (WIDE.name, *SWEPT)}
    front = frontier(sizes, [{WIDE.name: 0.0, **layer} for layer in losses])

    def joint(names: Sequence[str]) -> float:
        return _kl(model, LayerSchemes.of(names), samples, report).kl

    found = search(front, task.budget, joint)
    chosen_from = {
        "text": task.samples_text,
        "windows": len(samples),
        "seq_len": samples.shape[1],
        "budget": task.budget,
        "kl": found.loss,
        "sum_of_layers": found.choice.loss,
        "tries": found.tries,
        "layer_losses": losses,
    }
    return KVPlan(AUTO, found.choice.schemes, chosen_from=chosen_from)


def _kl(
    model: LoadedModel, form: str | LayerSchemes, windows: Tensor, report: Report
) -> CacheQuality:
    """A form against the compute dtype, with the same weights."""
    rows = compare_caches(
        model, [WIDE.name, form], windows, lambda done, total: report("kv cache", done, total)
    )
    return rows[1]


def _measured(
    model: LoadedModel, form: str | LayerSchemes, task: CacheTask, report: Report
) -> dict[str, Any] | None:
    """What the plan costs on text that nothing was chosen by."""
    if task.held_out is None:
        return None
    windows, found = task.held_out.ids, _kl(model, form, task.held_out.ids, report)
    return {
        "text": task.held_out.text,
        "text_sha256": task.held_out.sha256,
        "windows": len(windows),
        "seq_len": windows.shape[1],
        "kl": found.kl,
        "nll": found.nll,
        "top1_agreement": found.top1,
    }


def _scheme_bytes(model: LoadedModel, name: str) -> int:
    config = model.decoder.config
    return SCHEMES[name].page_bytes(PAGE_SIZE, config.num_kv_heads, config.head_dim, WIDE_BYTES)


def _page_bytes(model: LoadedModel, form: str | LayerSchemes) -> int:
    """Bytes of 64 tokens, all layers, scales included."""
    config = model.decoder.config
    schemes = choose_cache(form, model.kv_scales, model.decoder)[0].schemes
    return schemes.page_bytes(PAGE_SIZE, config.num_kv_heads, config.head_dim, WIDE_BYTES)


def cache_table(record: Mapping[str, Any]) -> Table:
    """What a plan gives to how many layers, and what that costs."""
    measured, chosen = record["measured"], record["chosen_from"]
    table = Table(title=f"cache of keys and values, {record['name']}")
    figures = ("bits", "bytes a token", "smoothed", "KL, held-out", "KL, calibration", "budget")
    for column in ("layers", *figures):
        table.add_column(column, justify="left" if column == "layers" else "right")
    names = record["layers"]
    counts = {name: names.count(name) for name in dict.fromkeys(names)}
    bits, size = record["bits"], record["bytes_per_token"]
    table.add_row(
        ", ".join(f"{count} {name}" for name, count in counts.items()),
        "-" if bits is None else f"{bits:.2f}",
        "-" if size is None else f"{size:,}",
        f"{record['smoothed_layers']} of {len(names)}",
        "-" if measured is None else f"{measured['kl']:.5f}",
        "-" if chosen is None else f"{chosen['kl']:.5f}",
        "-" if chosen is None else f"{chosen['budget']:g}",
    )
    return table
