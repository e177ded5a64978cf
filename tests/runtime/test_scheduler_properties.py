"""Whatever the schedule, every request gets the tokens it gets alone, and every block comes back.

:class:`support.scripted.ScriptedEngine` checks at every step: exact block accounting, the token
budget, that no block with two owners is written, that the cache holds each sequence's own
tokens, and that each running sequence advances unless it was preempted.
"""

from __future__ import annotations

import random

from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from qtool.errors import RequestError
from qtool.runtime.scheduler import SchedulerConfig
from qtool.runtime.sequence import Sequence
from support.scripted import VOCAB_SIZE, ScriptedEngine, make_sequence, run_alone

NUM_SCHEDULES = 2000


def _limit(engine: ScriptedEngine, sequence: Sequence) -> int:
    """As ``Scheduler.token_limit``, worked out again."""
    max_tokens = sequence.params.max_tokens
    wanted = 10**9 if max_tokens is None else len(sequence.prompt_token_ids) + max_tokens
    num_slots = engine.blocks.num_blocks * engine.blocks.block_size
    return min(wanted, engine.config.max_model_len, num_slots)


def _max_steps(engine: ScriptedEngine, sequences: list[Sequence]) -> int:
    """More steps than these may take. With one priority, the sum of their tokens.

    With several, a better one may arrive while a worse one runs and take its blocks, so each of
    them may begin anew once for each better one.
    """
    num_tokens = sum(_limit(engine, sequence) for sequence in sequences)
    one_priority = len({sequence.priority for sequence in sequences}) <= 1
    return num_tokens if one_priority else num_tokens * len(sequences)


def _assert_streams_are_those_of_solo_runs(engine: ScriptedEngine) -> None:
    for sequence in engine.finished:
        limit = _limit(engine, sequence)
        expected = run_alone(sequence.prompt_token_ids, limit, engine.window)
        assert sequence.output_token_ids == expected, sequence.request_id


