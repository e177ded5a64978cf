"""``qtool bench``: throughput of many requests at once, and the latency of one batch.

The engine runs as it does in a server, on its own thread; times are taken where its deltas come
out. Static batching, the way before continuous batching, is the same engine given one batch at a
time: the next begins when the longest of the last one has ended.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from qtool.commands import console
from qtool.commands.bench_load import RandomLoad, Work, read_sharegpt, sharegpt_work
from qtool.commands.bench_metrics import Summary, Timing, summarize
from qtool.commands.bench_tables import as_dict, comparisons, latency_table, throughput_table
from qtool.errors import QtoolError, UsageError
from qtool.formats.model_source import resolve_model
from qtool.runtime.engine import Engine
from qtool.runtime.engine_thread import EngineThread
from qtool.runtime.loaded_model import LoadedModel, load_model
from qtool.runtime.options import EngineOptions
from qtool.runtime.outputs import OutputDelta
from qtool.runtime.request import Request
from qtool.runtime.sampling_params import SamplingParams
from qtool.runtime.tokenizer import Tokenizer

# Before anything is measured: caches, page faults, and the clock of a CPU that was idle.
WARMUP = Work(tuple(range(1, 33)), 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputOptions:
    """What ``qtool bench throughput`` runs.

    Attributes:
        num_prompts: requests of a run.
        dataset: ShareGPT's JSON; random tokens if ``None``.
        static: also run them in static batches.
        seed: of the load.
    """

    num_prompts: int = 100
    dataset: Path | None = None
    random: RandomLoad = RandomLoad()
    static: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if self.num_prompts < 1:
            raise UsageError(f"num_prompts={self.num_prompts}: must be 1 or more")
        if self.dataset is not None and self.random != RandomLoad():
            raise UsageError(
                "lengths and shared prefixes are of random prompts; leave them out with a dataset"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyOptions:
    """What ``qtool bench latency`` runs: a batch of equal requests, ``iters`` times when warm."""

    batch_size: int = 8
    input_len: int = 32
    output_len: int = 128
    warmup_iters: int = 3
    iters: int = 10
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("batch_size", "input_len", "output_len", "iters"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name}={getattr(self, name)}: must be 1 or more")
        if self.warmup_iters < 0:
            raise UsageError(f"warmup_iters={self.warmup_iters}: must be 0 or more")


@dataclass(frozen=True, slots=True)
class Bench:
    """A loaded model that engines of several kinds are made of, one after another."""

    model: LoadedModel
    tokenizer: Tokenizer
    options: EngineOptions

    @classmethod
    def load(cls, options: EngineOptions) -> Bench:
        """Raises QtoolError."""
        folder = resolve_model(options.model)
        model = load_model(folder, options.loading, options.max_model_len)
        return cls(model, Tokenizer.load(folder), options)

    @contextmanager
    def engine(self, **changes: bool) -> Iterator[EngineThread]:
        """An engine with some options changed, warm."""
        options = replace(self.options, **changes)  # type: ignore[arg-type]
        with EngineThread(Engine(self.model, self.tokenizer, options)) as engine:
            run_batch(engine, [WARMUP], "warm-up")
            yield engine

    def check_fits(self, work: Sequence[Work]) -> None:
        """Refuse work that the engine would cut short.

        Raises:
            UsageError: naming the longest.
        """
        longest = max(len(each.token_ids) + each.output_len for each in work)
        if longest > self.model.max_model_len:
            raise UsageError(
                f"the longest request has {longest} tokens, max_model_len is "
                f"{self.model.max_model_len}; ask for shorter prompts or outputs"
            )


def run_throughput(options: EngineOptions, asked: ThroughputOptions, show: console.Show) -> None:
    """Measure and print. Raises QtoolError."""
    conversations = None if asked.dataset is None else read_sharegpt(asked.dataset)
    with show.status(f"loading {options.model}"):
        bench = Bench.load(options)
    if conversations is None:
        vocab_size = bench.model.decoder.config.vocab_size
        work = asked.random.make(asked.num_prompts, vocab_size, asked.seed)
    else:
        work = sharegpt_work(conversations, bench.tokenizer, asked.num_prompts, asked.seed)
    bench.check_fits(work)
    summaries = list(_throughput(bench, work, asked, show))
    if show.as_json:
        console.emit("result", {"runs": [as_dict(summary) for summary in summaries]})
        return
    console.out.print(throughput_table(summaries))
    for line in comparisons(summaries):
        console.out.print(line, highlight=False)


def _throughput(
    bench: Bench, work: Sequence[Work], asked: ThroughputOptions, show: console.Show
) -> Iterator[Summary]:
    """Continuous batching first; then what it is compared with."""
    with_prefixes = bench.options.enable_prefix_caching
    runs = [("continuous batching", with_prefixes, len(work))]
    if asked.random.shared_prefix:
        runs = [("prefix cache on", True, len(work)), ("prefix cache off", False, len(work))]
    if asked.static:
        runs.append(("static batching", runs[-1][1], bench.options.max_num_seqs))
    for name, caches, batch_size in runs:
        with show.status(name), bench.engine(enable_prefix_caching=caches) as engine:
            yield _run(engine, name, work, batch_size)


def _run(engine: EngineThread, name: str, work: Sequence[Work], batch_size: int) -> Summary:
    """All of the work arrives now; so much of it is handed to the engine at a time."""
    before, arrived = engine.stats(), time.perf_counter()
    timings: list[Timing] = []
    for start in range(0, len(work), batch_size):
        batch = work[start : start + batch_size]
        timings += run_batch(engine, batch, f"{start}", arrived)
    after = engine.stats()
    reused = after.reused_tokens - before.reused_tokens
    return summarize(name, timings, reused, after.preemptions - before.preemptions)


def run_batch(
    engine: EngineThread, work: Sequence[Work], name: str, arrived: float | None = None
) -> list[Timing]:
    """Run requests to their end, all submitted at once.

    Args:
        name: unique among the batches of an engine.
        arrived: when they count as arrived; now if ``None``.

    Raises:
        QtoolError: one of them failed.
    """
    arrived = time.perf_counter() if arrived is None else arrived
    times: list[list[float]] = [[] for _ in work]
    failures: list[QtoolError] = []
    done = threading.Semaphore(0)

    def submit(index: int, each: Work) -> None:
        def on_output(item: OutputDelta | QtoolError) -> None:
            if isinstance(item, QtoolError):
                failures.append(item)
                done.release()
                return
            times[index] += [time.perf_counter()] * len(item.token_ids)
            if item.finish_reason is not None:
                done.release()

        params = SamplingParams(temperature=0, max_tokens=each.output_len, ignore_eos=True)
        engine.submit(Request(f"{name}-{index}", each.token_ids, params), on_output)

    for index, each in enumerate(work):
        submit(index, each)
    for _ in work:
        done.acquire()
    if failures:
        raise failures[0]
    return [
        Timing(len(each.token_ids), arrived, tuple(tokens))
        for each, tokens in zip(work, times, strict=True)
    ]


def run_latency(options: EngineOptions, asked: LatencyOptions, show: console.Show) -> None:
    """Measure and print. Raises QtoolError."""
    with show.status(f"loading {options.model}"):
        bench = Bench.load(options)
    load = RandomLoad(input_len=asked.input_len, output_len=asked.output_len, range_ratio=0)
    vocab_size = bench.model.decoder.config.vocab_size
    summaries: list[Summary] = []
    # Without a prefix cache: the same prompts come again.
    with bench.engine(enable_prefix_caching=False) as engine, show.steps() as steps:
        work = load.make(asked.batch_size, vocab_size, asked.seed)
        bench.check_fits(work)
        for index in range(asked.warmup_iters + asked.iters):
            summary = summarize("batch", run_batch(engine, work, f"i{index}"))
            if index >= asked.warmup_iters:
                summaries.append(summary)
            steps.update("latency", index + 1, asked.warmup_iters + asked.iters)
    if show.as_json:
        console.emit("result", {"runs": [as_dict(summary) for summary in summaries]})
        return
    console.out.print(latency_table(summaries))
