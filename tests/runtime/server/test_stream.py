from __future__ import annotations

import asyncio
import threading

import pytest
from prometheus_client.parser import text_string_to_metric_families

from qtool.errors import EngineError, RequestError
from qtool.runtime.request import Request
from qtool.runtime.sampling_params import SamplingParams
from qtool.runtime.server.errors import HttpError
from qtool.runtime.server.metrics import ServerMetrics
from qtool.runtime.server.responses import event, until_disconnect
from qtool.runtime.server.stream import MAX_OPEN_REQUESTS, Bridge
from support.fake_engine import ByteCodec, FakeEngine, say
from support.http import running, wait_until


def _requests(count: int) -> list[Request]:
    return [Request(f"r{i}", (1,), SamplingParams(max_tokens=None)) for i in range(count)]


async def _collect(bridge: Bridge, count: int) -> list[str]:
    texts = [""] * count
    with bridge.open(_requests(count)) as outputs:
        async for index, delta in outputs:
            texts[index] += delta.text
    return texts


def test_outputs_of_several_requests_are_merged_and_end() -> None:
    engine = FakeEngine(say("Grüße"))
    bridge = Bridge(engine, ServerMetrics(engine))
    assert asyncio.run(_collect(bridge, 3)) == ["Grüße"] * 3
    assert bridge.num_running == 0 and engine.aborted == []
    engine.close()


def test_leaving_the_context_aborts_the_rest_once() -> None:
    engine = FakeEngine(say("x" * 100), delay=0.001)
    bridge = Bridge(engine, ServerMetrics(engine))

    async def leave_early() -> None:
        with pytest.raises(ZeroDivisionError), bridge.open(_requests(3)) as outputs:
            await anext(outputs)
            raise ZeroDivisionError
        outputs.close()

    asyncio.run(leave_early())
    assert sorted(engine.aborted) == ["r0", "r1", "r2"]
    engine.close()


@pytest.mark.parametrize(
    ("error", "status"), [(RequestError("too long", "prompt"), 400), (EngineError("dead"), 503)]
)
def test_a_refused_request_aborts_those_before_it(error: Exception, status: int) -> None:
    engine = FakeEngine()
    engine.gate.clear()
    submit = engine.submit

    def refuse_last(request, on_output):  # type: ignore[no-untyped-def]
        if request.request_id == "r2":
            raise error
        submit(request, on_output)

    engine.submit = refuse_last  # type: ignore[method-assign]
    bridge = Bridge(engine, ServerMetrics(engine))

    async def refused() -> None:
        with pytest.raises(HttpError) as caught, bridge.open(_requests(3)):
            raise AssertionError("opened")
        assert caught.value.status == status

    asyncio.run(refused())
    assert sorted(engine.aborted) == ["r0", "r1"] and engine.open_ids == []
    engine.close()


def test_a_full_server_says_when_to_come_back() -> None:
    engine = FakeEngine()
    engine.gate.clear()
    bridge = Bridge(engine, ServerMetrics(engine))

    async def overload() -> None:
        with bridge.open(_requests(MAX_OPEN_REQUESTS)):
            with pytest.raises(HttpError) as caught, bridge.open(_requests(1)):
                raise AssertionError("opened")
            assert (caught.value.status, caught.value.code) == (503, "overloaded")
            assert caught.value.headers == {"Retry-After": "5"}

    asyncio.run(overload())
    assert engine.open_ids == []
    engine.close()


def test_outputs_after_the_loop_has_gone_do_not_harm_the_engine() -> None:
    engine = FakeEngine(say("x" * 1000))
    engine.abort = lambda request_id: None  # type: ignore[method-assign]
    bridge = Bridge(engine, ServerMetrics(engine))

    async def start() -> None:
        with bridge.open(_requests(2)[1:]) as outputs:
            await anext(outputs)

    asyncio.run(start())
    wait_until(lambda: engine.open_ids == [])
    engine.script = say("fine")
    assert asyncio.run(_collect(bridge, 1)) == ["fine"]
    engine.close()


def test_work_is_cancelled_when_the_client_leaves_and_when_the_server_does() -> None:
    async def scenario(cancel: bool) -> list[str]:
        log: list[str] = []
        left = asyncio.Event()

        async def receive() -> dict[str, str]:
            await left.wait()
            return {"type": "http.disconnect"}

        async def work() -> None:
            try:
                await asyncio.sleep(60)
            finally:
                log.append("cleaned up")

        running = asyncio.create_task(until_disconnect(receive, work()))  # type: ignore[arg-type]
        await asyncio.sleep(0.01)
        if cancel:
            running.cancel()
        else:
            left.set()
        await asyncio.wait({running})
        assert running.cancelled() == cancel
        return log

    for cancel in (False, True):
        assert asyncio.run(scenario(cancel)) == ["cleaned up"]


def test_an_event_is_one_line_of_json() -> None:
    assert event({"text": "a\n世"}) == 'data: {"text":"a\\n世"}\n\n'.encode()
    with pytest.raises(ValueError):
        event({"logprob": float("-inf")})


def test_metrics_tell_latencies_reasons_and_the_engines_state() -> None:
    engine = FakeEngine(say("abc"), delay=0.002)
    metrics = ServerMetrics(engine)
    asyncio.run(_collect(Bridge(engine, metrics), 2))
    metrics.error(404)
    families = text_string_to_metric_families(metrics.render().decode())
    values = {(s.name, *s.labels.values()): s.value for f in families for s in f.samples if f.name}
    assert values["qtool_time_to_first_token_seconds_count",] == 2
    assert values["qtool_inter_token_latency_seconds_count",] == 4
    assert values["qtool_request_latency_seconds_count",] == 2
    assert values["qtool_inter_token_latency_seconds_sum",] > 0
    assert values["qtool_requests_finished_total", "stop"] == 2
    assert values["qtool_http_errors_total", "404"] == 1
    assert values["qtool_kv_blocks_used",] == 3 and values["qtool_kv_blocks_total",] == 64
    assert values["qtool_prompt_tokens_total",] == 11
    assert values["qtool_generated_tokens_total",] == 7
    assert values["qtool_preemptions_total",] == 1
    assert values["qtool_requests_running",] == values["qtool_requests_waiting",] == 0
    engine.close()


def test_a_long_tokenization_does_not_block_the_server() -> None:
    tokenizing, answered = threading.Event(), threading.Event()

    class SlowCodec(ByteCodec):
        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            tokenizing.set()
            assert answered.wait(10)
            return super().encode(text, add_special_tokens)

    with running(codec=SlowCodec()) as server:
        ask = threading.Thread(target=lambda: server.post("/v1/completions", prompt="a"))
        ask.start()
        assert tokenizing.wait(10)
        assert server.http.get("/health").status_code == 200
        answered.set()
        ask.join()
