"""Who computes how many tokens in the next step. No torch here.

A step maps sequences to numbers of tokens under one token budget; there is no prefill or
decode phase, a decoding sequence just has one token to compute. Everything goes by rank
(priority, then arrival; by arrival alone under ``fcfs``):

1. Running sequences, best rank first. Each takes all it can, but leaves one token of the budget
   to each one behind it, so a long prompt never stalls a sequence that is decoding.
2. When blocks run out, the running sequence of worst rank gives up its own and waits again, in
   front of those of its priority. It keeps its tokens; their cache is recomputed, or found in
   the prefix cache.
3. Unless that happened, waiting sequences are admitted, best rank first, if :mod:`.admission`
   finds room for them, and nobody computes in this step what they could find in the next. One
   that is not admitted may be passed by later ones, ``max_passes`` times.

The running sequence of best rank is never preempted, since :meth:`Scheduler.token_limit` keeps
every sequence within the cache. It therefore advances in every step, and with one priority and a
strict queue the i-th sequence ends within as many steps as the first i sequences have tokens.
Passing adds no more than ``max_passes`` times the longest of those that passed.

A step is scheduled, run, committed; then the engine appends what it sampled. At the commit, forks
whose parent has computed what they share begin to run. Sequences may end or be aborted at any
moment, also between schedule and commit: their blocks are not handed out before the next
``schedule``, so what the running step still writes to them harms no one.
"""

from __future__ import annotations

from bisect import insort
from itertools import count
from operator import attrgetter

from qtool.errors import RequestError
from qtool.runtime.admission import LOOK_AHEAD, Admission, SchedulerConfig, check_can_ever_fit
from qtool.runtime.blocks import BlockManager, Tables
from qtool.runtime.scheduled_step import Chunk, ScheduledStep
from qtool.runtime.sequence import Sequence, SequenceStatus

_rank = attrgetter("rank")


def _alive(step: ScheduledStep) -> list[Chunk]:
    """Chunks whose sequences have not ended since the step was scheduled."""
    return [chunk for chunk in step.chunks if chunk.sequence.status is SequenceStatus.RUNNING]


