"""Which scheme each layer's cache gets: the fewest bytes that cost no more than a budget.

Losses are KL divergences, measured one layer at a time. For small errors KL is quadratic in the
error of the logits, and errors of different layers are nearly independent, so losses of layers add
up nearly. The sum chooses, a measurement of the whole choice decides.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

# Measurements of whole choices: the first aims at the budget, each next one makes up for how far
# the sum was off the last time.
MAX_TRIES = 5
# How far one correction may go.
_MAX_CORRECTION = 4.0


@dataclass(frozen=True, slots=True)
class Choice:
    """A scheme for each layer.

    Attributes:
        size: bytes, of whatever number of tokens.
        loss: sum of the layers' losses.
        schemes: by name.
    """

    size: int
    loss: float
    schemes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Partial:
    """The schemes of the first layers: the last of them, and those before."""

    size: int
    loss: float
    scheme: str = ""
    before: _Partial | None = None

    def extended(self, scheme: str, size: int, loss: float) -> _Partial:
        return _Partial(self.size + size, self.loss + loss, scheme, self)

    def choice(self) -> Choice:
        names = list[str]()
        part = self
        while part.before is not None:
            names.append(part.scheme)
            part = part.before
        return Choice(self.size, self.loss, tuple(reversed(names)))


def frontier(sizes: Mapping[str, int], losses: Sequence[Mapping[str, float]]) -> tuple[Choice, ...]:
    """All choices than which none is smaller and costs no more; the smallest first.

    The knapsack by dynamic programming, layer by layer. Layers are of one size, so that there are
    few sums of sizes: of 4 schemes in 80 layers, some ten thousand.

    Args:
        sizes: bytes of a layer by scheme.
        losses: of each layer by scheme, at least 0.

    Raises:
        ValueError: a loss is negative or not finite.
    """
    front = [_Partial(0, 0.0)]
    for number, layer in enumerate(losses):
        if bad := [name for name in sizes if not 0 <= layer[name] < math.inf]:
            raise ValueError(f"layer {number}: a loss of {layer[bad[0]]} with {bad[0]}")
        grown = (part.extended(name, sizes[name], layer[name]) for part in front for name in sizes)
        front = _undominated(sorted(grown, key=lambda part: (part.size, part.loss)))
    return tuple(part.choice() for part in front)


def _undominated(parts: Sequence[_Partial]) -> list[_Partial]:
    """Those of parts, smallest first, that cost less than all smaller ones."""
    kept, least = list[_Partial](), math.inf
    for part in parts:
        if part.loss < least:
            kept.append(part)
            least = part.loss
    return kept


def cheapest(front: Sequence[Choice], budget: float) -> Choice:
    """The smallest choice whose losses add up to no more; the largest where all cost more."""
    return next((choice for choice in front if choice.loss <= budget), front[-1])


@dataclass(frozen=True, slots=True)
class Found:
    """What a search came to.

    Attributes:
        loss: of the whole choice, measured.
        tries: measurements it took.
    """

    choice: Choice
    loss: float
    tries: int


def search(
    front: Sequence[Choice], budget: float, measure: Callable[[Sequence[str]], float]
) -> Found:
    """The smallest choice found whose measured loss is within the budget.

    Args:
        front: from :func:`frontier`; its last choice is taken where no other fits.
        measure: the loss of schemes, all layers at once.
    """
    measured: dict[Choice, float] = {}
    target = budget
    for _ in range(MAX_TRIES):
        choice = cheapest(front, target)
        if choice in measured:
            break
        measured[choice] = measure(choice.schemes)
        ratio = budget / measured[choice] if measured[choice] > 0 else _MAX_CORRECTION
        target *= min(max(ratio, 1 / _MAX_CORRECTION), _MAX_CORRECTION)
    fitting = [choice for choice, loss in measured.items() if loss <= budget]
    if not fitting:
        # Each layer alone costs nothing there: as a rule, all are in the compute dtype.
        measured[front[-1]] = measure(front[-1].schemes)
        fitting = [front[-1]]
    best = min(fitting, key=lambda choice: choice.size)
    return Found(best, measured[best], len(measured))
