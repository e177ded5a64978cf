"""Many clients at once on a cache a third of what they need: nothing leaks, nothing hangs, and each
answer is that of a solo run, to the bit.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest

from qtool.errors import QtoolError
from qtool.runtime.engine import Engine
from qtool.runtime.engine_thread import EngineThread
from qtool.runtime.loaded_model import LoadedModel, load_model
from qtool.runtime.options import EngineOptions, ModelOptions
from qtool.runtime.outputs import CompletionOutput, OutputDelta
from qtool.runtime.request import Request
from qtool.runtime.sampling_params import SamplingParams
from qtool.runtime.tokenizer import Tokenizer

NUM_CLIENTS = 4
OPEN_PER_CLIENT = 8
MAX_PROMPT, MAX_OUTPUT = 150, 60
# All open requests at their mean length, and a third of it.
BLOCKS = NUM_CLIENTS * OPEN_PER_CLIENT * (MAX_PROMPT + MAX_OUTPUT) // 2 // 16 // 3
STATM = Path("/proc/self/statm")
PAGE = 4096


@dataclass
class Job:
    """A request, the delta after which its client leaves (or stays), and what came of it."""

    request: Request
    leaves_after: int | None
    output: CompletionOutput = field(default_factory=lambda: CompletionOutput(0))
    error: QtoolError | None = None
    done: threading.Event = field(default_factory=threading.Event)


def _make_jobs(count: int, seed: int) -> list[Job]:
    chance = random.Random(seed)
    prefixes = [[chance.randrange(384) for _ in range(80)] for _ in range(5)]
    jobs: list[Job] = []
    for index in range(count):
        own = [chance.randrange(384) for _ in range(chance.randrange(1, MAX_PROMPT - 80))]
        prompt = chance.choice(prefixes)[: chance.choice([0, 30, 64, 80])] + own
        fork_of = None
        if jobs and chance.random() < 0.15:
            parent = jobs[-1].request
            prompt, fork_of = list(parent.prompt_token_ids), parent.request_id
        params = SamplingParams(
            temperature=chance.choice([0.0, 1.0]),
            seed=index,
            max_tokens=chance.randrange(1, MAX_OUTPUT),
            ignore_eos=True,
            stop=chance.choice([(), (), ("e",), ("th", "o ")]),
        )
        salt = chance.choice(["", "", "tenant"])
        request = Request(
            f"r{index}", tuple(prompt), params, chance.randrange(2), fork_of, cache_salt=salt
        )
        jobs.append(Job(request, chance.randrange(20) if chance.random() < 0.15 else None))
    return jobs


def _make_engine(model: LoadedModel, blocks: int, **settings: int) -> Engine:
    memory = blocks * 16 * model.decoder.kv_bytes_per_token
    options = EngineOptions(model="tiny", kv_cache_memory=memory, **settings)  # type: ignore[arg-type]
    return Engine(model, Tokenizer.load(model.folder), options)


def _run_alone(engine: Engine, request: Request) -> CompletionOutput:
    output = CompletionOutput(0)
    engine.add(request)
    while engine.has_work:
        for delta in engine.step():
            output.extend(delta)
    return output


def _submit(engine: EngineThread, job: Job, place: threading.Semaphore) -> None:
    name = job.request.request_id
    num_deltas = 0

    def on_output(item: OutputDelta | QtoolError) -> None:
        nonlocal num_deltas
        if job.done.is_set():
            return
        num_deltas += 1
        if isinstance(item, QtoolError):
            job.error = item
        else:
            job.output.extend(item)
        left = num_deltas == job.leaves_after
        if left:
            engine.abort(name)
        if left or job.error or job.output.finish_reason is not None:
            job.done.set()
            place.release()

    engine.submit(job.request, on_output)
    if job.leaves_after == 0:
        engine.abort(name)
        if not job.done.is_set():
            job.done.set()
            place.release()


def _client(engine: EngineThread, jobs: list[Job]) -> None:
    place = threading.Semaphore(OPEN_PER_CLIENT)
    for job in jobs:
        place.acquire()
        _submit(engine, job, place)


def _serve(engine: Engine, jobs: list[Job]) -> None:
    """Every job from a client of its own thread, until all are done."""
    with EngineThread(engine) as thread:
        clients = [
            threading.Thread(target=partial(_client, thread, jobs[i::NUM_CLIENTS]))
            for i in range(NUM_CLIENTS)
        ]
        for client in clients:
            client.start()
        for client in clients:
            client.join()
        for job in jobs:
            job.done.wait()


def _resident() -> int:
    return int(STATM.read_text().split()[1]) * PAGE if STATM.exists() else 0


def _assert_equal(job: Job, expected: CompletionOutput) -> None:
    name, output = job.request.request_id, job.output
    assert job.error is None, name
    if job.leaves_after is None or output.finish_reason is not None:
        assert output == expected, name
    else:
        assert output.token_ids == expected.token_ids[: len(output.token_ids)], name
        assert expected.text.startswith(output.text), name


def _soak(model: LoadedModel, count: int) -> int:
    """Run it and return the number of preemptions."""
    jobs = _make_jobs(count, seed=count)
    solo = _make_engine(model, 64, enable_prefix_caching=False)
    expected = [_run_alone(solo, job.request) for job in jobs]
    engine = _make_engine(model, BLOCKS, max_num_seqs=32, max_num_batched_tokens=128)
    middle = count // 2
    _serve(engine, jobs[:middle])
    resident = _resident()
    _serve(engine, jobs[middle:])
    # Half the work again takes no more memory: 16 MB are a page here and there of the allocator's.
    assert _resident() - resident < 16 * 2**20
    for job, output in zip(jobs, expected, strict=True):
        _assert_equal(job, output)
    stats = engine.stats()
    assert (stats.blocks_used, stats.num_running, stats.num_waiting) == (0, 0, 0)
    assert not engine._generations and stats.blocks_known <= BLOCKS
    assert stats.reused_tokens > 20 * count
    assert sum(job.leaves_after is not None for job in jobs) > count / 20
    assert sum(job.output.finish_reason == "stop" for job in jobs) > count / 20
    return stats.preemptions


@pytest.fixture(scope="module")
def model(model_factory: Callable[..., Path]) -> LoadedModel:
    options = ModelOptions(device="cpu", dtype="fp32", batch_invariant=True)
    return load_model(model_factory(), options)


def test_a_hundred_requests_get_their_solo_answers(model: LoadedModel) -> None:
    _soak(model, 100)


@pytest.mark.usefixtures("expecting_nothing")
def test_so_do_they_while_they_preempt_one_another(model: LoadedModel) -> None:
    assert _soak(model, 100) > 0


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_two_thousand_requests_get_their_solo_answers(model: LoadedModel) -> None:
    _soak(model, 2000)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("expecting_nothing")
def test_so_do_two_thousand_while_they_preempt_one_another(model: LoadedModel) -> None:
    assert _soak(model, 2000) > 200
