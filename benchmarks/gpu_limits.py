"""For gpu_check.py: an end within eight minutes, and what kernels should reach."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TypeVar

Item = TypeVar("Item")


class Allowance:
    """Seconds that sections may take, one after another; what one leaves, the next ones have.

    Args:
        clock: seconds, rising.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._until = clock, clock()
        self.cut = False  # whether the last section was stopped

    def taken(self, items: Iterator[Item], seconds: float) -> Iterator[Item]:
        """The items of a section that are begun while it has time."""
        self.cut = False
        self._until += seconds
        for item in items:
            yield item
            if self._clock() > self._until:
                self.cut = True
                return


def target_of(tokens: int, of_ceiling: float, speedup: float) -> str:
    """What a product of 4-bit weights should reach, and whether it does.

    Args:
        of_ceiling: share of the bandwidth measured.
        speedup: over the vendor's GEMM in float16.
    """
    if tokens <= 16:
        met, text = of_ceiling >= 0.8, "80% of the ceiling"
    elif tokens <= 64:
        met, text = speedup >= 1.3, "1.3 x fp16"
    elif tokens <= 1024:
        met, text = speedup >= 0.9, "0.9 x fp16"
    else:
        met, text = speedup >= 0.95, "0.95 x fp16"
    return _verdict(text, met)


def attention_target_of(form: str, context: int, speedup: float) -> str:
    """What a decode step's attention should reach, and whether it does.

    Args:
        form: of the cache.
        context: tokens of each sequence.
        speedup: over 16-bit pages.
    """
    least = {"int8": 1.7, "int4": 2.3}.get(form, 1.0) if context >= 32768 else 1.0
    return _verdict(f"{least} x 16-bit pages", speedup >= least)


def _verdict(text: str, met: bool) -> str:
    return f"{text}: {'met' if met else 'missed'}"
