"""What a run of a benchmark says, by the definitions of ``vllm bench``.

TTFT is the time from a request's arrival to its first token, latency that to its last one, and
TPOT = (latency - TTFT) / (output tokens - 1), of requests with two tokens or more. A request of an
offline run arrives when the run begins, so waiting for a place counts. Throughput is what the
whole run made, over its whole time. Seconds, all from one clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Timing:
    """One request: when it arrived and when each of its tokens came."""

    prompt_len: int
    arrived: float
    tokens: tuple[float, ...]

    @property
    def ttft(self) -> float:
        """Time to first token."""
        return self.tokens[0] - self.arrived

    @property
    def latency(self) -> float:
        """Time to the last token."""
        return self.tokens[-1] - self.arrived

    @property
    def tpot(self) -> float:
        """Time per output token after the first."""
        return (self.latency - self.ttft) / (len(self.tokens) - 1)


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean, median and 99th percentile, linear between ranks."""

    mean: float
    median: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of one value or more; NaN without any."""
        if not values:
            return cls(float("nan"), float("nan"), float("nan"))
        median, p99 = np.percentile(values, [50, 99])
        return cls(float(np.mean(values)), float(median), float(p99))


@dataclass(frozen=True, slots=True)
class Summary:
    """One run.

    Attributes:
        name: what was run.
        seconds: from the first arrival to the last token.
        requests_per_second, output_per_second, tokens_per_second: throughput; the last one
            counts prompts too.
        reused_tokens: tokens that did not have to be computed, for others had.
        preemptions: how often a request lost its blocks.
    """

    name: str
    requests: int
    prompt_tokens: int
    output_tokens: int
    seconds: float
    ttft: Spread
    tpot: Spread
    latency: Spread
    reused_tokens: int = 0
    preemptions: int = 0

    @property
    def requests_per_second(self) -> float:
        return self.requests / self.seconds

    @property
    def output_per_second(self) -> float:
        return self.output_tokens / self.seconds

    @property
    def tokens_per_second(self) -> float:
        return (self.prompt_tokens + self.output_tokens) / self.seconds


def summarize(
    name: str, timings: Sequence[Timing], reused_tokens: int = 0, preemptions: int = 0
) -> Summary:
    """The summary of a run that finished all its requests."""
    begun = min(timing.arrived for timing in timings)
    return Summary(
        name=name,
        requests=len(timings),
        prompt_tokens=sum(timing.prompt_len for timing in timings),
        output_tokens=sum(len(timing.tokens) for timing in timings),
        seconds=max(timing.tokens[-1] for timing in timings) - begun,
        ttft=Spread.of([timing.ttft for timing in timings]),
        tpot=Spread.of([timing.tpot for timing in timings if len(timing.tokens) > 1]),
        latency=Spread.of([timing.latency for timing in timings]),
        reused_tokens=reused_tokens,
        preemptions=preemptions,
    )
