"""An engine without a model: the next token is a hash of what the *cache* holds.

Every chunk writes its tokens into the slots its block table names, and every sample reads the
whole sequence back through the table. A block that is stale, shared while written or not copied
therefore changes the tokens, as it would with a real model.

Where blocks are evicted, the one whose tokens have the least checksum goes; what should be left is
worked out from the tokens alone, one by one.

Groups of layers have block tables of their own, each with its window: tokens are written to all of
them, with a mark of the group as layers store different things, and a sample is a hash of what each
of them shows.

With tail pages a block is written from its sequence's page when it is full, and what is not full is
read from there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as SequenceOf
from itertools import chain
from zlib import crc32

from qtool.runtime.admission import SchedulerConfig
from qtool.runtime.blocks import BlockManager
from qtool.runtime.eviction import EvictionRule, Evictor
from qtool.runtime.prefix_cache import PrefixCache
from qtool.runtime.sampling_params import SamplingParams
from qtool.runtime.scheduled_step import Chunk, ScheduledStep
from qtool.runtime.scheduler import Scheduler
from qtool.runtime.sequence import FORGOTTEN, Sequence, SequenceStatus

VOCAB_SIZE = 50
STOP_TOKEN = 0


def next_token(tokens: list[int]) -> int:
    """The scripted model."""
    return crc32(bytes(tokens)) % VOCAB_SIZE


def kept(tokens: list[int], rule: EvictionRule | None) -> list[int]:
    """What the last of some tokens sees of them."""
    if rule is None:
        return tokens
    size, held = rule.block_size, list[int]()
    for token in tokens:
        if len(held) == rule.budget * size:
            blocks = [held[i : i + size] for i in range(0, len(held), size)]
            end = rule.budget - rule.recent
            middle = blocks[1:end]
            for _ in range(rule.num_dropped):
                middle.remove(min(middle, key=lambda block: crc32(bytes(block))))
            held = [token for block in (blocks[0], *middle, *blocks[end:]) for token in block]
        held.append(token)
    return held


def run_alone(
    prompt: list[int],
    limit: int,
    windows: SequenceOf[int | None] = (None,),
    rule: EvictionRule | None = None,
) -> list[int]:
    """The output of a prompt with no scheduler, no cache and no neighbours."""
    tokens = list(prompt)
    while len(tokens) < limit and (len(tokens) == len(prompt) or tokens[-1] != STOP_TOKEN):
        seen = [tokens if window is None else tokens[-window:] for window in windows]
        tokens.append(next_token([token for part in seen for token in kept(part, rule)]))
    return tokens[len(prompt) :]


def make_sequence(
    request_id: str,
    prompt: list[int],
    max_tokens: int | None = 8,
    priority: int = 0,
    salt: str = "",
    deadline: float | None = None,
) -> Sequence:
    """A new sequence; its parameters matter only for their ``max_tokens``."""
    params = SamplingParams(max_tokens=max_tokens)
    return Sequence(request_id, list(prompt), params, priority, salt, deadline)


class ScriptedEngine:
    """Drives a scheduler as the real engine does, and checks it at every turn."""

    def __init__(
        self,
        config: SchedulerConfig,
        num_blocks: int,
        block_size: int,
        window: int | None = None,
        *,
        remembers: bool = False,
        num_tails: int | None = None,
        rule: EvictionRule | None = None,
        more_windows: SequenceOf[int] = (),
    ) -> None:
        prefixes = PrefixCache(block_size) if remembers else None
        self.rule = rule
        evictor = None if rule is None else Evictor(rule, self._weigh)
        self.windows = (window, *more_windows)
        self.blocks = BlockManager(
            num_blocks,
            block_size,
            self.windows,
            prefixes,
            num_tails,
            evictor,
            config.max_num_batched_tokens,
        )
        self._tails: list[list[int | None]] = [[None] * block_size for _ in range(num_tails or 0)]
        self.scheduler = Scheduler(config, self.blocks)
        self.config = config
        self.alive: list[Sequence] = []
        self.finished: list[Sequence] = []
        self.num_steps = 0
        self.num_preemptions = 0
        self.num_copies = 0
        self.num_tail_copies = 0
        self.num_hits = 0
        self.num_tokens = 0
        self._sampled_from: dict[str, list[int | None]] = {}
        self._cache: list[int | None] = [None] * self.blocks.num_slots

    def add(self, sequence: Sequence) -> None:
        self.scheduler.add(sequence)
        self.alive.append(sequence)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        self.scheduler.fork(parent, child)
        self.alive.append(child)
        self.scheduler.check_integrity()

    def abort(self, sequence: Sequence) -> None:
        assert self.scheduler.abort(sequence.request_id) is sequence
        self.alive.remove(sequence)
        self.scheduler.check_integrity()

    def expire(self, now: float) -> list[Sequence]:
        late = self.scheduler.expire(now)
        for sequence in late:
            self.alive.remove(sequence)
        self.scheduler.check_integrity()
        return late

    def step(self, abort_in_flight: Sequence | None = None) -> ScheduledStep:
        """One step; the sequence given is aborted while the model runs."""
        before = [s for s in self.alive if s.status is SequenceStatus.RUNNING]
        step = self.scheduler.schedule()
        self._check_step(step, before)
        self._run(step)
        sampling = [chunk.sequence for chunk in step.chunks if chunk.samples]
        if abort_in_flight is not None:
            self.abort(abort_in_flight)
        self.scheduler.commit(step)
        for sequence in sampling:
            self._append(sequence)
        self.scheduler.check_integrity()
        return step

    def drain(self, max_steps: int) -> None:
        """Run until nothing is left; every block must be back, within so many steps."""
        for _ in range(max_steps):
            if not self.scheduler.has_work:
                break
            self.step()
        assert not self.scheduler.has_work, f"unfinished after {max_steps} steps"
        assert self.blocks.num_free == self.blocks.num_blocks
        assert (self.scheduler.num_running, self.scheduler.num_waiting) == (0, 0)

    def _check_step(self, step: ScheduledStep, before: list[Sequence]) -> None:
        self.scheduler.check_integrity()
        self.num_steps += 1
        self.num_preemptions += len(step.preempted)
        self.num_copies += len(step.copies)
        self.num_tail_copies += len(step.tail_copies)
        self.num_tokens += step.num_tokens
        assert 0 < step.num_tokens <= self.config.max_num_batched_tokens
        scheduled = [chunk.sequence for chunk in step.chunks]
        fresh = [chunk for chunk in step.chunks if chunk.sequence not in before]
        self.num_hits += sum(chunk.start > 0 for chunk in fresh)
        for sequence in before:
            assert (sequence in scheduled) != (sequence in step.preempted), sequence.request_id
        if step.preempted:
            assert all(sequence in before for sequence in scheduled), "admitted and preempted"

    def _run(self, step: ScheduledStep) -> None:
        size = self.blocks.block_size
        for src, dst in step.tail_copies:
            self._tails[dst] = list(self._tails[src])
        for src, dst in step.copies:
            self._cache[dst * size : (dst + 1) * size] = self._cache[src * size : (src + 1) * size]
        # The owners are counted here anew, not taken from the block manager.
        tables = [table for sequence in self.alive for table in sequence.tables]
        owners = Counter(block for table in tables for block in table if block != FORGOTTEN)
        self._check_salts()
        for chunk in step.chunks:
            self._write(chunk, owners)
        for chunk in step.chunks:
            end = chunk.start + chunk.length
            seen = list[int | None]()
            for group, window in enumerate(self.windows):
                first = _first_seen(chunk.start, window)
                held = self._read(chunk.sequence, group, first, end)
                meant = kept(chunk.sequence.token_ids(first, end), self.rule)
                name = chunk.sequence.request_id
                assert held == meant, f"{name}: cache of group {group} holds {held}, not {meant}"
                # Read in the step, as a model does: its commit may forget what only this step saw.
                seen += self._read(chunk.sequence, group, _first_seen(end - 1, window), end)
            self._sampled_from[chunk.sequence.request_id] = seen

    def _check_salts(self) -> None:
        salts: dict[int, str] = {}
        for sequence in self.alive:
            for block in chain.from_iterable(sequence.tables):
                if block != FORGOTTEN:
                    salt = salts.setdefault(block, sequence.cache_salt)
                    assert salt == sequence.cache_salt, f"block {block} is shared across salts"

    def _write(self, chunk: Chunk, owners: Counter[int]) -> None:
        tokens = chunk.sequence.token_ids(chunk.start, chunk.start + chunk.length)
        for position, token in enumerate(tokens, start=chunk.start):
            for group in range(len(self.windows)):
                slot = self._slot(chunk.sequence, group, position - chunk.sequence.num_evicted)
                block = slot // self.blocks.block_size
                owned = f"block {block} is written, and has {owners[block]} owners"
                assert owners[block] == 1, owned
                self._put(chunk.sequence, slot, token, VOCAB_SIZE * group)

    def _read(self, sequence: Sequence, group: int, first: int, end: int) -> list[int | None]:
        held = end - sequence.num_evicted
        return [self._held(sequence, group, place, held) for place in range(first, held)]

    def _put(self, sequence: Sequence, slot: int, token: int, mark: int) -> None:
        if not self._tails:
            self._cache[slot] = token + mark
            return
        size, tail = self.blocks.block_size, self._tails[sequence.tail]
        tail[slot % size] = token
        if slot % size == size - 1:
            page = [None if token is None else token + mark for token in tail]
            self._cache[slot + 1 - size : slot + 1] = page

    def _held(self, sequence: Sequence, group: int, place: int, end: int) -> int | None:
        """What of a sequence that holds ``end`` computed tokens lies at a place."""
        size = self.blocks.block_size
        if self._tails and place // size == end // size:
            return self._tails[sequence.tail][place % size]
        token = self._cache[self._slot(sequence, group, place)]
        return None if token is None else token - VOCAB_SIZE * group

    def _slot(self, sequence: Sequence, group: int, place: int) -> int:
        index, offset = divmod(place, self.blocks.block_size)
        block = sequence.tables[group][index]
        assert block != FORGOTTEN, f"{sequence.request_id}: group {group} forgot place {place}"
        return block * self.blocks.block_size + offset

    def _weigh(self, blocks: SequenceOf[int]) -> list[int]:
        size = self.blocks.block_size
        held = [self._cache[block * size : (block + 1) * size] for block in blocks]
        return [crc32(bytes(token for token in tokens if token is not None)) for tokens in held]

    def _append(self, sequence: Sequence) -> None:
        if sequence.status is SequenceStatus.FINISHED:
            return
        last = sequence.num_tokens - 1
        num_seen = sum(last + 1 - _first_seen(last, window) for window in self.windows)
        held = self._sampled_from.pop(sequence.request_id)
        tokens = [token for token in held if token is not None]
        assert self.rule is not None or len(tokens) == num_seen
        if sequence.num_tokens < self.scheduler.token_limit(sequence):
            sequence.append(next_token(tokens))
        limit_reached = sequence.num_tokens == self.scheduler.token_limit(sequence)
        if limit_reached or sequence.output_token_ids[-1] == STOP_TOKEN:
            self.scheduler.finish(sequence)
            self.alive.remove(sequence)
            self.finished.append(sequence)


def _first_seen(position: int, window: int | None) -> int:
    return 0 if window is None else max(0, position - window + 1)