def _random_config(rng: random.Random) -> tuple[SchedulerConfig, int, int]:
    seqs = rng.randint(1, 8)
    config = SchedulerConfig(
        max_num_seqs=seqs,
        max_num_batched_tokens=seqs + rng.choice([0, 1, 3, 10, 100]),
        max_model_len=rng.choice([12, 30, 1000]),
    )
    block_size = rng.choice([1, 2, 3, 4, 8])
    return config, max(rng.randint(8, 64) // block_size, 2), block_size


def _random_sequence(rng: random.Random, name: str, priorities: int) -> Sequence:
    prompt = [rng.randrange(VOCAB_SIZE) for _ in range(rng.choice([1, 3, 6, 12, 24]))]
    max_tokens = rng.choice([0, 1, 5, 20, 20, None])
    return make_sequence(name, prompt, max_tokens, rng.randrange(priorities))


def _random_fork(rng: random.Random, name: str, parent: Sequence) -> Sequence:
    """Another sample of the parent's prompt, a continuation of it, or a branch of its output."""
    end = rng.choice([len(parent.prompt_token_ids), parent.num_tokens])
    branch = [rng.randrange(VOCAB_SIZE)] * rng.randint(0, 2)
    return make_sequence(name, parent.token_ids(0, end) + branch, rng.choice([1, 5, 20]), 0)


def _act(rng: random.Random, engine: ScriptedEngine, name: str, priorities: int) -> None:
    """Add, fork, abort (between steps or in one), or just step."""
    victim = rng.choice(engine.alive) if engine.alive else None
    action = rng.random()
    try:
        if action < 0.3 or victim is None:
            engine.add(_random_sequence(rng, name, priorities))
        elif action < 0.4:
            engine.fork(victim, _random_fork(rng, name, victim))
        elif action < 0.44:
            engine.abort(victim)
        else:
            engine.step(abort_in_flight=victim if action < 0.48 else None)
    except RequestError as error:
        assert error.param == "prompt"


def _run_random_schedule(seed: int, window: int | None = None) -> ScriptedEngine:
    rng = random.Random(seed)
    engine = ScriptedEngine(*_random_config(rng), window)
    priorities = rng.choice([1, 1, 3])
    for i in range(rng.randint(1, 40)):
        _act(rng, engine, f"{seed}-{i}", priorities)
    engine.drain(_max_steps(engine, engine.alive))
    return engine


def test_thousands_of_random_schedules_give_every_request_its_solo_tokens() -> None:
    num_preemptions = num_copies = num_finished = 0
    for seed in range(NUM_SCHEDULES):
        try:
            engine = _run_random_schedule(seed)
            _assert_streams_are_those_of_solo_runs(engine)
        except AssertionError as error:
            raise AssertionError(f"schedule with seed {seed}: {error}") from error
        num_preemptions += engine.num_preemptions
        num_copies += engine.num_copies
        num_finished += len(engine.finished)
    # Without these the property would hold for want of trying.
    assert num_preemptions > NUM_SCHEDULES / 2
    assert num_copies > NUM_SCHEDULES / 5
    assert num_finished > 3 * NUM_SCHEDULES


def test_a_sliding_window_gives_every_request_its_solo_tokens_and_its_blocks_back() -> None:
    num_preemptions = num_copies = 0
    for seed in range(NUM_SCHEDULES // 4):
        try:
            engine = _run_random_schedule(seed, window=1 + seed % 10)
            _assert_streams_are_those_of_solo_runs(engine)
        except AssertionError as error:
            raise AssertionError(f"schedule with seed {seed}: {error}") from error
        num_preemptions += engine.num_preemptions
        num_copies += engine.num_copies
    assert min(num_preemptions, num_copies) > NUM_SCHEDULES / 40


def test_each_request_ends_within_as_many_steps_as_it_and_those_before_it_have_tokens() -> None:
    for seed in range(200):
        rng = random.Random(seed)
        engine = ScriptedEngine(*_random_config(rng))
        for i in range(12):
            try:
                engine.add(_random_sequence(rng, str(i), priorities=1))
            except RequestError:
                continue
        bound, everyone = 0, list(engine.alive)
        for sequence in everyone:
            bound += _limit(engine, sequence)
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
    )
    def start(
        self,
        seqs: int,
        spare: int,
        model_len: int,
        num_slots: int,
        block_size: int,
        window: int | None,
    ) -> None:
        config = SchedulerConfig(seqs, seqs + spare, model_len)
        self.engine = ScriptedEngine(config, num_slots // block_size, block_size, window)
        self.num_added = 0

    def _name(self) -> str:
        self.num_added += 1
        return str(self.num_added)

    def _pick(self, which: int) -> Sequence:
        return self.engine.alive[which % len(self.engine.alive)]

    @rule(
        prompt=st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=24),
        max_tokens=st.sampled_from([0, 1, 5, 20, None]),
        priority=st.integers(0, 2),
    )
    def add(self, prompt: list[int], max_tokens: int | None, priority: int) -> None:
        sequence = make_sequence(self._name(), prompt, max_tokens, priority)
        fits = 0 < len(prompt) < min(self.engine.config.max_model_len, self.engine.blocks.num_slots)
        try:
            self.engine.add(sequence)
        except RequestError:
            assert not fits
        else:
            assert fits

    @precondition(lambda self: self.engine.alive)
    @rule(which=st.integers(0, 9), drop=st.integers(0, 3), branch=st.booleans())
    def fork(self, which: int, drop: int, branch: bool) -> None:
        parent = self._pick(which)
        tokens = parent.token_ids(0, max(parent.num_tokens - drop, 1))
        child = make_sequence(self._name(), tokens + [1] * branch, 5)
        if child.num_tokens < min(self.engine.config.max_model_len, self.engine.blocks.num_slots):
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
        self.engine.drain(_max_steps(self.engine, self.engine.alive))
        _assert_streams_are_those_of_solo_runs(self.engine)


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
