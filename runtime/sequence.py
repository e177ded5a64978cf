"""One completion in flight: its tokens, and what of them the cache holds. No torch here."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from qtool.runtime.sampling_params import SamplingParams


class SequenceStatus(Enum):
    """Where a sequence stands. A preempted one is waiting again."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """A prompt and what was generated after it.

    The engine appends tokens; the fields below ``priority`` are otherwise written by the
    scheduler and the block manager only. Two sequences are equal only if they are the same one.

    Attributes:
        priority: lower runs first.
        arrival: position among all sequences ever added; breaks ties of priority.
        block_table: physical block of each logical block of tokens.
        num_computed: how many tokens, from the first, have their keys and values in the cache.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    priority: int = 0
    output_token_ids: list[int] = field(default_factory=list, init=False)
    arrival: int = field(default=-1, init=False)
    block_table: list[int] = field(default_factory=list, init=False)
    num_computed: int = field(default=0, init=False)
    status: SequenceStatus = field(default=SequenceStatus.WAITING, init=False)

    @property
    def num_tokens(self) -> int:
        """Prompt and output."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def num_uncomputed(self) -> int:
        """Tokens still to be run through the model; 1 while decoding."""
        return self.num_tokens - self.num_computed

    @property
    def rank(self) -> tuple[int, int]:
        """The order in which sequences are served; no two have the same."""
        return self.priority, self.arrival

    def token_ids(self, start: int, end: int) -> list[int]:
        """Tokens ``[start, end)`` of prompt and output, without joining the two."""
        prompt_len = len(self.prompt_token_ids)
        output = self.output_token_ids[max(start - prompt_len, 0) : max(end - prompt_len, 0)]
        return self.prompt_token_ids[start:end] + output

    def append(self, token_id: int) -> None:
        """Add a sampled token."""
        self.output_token_ids.append(token_id)
