"""Who is admitted when: expected output, a watermark, a bounded way past others; and deadlines."""

from __future__ import annotations

import random
from typing import Any

import pytest

from qtool.errors import RequestError, UsageError
from qtool.runtime.admission import SchedulerConfig
from qtool.runtime.sequence import Sequence, SequenceStatus
from support.scripted import ScriptedEngine, make_sequence


def _make_engine(*, seqs: int = 4, blocks: int = 32) -> ScriptedEngine:
    return ScriptedEngine(SchedulerConfig(seqs, 64, 100), num_blocks=blocks, block_size=4)


def _add(
    engine: ScriptedEngine, request_id: str, prompt_len: int, priority: int = 0, **params: int
) -> Sequence:
    # Prompts of 1, 2, 3, ...: none of the outputs used here stops before its limit.
    prompt = list(range(1, prompt_len + 1))
    sequence = make_sequence(request_id, prompt, priority=priority, **params)
    engine.add(sequence)
    return sequence


class TestAdmission:
    """Room for what answers are expected to become, and for those behind one that does not fit."""

    def _engine(self, blocks: int, **settings: Any) -> ScriptedEngine:
        config = SchedulerConfig(8, 256, 1000, **settings)
        return ScriptedEngine(config, num_blocks=blocks, block_size=4)

    def test_a_newcomer_waits_where_those_running_are_expected_to_need_the_room(self) -> None:
        for expects, num_running in ((False, 4), (True, 2)):
            engine = self._engine(blocks=12, expects_output=expects)
            for name in "abcd":
                _add(engine, name, 6, max_tokens=16)
            engine.step()
            assert engine.scheduler.num_running == num_running

    def test_fewer_are_preempted_where_output_is_expected(self) -> None:
        preemptions = []
        for expects in (False, True):
            engine = self._engine(blocks=16, expects_output=expects)
            for index in range(20):
                _add(engine, str(index), 6, max_tokens=16)
            engine.drain(max_steps=1000)
            preemptions.append(engine.num_preemptions)
        assert preemptions[0] > 5 and preemptions[1] == 0

    def test_it_learns_from_the_answers_that_have_ended(self) -> None:
        engine = self._engine(blocks=40, expects_output=True)
        for index in range(60):
            _add(engine, f"short {index}", 4, max_tokens=2)
        engine.drain(max_steps=200)
        for index in range(8):
            _add(engine, f"patient {index}", 4, max_tokens=200)
        engine.step()
        assert engine.scheduler.num_running > 3, "each was expected to fill the cache"
        engine.drain(max_steps=3000)

    def test_a_watermark_keeps_blocks_free_but_not_from_one_that_runs_alone(self) -> None:
        engine = self._engine(blocks=10, watermark=0.5)
        large = _add(engine, "large", 30, max_tokens=2)
        engine.step()
        assert large.status is SequenceStatus.RUNNING
        engine.drain(max_steps=2)
        for name in "ab":
            _add(engine, name, 10)
        engine.step()
        assert engine.scheduler.num_running == 1

    def test_one_that_does_not_fit_is_passed_no_more_often_than_allowed(self) -> None:
        engine = self._engine(blocks=10, max_passes=3)
        _add(engine, "running", 18, max_tokens=30)
        engine.step()
        head = _add(engine, "head", 30, max_tokens=2)
        small = [_add(engine, f"small {index}", 2, max_tokens=1) for index in range(6)]
        num_passed = 0
        while head.status is SequenceStatus.WAITING:
            num_passed = sum(sequence in engine.finished for sequence in small)
            engine.step()
        assert head.times_passed == num_passed == 3
        engine.drain(max_steps=100)

    def test_a_strict_queue_lets_nobody_pass(self) -> None:
        engine = self._engine(blocks=10)
        _add(engine, "running", 18, max_tokens=10)
        engine.step()
        _add(engine, "head", 30, max_tokens=2)
        small = _add(engine, "small", 2, max_tokens=1)
        engine.step()
        assert small.status is SequenceStatus.WAITING

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"policy": "lifo"}, "policy='lifo': use one of fcfs, priority"),
            ({"watermark": 1.0}, "watermark=1.0: must be"),
            ({"max_passes": -1}, "max_passes=-1: must be"),
        ],
    )
    def test_settings_out_of_range_are_refused_by_name(
        self, settings: dict[str, Any], message: str
    ) -> None:
        with pytest.raises(UsageError, match=message):
            self._engine(blocks=10, **settings)


