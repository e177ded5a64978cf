"""Prometheus metrics of one server, in a registry of its own."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from qtool.runtime.server.interfaces import EngineClient

# Seconds. One token takes from a millisecond (small model, GPU) to a second (CPU, full batch);
# a first token can wait minutes in the queue.
_TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
_FIRST_TOKEN_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_REQUEST_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)


class EngineCollector(Collector):
    """Reads the engine's own counters at every scrape, so that none is kept twice."""

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        """Called by the registry."""
        stats, info = self._engine.stats(), self._engine.info
        gauges = {
            "requests_running": ("Requests in the current batch.", stats.num_running),
            "requests_waiting": ("Requests waiting for room.", stats.num_waiting),
            "kv_blocks_used": ("KV cache blocks in use.", stats.blocks_used),
            "kv_slots_used": ("Token slots of these blocks that hold a token.", stats.slots_used),
            "kv_blocks_known": ("KV cache blocks a prefix can be found in.", stats.blocks_known),
            "kv_blocks_total": ("KV cache blocks there are.", stats.blocks_total),
        }
        counters = {
            "prompt_tokens": ("Prompt tokens computed.", stats.prompt_tokens),
            "generated_tokens": ("Tokens generated.", stats.generated_tokens),
            "preemptions": ("Requests that lost their blocks to others.", stats.preemptions),
            "reused_tokens": ("Tokens found in the cache, not computed.", stats.reused_tokens),
            "evicted_blocks": ("Blocks given up by long sequences.", stats.evicted_blocks),
            "timeouts": ("Requests that ended because their time had passed.", stats.timeouts),
            "engine_steps": ("Forward passes.", stats.steps),
        }
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(f"qtool_{name}", text, value)
        for name, (text, value) in counters.items():
            yield CounterMetricFamily(f"qtool_{name}", text, value)
        labels = {"model": info.served_name, "quantization": info.quantization, "dtype": info.dtype}
        yield InfoMetricFamily("qtool_model", "What is served.", labels)


class ServerMetrics:
    """What requests experience, and the engine's state."""

    def __init__(self, engine: EngineClient) -> None:
        self._registry = registry = CollectorRegistry()
        registry.register(EngineCollector(engine))
        self._first_token = Histogram(
            "qtool_time_to_first_token_seconds",
            "From submission to the first token.",
            buckets=_FIRST_TOKEN_BUCKETS,
            registry=registry,
        )
        self._inter_token = Histogram(
            "qtool_inter_token_latency_seconds",
            "Between one token of a request and the next.",
            buckets=_TOKEN_BUCKETS,
            registry=registry,
        )
        self._request = Histogram(
            "qtool_request_latency_seconds",
            "From submission to the last token.",
            buckets=_REQUEST_BUCKETS,
            registry=registry,
        )
        self._finished = Counter(
            "qtool_requests_finished",
            "Completions that ended, by reason; abort is a client that left.",
            ["finish_reason"],
            registry=registry,
        )
        self._errors = Counter(
            "qtool_http_errors", "Answers that were errors.", ["status"], registry=registry
        )

    def first_token(self, seconds: float) -> None:
        """A request got its first token this long after its submission."""
        self._first_token.observe(seconds)

    def next_tokens(self, seconds: float, count: int) -> None:
        """``count`` tokens came together, this long after the one before."""
        self._inter_token.observe(seconds / count)

    def finished(self, reason: str, seconds: float) -> None:
        """A completion ended this long after its submission."""
        self._finished.labels(reason).inc()
        self._request.observe(seconds)

    def error(self, status: int) -> None:
        """An answer was an error; also one that came in the middle of a stream."""
        self._errors.labels(str(status)).inc()

    def render(self) -> bytes:
        """Prometheus text format 0.0.4."""
        return generate_latest(self._registry)
