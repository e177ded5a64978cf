"""Whatever the schedule, every request gets the tokens it gets alone, and every block comes back.

With and without a prefix cache, chunks, preemptions, forks, deadlines and neighbours that are
aborted: the tokens of a solo run are the truth for all of them.

:class:`support.scripted.ScriptedEngine` checks at every step: exact block accounting, the token
budget, that no block with two owners is written, that the cache holds each sequence's own
tokens, and that each running sequence advances unless it was preempted.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from qtool.errors import RequestError
from qtool.runtime.admission import SchedulerConfig
from qtool.runtime.block_refs import BlockRefs
from qtool.runtime.blocks import BlockManager
from qtool.runtime.eviction import EvictionRule, Evictor
from qtool.runtime.prefix_cache import PrefixCache
from qtool.runtime.scheduled_step import Chunk, ScheduledStep
from qtool.runtime.scheduler import Scheduler
from qtool.runtime.sequence import Sequence
from qtool.runtime.tails import BlockCopy, TailPages
from support.schedules import (
    SHARED_PREFIX,
    assert_streams_are_those_of_solo_runs,
    check_schedules,
    limit,
    longest,
    max_steps,
    no_window,
    random_config,
    random_sequence,
    some_window,
)
from support.scripted import VOCAB_SIZE, ScriptedEngine, make_sequence

NUM_SCHEDULES = 2500


def test_thousands_of_random_schedules_give_every_request_its_solo_tokens() -> None:
    tried = check_schedules(range(NUM_SCHEDULES), no_window)
    # Without these the property would hold for want of trying.
    assert tried["preemptions"] > 0.4 and tried["copies"] > 0.2 and tried["hits"] > 1
    assert tried["finished"] > 3


def test_without_a_prefix_cache_the_tokens_are_the_same() -> None:
    tried = check_schedules(range(NUM_SCHEDULES // 2), no_window, remembers=False)
    assert tried["preemptions"] > 0.5 and tried["copies"] > 0.2 and tried["hits"] == 0


def test_a_sliding_window_gives_every_request_its_solo_tokens_and_its_blocks_back() -> None:
    tried = check_schedules(range(NUM_SCHEDULES // 4), some_window)
    assert tried["preemptions"] > 0.025 and tried["copies"] > 0.1 and tried["hits"] > 0.5


@pytest.mark.parametrize("window", [no_window, some_window])
def test_with_tail_pages_the_tokens_are_the_same(window: Callable[[int], int | None]) -> None:
    tried = check_schedules(range(NUM_SCHEDULES // 4), window, tails=True)
    assert tried["tail copies"] > 0.05 and tried["hits"] > 0.5
    assert tried["preemptions"] > (0.1 if window is no_window else 0.01)


@pytest.mark.parametrize("tails", [False, True])
def test_with_eviction_a_request_keeps_what_it_keeps_alone_and_no_more(tails: bool) -> None:
    seeds = range(NUM_SCHEDULES // 4)
    tried = check_schedules(seeds, no_window, remembers=False, tails=tails, evicts=True)
    assert tried["preemptions"] > 0.1 and tried["evictions"] > 2 and tried["finished"] > 3


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("window", [no_window, some_window])
def test_many_more_schedules(window: Callable[[int], int | None]) -> None:
    check_schedules(range(NUM_SCHEDULES, 30_000), window)


class TestPlantedBugs:
    """The properties are worth something only if they fail when they should."""

    def _is_caught(self, tails: bool = False, evicts: bool = False) -> bool:
        try:
            check_schedules(range(150), no_window, not evicts, tails, evicts)
        except (AssertionError, KeyError, IndexError):
            return True
        return False

    def test_without_a_bug_nothing_is_caught(self) -> None:
        assert not self._is_caught()
        assert not self._is_caught(tails=True)
        assert not self._is_caught(evicts=True)

    def test_a_chunk_that_goes_beyond_an_eviction(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(BlockManager, "room", lambda *_: 10**9)
        assert self._is_caught(evicts=True)

    def test_an_evicted_block_that_is_not_given_back(self, monkeypatch: pytest.MonkeyPatch) -> None:
        evict = Evictor.evict

        def keep(evictor: Evictor, sequence: Sequence) -> list[int]:
            evict(evictor, sequence)
            return []

        monkeypatch.setattr(Evictor, "evict", keep)
        assert self._is_caught(evicts=True)

    def test_blocks_that_are_chosen_by_where_they_lie(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(ScriptedEngine, "_weigh", lambda _, blocks: list(blocks))
        assert self._is_caught(evicts=True)

    def test_a_fork_whose_tail_page_is_not_copied(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(TailPages, "copy", lambda *_: None)
        assert self._is_caught(tails=True)

    def test_a_fork_into_a_page_that_its_parent_has_filled(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def share(_: BlockManager, tails: TailPages, parent: Sequence, child: Sequence) -> None:
            tails.copy(parent.tail, child.tail)

        monkeypatch.setattr(BlockManager, "_share_tail", share)
        assert self._is_caught(tails=True)

    def test_a_tail_page_that_is_not_given_back(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(TailPages, "release", lambda *_: None)
        assert self._is_caught(tails=True)

    def test_a_reference_that_is_not_counted(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def share(refs: BlockRefs, block: int) -> None:
            refs._idle.pop(block, None)
            refs._counts[block] = max(refs._counts[block], 1)

        monkeypatch.setattr(BlockRefs, "share", share)
        assert self._is_caught()

    def test_the_same_where_the_books_are_not_checked(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The scripted model alone sees it: somebody's cache holds somebody else's tokens."""
        self.test_a_reference_that_is_not_counted(monkeypatch)
        monkeypatch.setattr(Scheduler, "check_integrity", lambda _: None)
        assert self._is_caught()

    def test_a_block_that_is_reused_and_still_known_by_what_it_held(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(PrefixCache, "drop", lambda *_: None)
        monkeypatch.setattr(Scheduler, "check_integrity", lambda _: None)
        assert self._is_caught()

    def test_a_block_made_known_before_it_is_computed(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        grow = BlockManager.grow

        def eager(blocks: BlockManager, sequence: Sequence, num_tokens: int) -> list[BlockCopy]:
            copies = grow(blocks, sequence, num_tokens)
            full = (sequence.num_computed + num_tokens) // blocks.block_size
            for index in range(sequence.num_registered, full):
                assert blocks._prefixes is not None
                blocks._prefixes.register(sequence, index)
            return copies

        monkeypatch.setattr(BlockManager, "grow", eager)
        monkeypatch.setattr(Scheduler, "check_integrity", lambda _: None)
        assert self._is_caught()

    def test_a_hit_on_another_tenants_block(self, monkeypatch: pytest.MonkeyPatch) -> None:
        parent = PrefixCache._parent

        def saltless(prefixes: PrefixCache, sequence: Sequence, index: int) -> bytes:
            return parent(prefixes, sequence, index) if index else b"root"

        monkeypatch.setattr(PrefixCache, "_parent", saltless)
        assert self._is_caught()

    def test_a_shared_block_that_is_written_without_a_copy(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(BlockManager, "_shared", lambda *_: [])
        monkeypatch.setattr(Scheduler, "check_integrity", lambda _: None)
        assert self._is_caught()

    def test_a_step_that_ignores_its_budget(self, monkeypatch: pytest.MonkeyPatch) -> None:
        schedule = Scheduler._schedule_chunk

        def greedy(
            scheduler: Scheduler, step: ScheduledStep, sequence: Sequence, length: int
        ) -> None:
            schedule(scheduler, step, sequence, length)
            step.chunks[-1] = Chunk(sequence, sequence.num_computed, sequence.num_uncomputed)

        monkeypatch.setattr(Scheduler, "_schedule_chunk", greedy)
        assert self._is_caught()


def test_each_request_ends_within_as_many_steps_as_it_and_those_before_it_have_tokens() -> None:
    for seed in range(200):
        rng = random.Random(seed)
        engine = ScriptedEngine(*random_config(rng))
        for i in range(12):
            try:
                engine.add(random_sequence(rng, str(i), priorities=1))
            except RequestError:
                continue
        bound, everyone = 0, list(engine.alive)
        for sequence in everyone:
            bound += limit(engine, sequence)
            while sequence in engine.alive:
                engine.step()
                assert engine.num_steps <= bound, f"seed {seed}, request {sequence.request_id}"


class SchedulerMachine(RuleBasedStateMachine):
    """Hypothesis looks for a schedule that breaks the same properties, and shrinks it."""

    @initialize(
        seqs=st.integers(1, 6),
        spare=st.sampled_from([0, 1, 3, 10, 100]),
        model_len=st.sampled_from([12, 1000]),
        num_slots=st.integers(8, 64),
        block_size=st.sampled_from([1, 3, 4]),
        window=st.sampled_from([None, 1, 4, 10]),
        watermark=st.sampled_from([0.0, 0.2]),
        expects_output=st.booleans(),
        max_passes=st.sampled_from([0, 2]),
        remembers=st.booleans(),
        num_tails=st.sampled_from([None, 1, 6]),
        budget=st.sampled_from([None, None, 3, 5]),
        more_windows=st.sampled_from([(), (), (4,), (9, 2)]),
    )
    def start(
        self,
        seqs: int,
        spare: int,
        model_len: int,
        num_slots: int,
        block_size: int,
        window: int | None,
        watermark: float,
        expects_output: bool,
        max_passes: int,
        remembers: bool,
        num_tails: int | None,
        budget: int | None,
        more_windows: tuple[int, ...],
    ) -> None:
        rule = None
        if budget is not None and num_slots // block_size >= budget:
            rule = EvictionRule(block_size, budget, budget // 2)
            remembers, window, model_len, more_windows = False, None, min(model_len, 60), ()
        if more_windows:
            window = None
        config = SchedulerConfig(
            seqs,
            seqs + spare,
            model_len,
            watermark=watermark,
            expects_output=expects_output,
            max_passes=max_passes,
        )
        self.engine = ScriptedEngine(
            config,
            num_slots // block_size * (1 + len(more_windows)),
            block_size,
            window,
            remembers=remembers,
            num_tails=num_tails,
            rule=rule,
            more_windows=more_windows,
        )
        self.num_added = 0

    def _name(self) -> str:
        self.num_added += 1
        return str(self.num_added)

    @property
    def _longest(self) -> int:
        return longest(self.engine)

    def _pick(self, which: int) -> Sequence:
        return self.engine.alive[which % len(self.engine.alive)]

    @rule(
        prompt=st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=24),
        max_tokens=st.sampled_from([0, 1, 5, 20, None]),
        priority=st.integers(0, 2),
    )
    def add(self, prompt: list[int], max_tokens: int | None, priority: int) -> None:
        sequence = make_sequence(self._name(), prompt, max_tokens, priority)
        fits = 0 < len(prompt) < self._longest
        try:
            self.engine.add(sequence)
        except RequestError:
            assert not fits
        else:
            assert fits

    @rule(
        shared=st.integers(1, 24),
        own=st.lists(st.integers(0, 3), max_size=2),
        salt=st.sampled_from(["", "tenant"]),
    )
    def add_with_a_common_prefix(self, shared: int, own: list[int], salt: str) -> None:
        prompt = SHARED_PREFIX[:shared] + own
        if len(prompt) < self._longest:
            self.engine.add(make_sequence(self._name(), prompt, 5, 0, salt))

    @precondition(lambda self: self.engine.alive)
    @rule(which=st.integers(0, 9), drop=st.integers(0, 3), branch=st.booleans())
    def fork(self, which: int, drop: int, branch: bool) -> None:
        parent = self._pick(which)
        tokens = parent.token_ids(0, max(parent.num_tokens - drop, 1))
        child = make_sequence(self._name(), tokens + [1] * branch, 5, 0, parent.cache_salt)
        if child.num_tokens < self._longest:
            self.engine.fork(parent, child)

    @precondition(lambda self: self.engine.alive)
    @rule(which=st.integers(0, 9))
    def abort(self, which: int) -> None:
        self.engine.abort(self._pick(which))

    @precondition(lambda self: self.engine.alive)
    @rule(which=st.integers(0, 9))
    def abort_in_a_step(self, which: int) -> None:
        self.engine.step(abort_in_flight=self._pick(which))

    @precondition(lambda self: self.engine.alive)
    @rule(num_steps=st.integers(1, 4))
    def step(self, num_steps: int) -> None:
        for _ in range(num_steps):
            if self.engine.alive:
                self.engine.step()

    @invariant()
    def counts_agree(self) -> None:
        scheduler = self.engine.scheduler
        assert scheduler.num_running + scheduler.num_waiting == len(self.engine.alive)
        assert scheduler.has_work == bool(self.engine.alive)

    @rule()
    def drain(self) -> None:
        self.engine.drain(max_steps(self.engine, self.engine.alive))
        assert_streams_are_those_of_solo_runs(self.engine)


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=100,
    stateful_step_count=40,
    phases=(Phase.generate, Phase.shrink),  # explaining a failure takes longer than finding it
    report_multiple_bugs=False,
    derandomize=True,
    database=None,
    deadline=None,
)