def test_in_order_of_arrival_a_priority_is_refused_not_ignored() -> None:
    config = SchedulerConfig(4, 64, 100, policy="fcfs")
    engine = ScriptedEngine(config, num_blocks=8, block_size=4)
    with pytest.raises(RequestError, match="priority=-1: .*scheduling policy 'priority'"):
        _add(engine, "urgent", 3, priority=-1)
    _add(engine, "patient", 3)
    engine.drain(max_steps=10)


class TestDeadlines:
    def test_those_whose_time_has_come_end_wherever_they_are(self) -> None:
        engine = _make_engine(seqs=1)
        late = [make_sequence(name, [1, 2, 3], deadline=10.0) for name in ("runs", "waits")]
        in_time = make_sequence("in time", [1, 2, 3], deadline=11.0)
        for sequence in (*late, in_time, make_sequence("patient", [1, 2, 3])):
            engine.add(sequence)
        engine.step()
        assert engine.scheduler.expire(9.9) == []
        assert engine.expire(10.0) == late
        assert {sequence.status for sequence in late} == {SequenceStatus.FINISHED}
        engine.drain(max_steps=20)
        assert engine.scheduler.expire(100.0) == []

    def test_a_deadline_may_pass_while_a_step_runs(self) -> None:
        engine = _make_engine()
        late = make_sequence("late", [1, 2, 3], deadline=1.0)
        engine.add(late)
        step = engine.scheduler.schedule()
        engine.expire(2.0)
        engine.scheduler.commit(step)
        assert late.num_computed == 0 and engine.blocks.num_free == engine.blocks.num_blocks


class TestUtilization:
    def test_above_nine_tenths_of_the_slots_of_owned_blocks_hold_a_token(self) -> None:
        rng = random.Random(0)
        config = SchedulerConfig(32, 512, 1000, expects_output=True, watermark=0.01)
        engine = ScriptedEngine(config, num_blocks=640, block_size=16)
        for index in range(60):
            prompt = [rng.randrange(1, 50) for _ in range(rng.randint(200, 300))]
            engine.add(make_sequence(str(index), prompt, max_tokens=rng.randint(1, 60)))
        shares = []
        while engine.scheduler.has_work:
            engine.step()
            if used := engine.blocks.num_blocks - engine.blocks.num_free:
                shares.append(engine.scheduler.num_slots_used / (16 * used))
        assert min(shares) > 0.9, min(shares)

    def test_slots_of_shared_blocks_count_once(self) -> None:
        engine = _make_engine()
        parent = _add(engine, "parent", 6)
        engine.step()
        assert engine.scheduler.num_slots_used == 6
        engine.fork(parent, make_sequence("child", parent.prompt_token_ids))
        assert engine.scheduler.num_slots_used in (5, 6)
        engine.drain(max_steps=20)
        assert engine.scheduler.num_slots_used == 0


class TestCommonPrefixes:
    def test_of_those_that_arrive_together_one_computes_what_they_share(self) -> None:
        config = SchedulerConfig(8, 256, 1000, max_passes=16)
        engine = ScriptedEngine(config, num_blocks=64, block_size=4, remembers=True)
        common = list(range(1, 41))
        for index in range(6):
            engine.add(make_sequence(f"alike {index}", [*common, index], max_tokens=2))
        other = make_sequence("other", [9, 8, 7, 6, 5], max_tokens=2)
        engine.add(other)
        step = engine.step()
        assert [chunk.sequence.request_id for chunk in step.chunks] == ["alike 0", "other"]
        step = engine.step()
        assert [chunk.length for chunk in step.chunks] == [1] * 7
        assert engine.scheduler.num_reused_tokens == 5 * 40
        engine.drain(max_steps=5)

    def test_nobody_waits_for_a_prefix_of_another_salt(self) -> None:
        config = SchedulerConfig(8, 256, 1000, max_passes=16)
        engine = ScriptedEngine(config, num_blocks=64, block_size=4, remembers=True)
        for salt in ("", "tenant"):
            engine.add(make_sequence(f"a{salt}", [1] * 20, salt=salt))
        assert len(engine.step().chunks) == 2
        engine.drain(max_steps=20)
