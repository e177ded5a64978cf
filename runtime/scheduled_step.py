"""What the scheduler decides: who computes which tokens. No torch here."""

from __future__ import annotations

from dataclasses import dataclass, field

from qtool.runtime.sequence import Sequence
from qtool.runtime.tails import BlockCopy


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens ``[start, start + length)`` of a sequence, to be computed in one step."""

    sequence: Sequence
    start: int
    length: int

    @property
    def samples(self) -> bool:
        """Whether its last logits give the next token. Ask before that token is appended."""
        return self.start + self.length == self.sequence.num_tokens


@dataclass(frozen=True, slots=True)
class ScheduledStep:
    """What to compute next.

    Attributes:
        chunks: at most one a sequence, best rank first among those that were running already.
        copies: to be made before anything is written, see :meth:`BlockManager.grow`.
        tail_copies: tail pages to copy before that, in order.
        preempted: lost their blocks to others in this step.
    """

    chunks: list[Chunk] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)
    tail_copies: list[BlockCopy] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Tokens computed in this step."""
        return sum(chunk.length for chunk in self.chunks)
