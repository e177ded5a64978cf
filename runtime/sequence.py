"""One completion in flight: its tokens, and what of them the cache holds. No torch here."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from qtool.runtime.sampling_params import SamplingParams

# No tail page.
NO_TAIL = -1
# In a block table: behind the window of every layer of its group, and given back.
FORGOTTEN = -1


class SequenceStatus(Enum):
    """Where a sequence stands. A preempted one is waiting again."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """A prompt and what was generated after it.

    The engine appends tokens; the fields below ``deadline`` are otherwise written by the
    scheduler and the block manager only. Two sequences are equal only if they are the same one.

    Attributes:
        priority: lower runs first.
        cache_salt: it shares cached prefixes with those of the same salt only.
        deadline: when it ends whatever it has, on the clock of ``Scheduler.expire``.
        arrival: position among all sequences ever added; breaks ties of priority.
        block_table: physical block of each logical block of tokens that was not evicted.
        more_tables: the same for further groups of layers (:mod:`.kv_groups`), each as long.
        tail: the page that holds its unfinished block, where the cache keeps those aside.
        num_computed: how many tokens, from the first, have their keys and values in the cache.
        num_evicted: how many of these were evicted: their blocks are gone from the table, and those
            behind them have moved up.
        num_registered: how many of its blocks, from the first, the prefix cache has seen.
        block_digests: names of its first full blocks in the prefix cache.
        token_limit: tokens, prompt and output, at which the engine ends it with reason "length".
        times_passed: how often a later one was admitted because this one did not fit.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    priority: int = 0
    cache_salt: str = ""
    deadline: float | None = None
    output_token_ids: list[int] = field(default_factory=list, init=False)
    arrival: int = field(default=-1, init=False)
    block_table: list[int] = field(default_factory=list, init=False)
    more_tables: tuple[list[int], ...] = field(default=(), init=False)
    tail: int = field(default=NO_TAIL, init=False)
    num_computed: int = field(default=0, init=False)
    num_evicted: int = field(default=0, init=False)
    num_registered: int = field(default=0, init=False)
    block_digests: list[bytes] = field(default_factory=list, init=False)
    token_limit: int = field(default=0, init=False)
    times_passed: int = field(default=0, init=False)
    status: SequenceStatus = field(default=SequenceStatus.WAITING, init=False)

    @property
    def tables(self) -> tuple[list[int], ...]:
        """Its block tables, one a group of layers."""
        return self.block_table, *self.more_tables

    @property
    def num_tokens(self) -> int:
        """Prompt and output."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def num_uncomputed(self) -> int:
        """Tokens still to be run through the model; 1 while decoding."""
        return self.num_tokens - self.num_computed

    @property
    def num_held(self) -> int:
        """Tokens that its blocks have been written for: the slot of the next one."""
        return self.num_computed - self.num_evicted

    @property
    def reads_prefix(self) -> bool:
        """Whether others may have computed its first tokens: not where each one's logits count."""
        return self.params.prompt_logprobs is None

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
