"""The engine's thread: callbacks in order, aborts, clean ends, and one client's bug is its own."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from qtool.errors import EngineError, QtoolError, RequestError
from qtool.runtime.engine_thread import EngineThread
from qtool.runtime.options import EngineOptions, ModelOptions
from qtool.runtime.outputs import OutputDelta
from qtool.runtime.request import Request
from qtool.runtime.sampling_params import SamplingParams
from qtool.runtime.startup import start_engine

Item = OutputDelta | QtoolError
LONG = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
SHORT = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)


@pytest.fixture
def engine(tiny_model_folder: Path) -> Iterator[EngineThread]:
    options = EngineOptions(
        model=str(tiny_model_folder),
        loading=ModelOptions(device="cpu", dtype="fp32"),
        kv_cache_memory=10**7,
    )
    with start_engine(options).engine as thread:
        yield thread


def _collect(engine: EngineThread, name: str, params: SamplingParams) -> queue.SimpleQueue[Item]:
    items: queue.SimpleQueue[Item] = queue.SimpleQueue()
    engine.submit(Request(name, (1, 2, 3), params), items.put)
    return items


def _last(items: queue.SimpleQueue[Item]) -> Item:
    while True:
        item = items.get(timeout=30)
        if isinstance(item, QtoolError) or item.finish_reason is not None:
            return item


def test_a_request_gets_its_deltas_and_one_end(engine: EngineThread) -> None:
    items = _collect(engine, "a", SHORT)
    deltas = [items.get(timeout=30) for _ in range(5)]
    assert [isinstance(d, OutputDelta) and d.finish_reason for d in deltas] == [None] * 4 + [
        "length"
    ]
    assert items.empty()


def test_an_invalid_request_gets_its_error_and_harms_no_other(engine: EngineThread) -> None:
    good = _collect(engine, "good", SHORT)
    bad: queue.SimpleQueue[Item] = queue.SimpleQueue()
    engine.submit(Request("bad", (), SHORT), bad.put)
    assert isinstance(_last(bad), RequestError)
    assert isinstance(_last(good), OutputDelta)


@pytest.mark.parametrize(
    ("ids", "params"),
    [
        (("1", 2), SHORT),
        ((1, 2), SamplingParams(stop_token_ids=["2"])),  # type: ignore[list-item]
        ((1, 2), SamplingParams(logit_bias={"2": 1.0})),  # type: ignore[dict-item]
    ],
)
def test_a_request_of_wrong_types_is_answered_and_harms_no_other(
    engine: EngineThread, ids: tuple[int, ...], params: SamplingParams
) -> None:
    good = _collect(engine, "good", LONG)
    bad: queue.SimpleQueue[Item] = queue.SimpleQueue()
    engine.submit(Request("bad", ids, params), bad.put)
    assert isinstance(_last(bad), RequestError)
    assert isinstance(_last(good), OutputDelta)
    assert engine.alive


def test_an_aborted_request_frees_its_blocks(engine: EngineThread) -> None:
    items = _collect(engine, "long", LONG)
    items.get(timeout=30)
    engine.abort("long")
    engine.abort("long")
    assert isinstance(_last(_collect(engine, "after", SHORT)), OutputDelta)
    _wait_idle(engine)
    assert engine.stats().blocks_used == 0


def test_closing_ends_every_request_with_an_error(engine: EngineThread) -> None:
    waiting = [_collect(engine, f"r{i}", LONG) for i in range(3)]
    engine.close()
    assert all(isinstance(_last(items), QtoolError | OutputDelta) for items in waiting)
    assert not engine.alive
    with pytest.raises(EngineError, match="has stopped"):
        _collect(engine, "late", SHORT)
    engine.close()


def test_a_callback_that_raises_drops_its_request_only(
    engine: EngineThread, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(_: Item) -> None:
        raise RuntimeError("client bug")

    engine.submit(Request("broken", (1,), LONG), broken)
    assert isinstance(_last(_collect(engine, "good", SHORT)), OutputDelta)
    _wait_idle(engine)
    assert engine.stats().num_running == 0
    assert "callback failed" in caplog.text


def test_a_failing_model_ends_every_request_and_the_engine(
    engine: EngineThread, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> list[OutputDelta]:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(engine._engine, "step", fail)
    error = _last(_collect(engine, "a", SHORT))
    assert isinstance(error, EngineError) and "out of memory" in str(error)
    assert not engine.alive


def test_requests_from_many_threads_are_all_answered(engine: EngineThread) -> None:
    lasts: list[Item] = []

    def client(index: int) -> None:
        lasts.append(_last(_collect(engine, f"t{index}", SHORT)))

    threads = [threading.Thread(target=client, args=(i,)) for i in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert len(lasts) == 12
    assert all(isinstance(item, OutputDelta) for item in lasts)


def _wait_idle(engine: EngineThread) -> None:
    pause = threading.Event()
    for _ in range(500):
        if engine.stats().num_running == 0 and engine.stats().blocks_used == 0:
            return
        pause.wait(0.01)
    raise AssertionError(f"still busy: {engine.stats()}")
