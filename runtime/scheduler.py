"""Who computes how many tokens in the next step. No torch here.

A step maps sequences to numbers of tokens under one token budget; there is no prefill or
decode phase, a decoding sequence just has one token to compute. Everything goes by rank
(priority, then arrival):

1. Running sequences, best rank first. Each takes all it can, but leaves one token of the budget
   to each one behind it, so a long prompt never stalls a sequence that is decoding.
2. When blocks run out, the running sequence of worst rank gives up its own and waits again, in
   front of those of its priority. It keeps its tokens; their cache is recomputed.
3. Unless that happened, waiting sequences are admitted, best rank first, while the next one fits.

The running sequence of best rank is never preempted, since :meth:`Scheduler.token_limit` keeps
every sequence within the cache. It therefore advances in every step, and with one priority the
i-th sequence ends within as many steps as the first i sequences have tokens.

A step is scheduled, run, committed; then the engine appends what it sampled. Sequences may end
or be aborted at any moment, also between schedule and commit: their blocks are not handed out
before the next ``schedule``, so what the running step still writes to them harms no one.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field
from itertools import count
from operator import attrgetter

from qtool.errors import RequestError, UsageError
from qtool.runtime.blocks import BlockCopy, BlockManager
from qtool.runtime.sequence import Sequence, SequenceStatus

_rank = attrgetter("rank")


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of a step and of a sequence.

    Attributes:
        max_num_seqs: most sequences running at a time.
        max_num_batched_tokens: most tokens computed in a step, prompts' and decodes' together.
        max_model_len: most tokens of a sequence, prompt and output.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if value < 1:
                raise UsageError(f"{name}={value}: must be 1 or more")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise UsageError(
                f"max_num_batched_tokens={self.max_num_batched_tokens}: must be at least "
                f"max_num_seqs={self.max_num_seqs}, for each of them computes a token in every "
                f"step; raise the first or lower the second"
            )


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
        preempted: lost their blocks to others in this step.
    """

    chunks: list[Chunk] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Tokens computed in this step."""
        return sum(chunk.length for chunk in self.chunks)


def _alive(step: ScheduledStep) -> list[Chunk]:
    """Chunks whose sequences have not ended since the step was scheduled."""
    return [chunk for chunk in step.chunks if chunk.sequence.status is SequenceStatus.RUNNING]


class Scheduler:
    """Owns the sequences in flight. Only running ones own blocks."""

    def __init__(self, config: SchedulerConfig, blocks: BlockManager) -> None:
        self._config = config
        self._blocks = blocks
        self._sequences: dict[str, Sequence] = {}
        self._running: list[Sequence] = []  # by rank, as is the next
        self._waiting: list[Sequence] = []
        self._arrivals = count()
        self._in_flight: ScheduledStep | None = None

    @property
    def num_running(self) -> int:
        """Sequences that own blocks and advance in every step."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Sequences not admitted yet, or preempted."""
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        """Whether any sequence is in flight."""
        return bool(self._sequences)

    def token_limit(self, sequence: Sequence) -> int:
        """Tokens (prompt and output) at which the engine must end it, with reason "length".

        The least of what ``max_tokens``, ``max_model_len`` and the whole cache allow: one longer
        than the cache could not even run alone.
        """
        limits = [self._config.max_model_len, self._blocks.num_slots]
        if sequence.params.max_tokens is not None:
            limits.append(len(sequence.prompt_token_ids) + sequence.params.max_tokens)
        return min(limits)

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence.

        Raises:
            RequestError: its id is in use, its prompt is empty, or it can never fit.
        """
        self._register(sequence)
        insort(self._waiting, sequence, key=_rank)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Add a sequence that begins as ``parent`` does, sharing what that has computed.

        The child runs at once, ahead of those that wait. It is queued, with nothing shared, if
        the parent is not running or ``max_num_seqs`` are. Not between schedule and commit.

        Raises:
            RequestError: as :meth:`add`.
        """
        assert self._in_flight is None, "fork between schedule and commit"
        self._register(child)
        if parent.status is SequenceStatus.RUNNING and self._has_place:
            self._blocks.fork(parent, child)
            self._start(child)
        else:
            insort(self._waiting, child, key=_rank)

    def abort(self, request_id: str) -> Sequence | None:
        """End a sequence in whatever state; ``None`` when there is none of that id."""
        if (sequence := self._sequences.get(request_id)) is not None:
            self.finish(sequence)
        return sequence

    def finish(self, sequence: Sequence) -> None:
        """End a sequence and take its blocks back. Nothing happens if it has ended already."""
        if sequence.status is SequenceStatus.FINISHED:
            return
        queue = self._running if sequence.status is SequenceStatus.RUNNING else self._waiting
        queue.remove(sequence)
        del self._sequences[sequence.request_id]
        self._blocks.free(sequence)
        sequence.status = SequenceStatus.FINISHED

    def schedule(self) -> ScheduledStep:
        """Decide the next step and give it its blocks. It must be committed before the next."""
        assert self._in_flight is None, "schedule before the last step was committed"
        step = ScheduledStep()
        self._schedule_running(step)
        if not step.preempted:
            self._admit_waiting(step)
        assert step.chunks or not self.has_work, "a sequence went beyond its token_limit"
        self._in_flight = step
        return step

    def commit(self, step: ScheduledStep) -> None:
        """The step's tokens are in the cache. Sequences that have ended since are left out."""
        assert step is self._in_flight, "commit of another step than was scheduled last"
        for chunk in _alive(step):
            chunk.sequence.num_computed += chunk.length
            self._blocks.forget(chunk.sequence)
        self._in_flight = None

    def check_integrity(self) -> None:
        """Raise :class:`AssertionError` unless queues, blocks and step agree. At any moment."""
        for queue in (self._running, self._waiting):
            assert queue == sorted(queue, key=_rank), "a queue is not in order of rank"
        everyone = sorted(self._running + self._waiting, key=_rank)
        assert everyone == sorted(self._sequences.values(), key=_rank), "queues lack someone"
        assert len(self._running) <= self._config.max_num_seqs
        for sequence in self._running:
            assert sequence.status is SequenceStatus.RUNNING, sequence.request_id
        for sequence in self._waiting:
            assert sequence.status is SequenceStatus.WAITING, sequence.request_id
            cached = len(sequence.block_table), sequence.num_computed
            assert cached == (0, 0), f"{sequence.request_id}: waits, but holds {cached}"
        self._blocks.check_integrity(self._running)
        self._check_step(self._in_flight or ScheduledStep())

    def _check_step(self, step: ScheduledStep) -> None:
        budget = self._config.max_num_batched_tokens
        assert step.num_tokens <= budget, f"{step.num_tokens} tokens, the budget is {budget}"
        for chunk in _alive(step):
            assert chunk.start == chunk.sequence.num_computed
            assert 0 < chunk.length <= chunk.sequence.num_uncomputed
            self._blocks.check_writable(chunk.sequence, chunk.length)

    @property
    def _has_place(self) -> bool:
        return len(self._running) < self._config.max_num_seqs

    def _register(self, sequence: Sequence) -> None:
        assert sequence.arrival < 0, f"{sequence.request_id}: added twice"
        if sequence.request_id in self._sequences:
            rule = f"request_id={sequence.request_id!r}: is in use; choose another"
            raise RequestError(rule, "request_id")
        self._check_can_ever_fit(sequence)
        sequence.arrival = next(self._arrivals)
        self._sequences[sequence.request_id] = sequence

    def _check_can_ever_fit(self, sequence: Sequence) -> None:
        length, longest, blocks = sequence.num_tokens, self._config.max_model_len, self._blocks
        found = f"prompt: has {length} tokens"
        if length == 0:
            raise RequestError(f"{found}: must have 1 or more; send some text", "prompt")
        if length + 1 > longest:
            rule = f"with one to generate it must fit in max_model_len={longest}"
            raise RequestError(f"{found}: {rule}; shorten it", "prompt")
        if length + 1 > blocks.num_slots:
            needed = f"with one to generate it takes {blocks.blocks_needed(length + 1)} blocks"
            rule = f"{needed} of {blocks.block_size}, the whole cache has {blocks.num_blocks}"
            remedy = "shorten it or give the cache more memory"
            raise RequestError(f"{found}: {rule}; {remedy}", "prompt")

    def _schedule_running(self, step: ScheduledStep) -> None:
        budget = self._config.max_num_batched_tokens
        position = 0
        while position < len(self._running):  # preemption shortens it from the end
            sequence = self._running[position]
            position += 1
            num_behind = len(self._running) - position
            length = min(sequence.num_uncomputed, budget - num_behind)
            if self._make_room(step, sequence, length):
                self._schedule_chunk(step, sequence, length)
                budget -= length

    def _make_room(self, step: ScheduledStep, sequence: Sequence, length: int) -> bool:
        """Preempt from the end until the chunk fits; false when that reached the sequence."""
        while not self._blocks.can_grow(sequence, length):
            victim = self._running.pop()
            self._blocks.free(victim)
            victim.status = SequenceStatus.WAITING
            insort(self._waiting, victim, key=_rank)
            step.preempted.append(victim)
            if victim is sequence:
                return False
        return True

    def _admit_waiting(self, step: ScheduledStep) -> None:
        budget = self._config.max_num_batched_tokens - step.num_tokens
        while budget > 0 and self._waiting and self._has_place and self._fits(self._waiting[0]):
            sequence = self._waiting.pop(0)
            self._start(sequence)
            length = min(sequence.num_uncomputed, budget)
            self._schedule_chunk(step, sequence, length)
            budget -= length

    def _fits(self, sequence: Sequence) -> bool:
        """Whether all its tokens and the next one find free blocks.

        While budget is left, no running sequence is amid its prompt (it would have taken the
        budget), so the free blocks are promised to no one.
        """
        return self._blocks.can_grow(sequence, sequence.num_uncomputed + 1)

    def _start(self, sequence: Sequence) -> None:
        sequence.status = SequenceStatus.RUNNING
        insort(self._running, sequence, key=_rank)

    def _schedule_chunk(self, step: ScheduledStep, sequence: Sequence, length: int) -> None:
        assert length > 0, f"{sequence.request_id}: has nothing to compute; was a token appended?"
        step.copies.extend(self._blocks.grow(sequence, length))
        step.chunks.append(Chunk(sequence, sequence.num_computed, length))
