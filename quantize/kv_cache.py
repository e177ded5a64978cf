"""The cache's part of a result: what a planner is asked, and where its answer goes.

What a cache costs only the runtime can say, which this half does not know: a planner is handed in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qtool.errors import UsageError
from qtool.formats.checkpoint import CheckpointWriter
from qtool.formats.kv_plan import AUTO, FP8, KEYS_BY_TOKEN, KV_PLAN_PATH, KVPlan
from qtool.quantize.cache_search import MAX_TRIES
from qtool.quantize.job import Job
from qtool.quantize.options import QuantizeOptions
from qtool.quantize.prepare import HeldOut, Texts
from qtool.quantize.work import WorkFolder

# Calibration tokens on which auto looks at every layer. A sweep runs them half as often as there
# are layers times schemes: with 32 layers and 3 schemes that is as long as 96 samples of 512 tokens
# take to run through the model once, and less than any method takes with the usual 128.
SWEEP_TOKENS = 1024

# Of so many positions a sweep scores one.
SCORED_EVERY = 4

# What auto gives a layer, beside the compute dtype.
SWEPT = ("int4", "k8v4", "int8")

_SMOOTHED = (
    f"; where keys have a scale a token ({', '.join(KEYS_BY_TOKEN)}), factors from calibration"
)


@dataclass(frozen=True, slots=True, eq=False)
class CacheTask:
    """What a planner is told.

    Attributes:
        folder: the checkpoint, written but not in place.
        asked: one of :data:`~qtool.formats.kv_plan.CHOICES`.
        budget: of ``auto``: KL divergence in nats per token.
        device: where to compute.
        samples: of ``auto``: calibration windows, int64 [n, seq_len].
        samples_text: where they come from.
        held_out: text to measure the answer on, or ``None``.
        key_peaks: largest \\|key\\| of every layer on the calibration samples,
            [num_kv_heads][head_dim] each, where the plan may have factors for keys.
    """

    folder: Path
    asked: str
    budget: float
    device: torch.device
    samples: Tensor | None
    samples_text: str
    held_out: HeldOut | None
    key_peaks: tuple[Sequence[Sequence[float]], ...] = ()


# Answers with the plan, its bits and what it costs.
Planner = Callable[[CacheTask], KVPlan]


def require_planner(options: QuantizeOptions, planner: Planner | None) -> None:
    """Raise UsageError where nobody can answer what is asked: a search, or factors for keys."""
    if options.smooths_keys and planner is None:
        raise UsageError(
            f"kv_cache={options.kv_cache!r}: needs a planner, which runs the result and makes "
            "factors for keys; qtool quantize has one"
        )


def plan_cache(
    job: Job,
    texts: Texts,
    options: QuantizeOptions,
    work: WorkFolder,
    folder: Path,
    planner: Planner | None,
) -> KVPlan | None:
    """The plan of a written checkpoint; ``None`` where nothing is asked.

    Without a planner it is a uniform one, of which nothing is known.
    """
    if options.kv_cache is None:
        return None
    if planner is None:
        layers = len(job.family.block_prefixes(job.reader.config))
        return KVPlan.uniform(options.kv_cache, layers)
    names = [] if texts.manifest is None else [s["source"] for s in texts.manifest["sources"]]
    task = CacheTask(
        folder=folder,
        asked=options.kv_cache,
        budget=options.cache_budget,
        device=job.device,
        samples=sweep_samples(texts.ids) if options.kv_cache == AUTO else None,
        samples_text=", ".join(map(str, names)),
        held_out=texts.held_out,
        key_peaks=tuple(block.facts["key_peaks"] for block in work.blocks) if job.key_peaks else (),
    )
    return planner(task)


def describe_request(options: QuantizeOptions) -> str:
    """For people, before anything is done; empty where nothing is asked."""
    if options.kv_cache is None:
        return ""
    if options.kv_cache == AUTO:
        return (
            f"auto: {', '.join(SWEPT)} or the compute dtype for each layer, the fewest bytes that "
            f"cost at most {options.cache_budget:g} nats per token{_SMOOTHED}"
        )
    calibrated = _SMOOTHED if options.smooths_keys else ""
    if options.kv_cache == FP8:
        calibrated = ", a scale of keys and one of values from calibration"
    return f"{options.kv_cache} in all layers{calibrated}"


def cache_runs(
    options: QuantizeOptions, num_layers: int, num_windows: int, seq_len: int
) -> tuple[float, float]:
    """How many held-out windows of ``seq_len`` a planner runs through the result, and scores.

    Twice the held-out ones, with the cache wide and planned. For auto the sweep, whose runs begin
    at half the depth on average and score a part of their positions, and the search, both on
    calibration samples.
    """
    runs = scored = 2.0 * num_windows
    if options.kv_cache == AUTO:
        samples = min(options.samples, max(1, SWEEP_TOKENS // options.seq_len))
        windows = samples * options.seq_len / seq_len
        sweep, search = windows * num_layers * len(SWEPT) / 2, windows * 2 * MAX_TRIES
        runs += sweep + search
        scored += sweep / SCORED_EVERY + search
    return runs, scored


def sweep_samples(ids: Tensor | None) -> Tensor:
    """Some of the samples, int64 [n, seq_len], evenly spread: they are in order of their ids."""
    assert ids is not None
    count = min(len(ids), max(1, SWEEP_TOKENS // ids.shape[1]))
    return ids[[index * len(ids) // count for index in range(count)]]


def publish_plan(writer: CheckpointWriter, plan: KVPlan | None) -> None:
    """Write the plan's file; FP8 scales lie with the weights, and the config says so."""
    if plan is not None and plan.name != FP8:
        writer.add_json(KV_PLAN_PATH, plan.to_dict())


def plan_record(plan: KVPlan | None) -> Mapping[str, Any] | None:
    """What ``qtool/report.json`` says of it: all but the exponents themselves."""
    if plan is None:
        return None
    known = {k: v for k, v in plan.to_dict().items() if k not in ("version", "key_exponents")}
    return known | {"smoothed_layers": plan.num_smoothed}