class Scheduler:
    """Owns the sequences in flight. Only running ones own blocks."""

    def __init__(self, config: SchedulerConfig, blocks: BlockManager) -> None:
        self._config = config
        self._blocks = blocks
        self._admission = Admission(config, blocks)
        self._sequences: dict[str, Sequence] = {}
        self._running: list[Sequence] = []  # by rank, as is the next
        self._waiting: list[Sequence] = []
        self._parents: dict[Sequence, Sequence] = {}  # of waiting forks, by age
        self._timed: dict[str, Sequence] = {}
        self._arrivals = count()
        self._in_flight: ScheduledStep | None = None
        self.num_reused_tokens = 0  # that nobody had to compute again, so far

    @property
    def num_running(self) -> int:
        """Sequences that own blocks and advance in every step."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Sequences not admitted yet, or preempted."""
        return len(self._waiting)

    @property
    def num_slots_used(self) -> int:
        """Slots of owned blocks that hold a token."""
        return self._blocks.num_slots_used(self._running)

    @property
    def has_work(self) -> bool:
        """Whether any sequence is in flight."""
        return bool(self._sequences)

    def token_limit(self, sequence: Sequence) -> int:
        """Tokens (prompt and output) at which the engine must end it, with reason "length".

        The least of what ``max_tokens``, ``max_model_len`` and the whole cache allow: one longer
        than the cache could not even run alone, unless its blocks are evicted.
        """
        limits = [self._config.max_model_len, self._blocks.longest]
        if sequence.params.max_tokens is not None:
            limits.append(len(sequence.prompt_token_ids) + sequence.params.max_tokens)
        return min(limits)

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence.

        Raises:
            RequestError: its id is in use, its prompt is empty, it can never fit, or it has a
                priority under ``fcfs``.
        """
        self._register(sequence)
        insort(self._waiting, sequence, key=_rank)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Add a sequence that begins as ``parent`` does, and shares what that has computed.

        It waits until the parent has computed what they share, or has ended; then it runs
        ahead of those that wait. One of better rank than its parent, or with another salt, or
        where blocks are evicted, is like any other.

        Raises:
            RequestError: as :meth:`add`.
        """
        self.add(child)
        alike = child.reads_prefix and child.cache_salt == parent.cache_salt
        if alike and self._blocks.shares and parent.rank < child.rank:
            self._parents[child] = parent
            if self._in_flight is None:
                self._start_forks()

    def abort(self, request_id: str) -> Sequence | None:
        """End a sequence in whatever state; ``None`` when there is none of that id."""
        if (sequence := self._sequences.get(request_id)) is not None:
            self._remove(sequence)
        return sequence

    def finish(self, sequence: Sequence) -> None:
        """End a sequence that came to its end. Nothing happens if it has ended already."""
        if sequence.status is not SequenceStatus.FINISHED:
            self._remove(sequence)
            self._admission.ended(sequence)

    def expire(self, now: float) -> list[Sequence]:
        """End those whose deadline has passed."""
        late = [s for s in self._timed.values() if s.deadline is not None and s.deadline <= now]
        for sequence in late:
            self._remove(sequence)
        return late

    def schedule(self) -> ScheduledStep:
        """Decide the next step and give it its blocks. It must be committed before the next."""
        assert self._in_flight is None, "schedule before the last step was committed"
        step = ScheduledStep(tail_copies=self._blocks.take_tail_copies())
        self._schedule_running(step)
        if not step.preempted:
            self._admit_waiting(step)
        self._admission.stepped(bool(step.preempted))
        assert step.chunks or not self.has_work, "a sequence went beyond its token_limit"
        self._in_flight = step
        return step

    def commit(self, step: ScheduledStep) -> None:
        """The step's tokens are in the cache. Sequences that have ended since are left out."""
        assert step is self._in_flight, "commit of another step than was scheduled last"
        for chunk in _alive(step):
            self._blocks.advance(chunk.sequence, chunk.length)
        self._in_flight = None
        self._start_forks()

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
            cached = sum(map(len, sequence.tables)), sequence.num_computed
            assert cached == (0, 0), f"{sequence.request_id}: waits, but holds {cached}"
        timed = {s.request_id for s in everyone if s.deadline is not None}
        assert timed == set(self._timed), "not all deadlines are watched"
        assert set(self._parents) <= set(self._waiting), "a fork waits for its parent and runs"
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
        return len(self._running) < self._config.max_num_seqs and self._blocks.has_tail

    def _register(self, sequence: Sequence) -> None:
        assert sequence.arrival < 0, f"{sequence.request_id}: added twice"
        if sequence.request_id in self._sequences:
            rule = f"request_id={sequence.request_id!r}: is in use; choose another"
            raise RequestError(rule, "request_id")
        if sequence.priority and self._config.policy == "fcfs":
            rule = "requests are served in the order of arrival here; leave it out, or start the"
            remedy = f"{rule} engine with the scheduling policy 'priority'"
            raise RequestError(f"priority={sequence.priority}: {remedy}", "priority")
        check_can_ever_fit(sequence, self._config, self._blocks)
        sequence.token_limit = self.token_limit(sequence)
        sequence.arrival = next(self._arrivals)
        self._sequences[sequence.request_id] = sequence
        if sequence.deadline is not None:
            self._timed[sequence.request_id] = sequence

    def _remove(self, sequence: Sequence) -> None:
        queue = self._running if sequence.status is SequenceStatus.RUNNING else self._waiting
        queue.remove(sequence)
        del self._sequences[sequence.request_id]
        self._timed.pop(sequence.request_id, None)
        self._blocks.free(sequence)
        sequence.status = SequenceStatus.FINISHED
        # Its forks wait like any other from now on.
        self._parents = {
            child: parent
            for child, parent in self._parents.items()
            if sequence not in (child, parent)
        }

    def _start_forks(self) -> None:
        """Between steps, so that what a fork shares is not about to be written."""
        ready = [
            (child, parent)
            for child, parent in self._parents.items()
            if _has_computed_prompt(parent, child)
        ]
        reserved = self._admission.reserved(self._running) if ready else 0
        for child, parent in ready:
            num_full = parent.num_computed // self._blocks.block_size
            shared = [table[:num_full] for table in parent.tables]
            if self._has_place and self._admission.fits(child, shared, reserved):
                self._blocks.fork(parent, child)
                self._start(child)
                reserved += self._admission.growth(child)

    def _schedule_running(self, step: ScheduledStep) -> None:
        budget = self._config.max_num_batched_tokens
        position = 0
        while position < len(self._running):  # preemption shortens it from the end
            sequence = self._running[position]
            position += 1
            num_behind = len(self._running) - position
            length = min(self._blocks.room(sequence), sequence.num_uncomputed, budget - num_behind)
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
        """Newcomers. While budget is left, everyone running has all it may compute scheduled."""
        budget = self._config.max_num_batched_tokens - step.num_tokens
        if not (self._waiting and budget > 0 and self._has_place):
            return
        reserved = self._admission.reserved(self._running)
        if self._running and reserved >= self._blocks.num_free:
            return  # full: nobody needs less than a block, and looking for prefixes takes time
        computing = {
            name for c in step.chunks for name in self._blocks.names_computed(c.sequence, c.length)
        }
        passed: list[Sequence] = []
        for sequence in list(self._waiting):
            if budget == 0 or not (self._has_place and self._may_pass(passed)):
                return
            if sequence in self._parents:
                continue
            prefix = self._blocks.find_prefix(sequence)
            # What another one computes in this step is found in the next.
            patient = not computing.isdisjoint(self._blocks.name_behind(sequence, prefix))
            if not patient and self._fits(sequence, prefix, reserved):
                self._blocks.adopt(sequence, prefix)
                self._start(sequence)
                length = min(self._blocks.room(sequence), sequence.num_uncomputed, budget)
                computing.update(self._blocks.names_computed(sequence, length))
                self._schedule_chunk(step, sequence, length)
                budget -= length
                reserved += self._admission.growth(sequence)
                _count_pass(passed)
            else:
                passed.append(sequence)

    def _may_pass(self, passed: list[Sequence]) -> bool:
        """Whether a later sequence may be admitted although these did not fit."""
        patient = all(sequence.times_passed < self._config.max_passes for sequence in passed)
        return patient and len(passed) <= LOOK_AHEAD

    def _fits(self, sequence: Sequence, prefix: Tables, reserved: int) -> bool:
        """A sequence that would run alone needs no more than it takes now."""
        if self._running:
            return self._admission.fits(sequence, prefix, reserved)
        return self._admission.fits_alone(sequence, prefix)

    def _start(self, sequence: Sequence) -> None:
        self.num_reused_tokens += sequence.num_computed
        self._waiting.remove(sequence)
        self._parents.pop(sequence, None)
        sequence.status = SequenceStatus.RUNNING
        insort(self._running, sequence, key=_rank)

    def _schedule_chunk(self, step: ScheduledStep, sequence: Sequence, length: int) -> None:
        assert length > 0, f"{sequence.request_id}: has nothing to compute; was a token appended?"
        step.copies.extend(self._blocks.grow(sequence, length))
        step.chunks.append(Chunk(sequence, sequence.num_computed, length))


def _has_computed_prompt(parent: Sequence, child: Sequence) -> bool:
    """Whether waiting for the parent any longer would give the child nothing more to share."""
    most = min(len(parent.prompt_token_ids), child.num_tokens - 1)
    return parent.status is SequenceStatus.RUNNING and parent.num_computed >= most


def _count_pass(passed: list[Sequence]) -> None:
    for sequence in passed:
        sequence.times_passed += 1
