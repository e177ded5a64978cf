"""What a step holds, who is admitted, preempted and refused, and what an abort leaves behind."""

from __future__ import annotations

import pytest

from qtool.errors import RequestError, UsageError
from qtool.runtime.admission import SchedulerConfig
from qtool.runtime.scheduled_step import ScheduledStep
from qtool.runtime.sequence import Sequence, SequenceStatus
from support.scripted import ScriptedEngine, make_sequence, run_alone


def _make_engine(
    *, seqs: int = 4, budget: int = 64, model_len: int = 100, blocks: int = 32, size: int = 4
) -> ScriptedEngine:
    config = SchedulerConfig(
        max_num_seqs=seqs, max_num_batched_tokens=budget, max_model_len=model_len
    )
    return ScriptedEngine(config, num_blocks=blocks, block_size=size)


def _add(
    engine: ScriptedEngine, request_id: str, prompt_len: int, priority: int = 0, **params: int
) -> Sequence:
    # Prompts of 1, 2, 3, ...: none of the outputs used here stops before its limit.
    prompt = list(range(1, prompt_len + 1))
    sequence = make_sequence(request_id, prompt, priority=priority, **params)
    engine.add(sequence)
    return sequence


def _chunks(step: ScheduledStep) -> dict[str, tuple[int, int]]:
    return {chunk.sequence.request_id: (chunk.start, chunk.length) for chunk in step.chunks}


def _ids(sequences: list[Sequence]) -> list[str]:
    return [sequence.request_id for sequence in sequences]


@pytest.mark.parametrize("field", ["max_num_seqs", "max_num_batched_tokens", "max_model_len"])
def test_a_limit_below_one_is_refused_by_name(field: str) -> None:
    limits = {"max_num_seqs": 1, "max_num_batched_tokens": 8, "max_model_len": 8, field: 0}
    with pytest.raises(UsageError, match=f"{field}=0: must be 1 or more"):
        SchedulerConfig(**limits)


def test_a_budget_that_cannot_give_every_sequence_a_token_is_refused() -> None:
    with pytest.raises(UsageError, match=r"max_num_batched_tokens=7: .* max_num_seqs=8.*raise"):
        SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=7, max_model_len=8)


@pytest.mark.parametrize(
    ("prompt_len", "message"),
    [
        (0, "has 0 tokens: must have 1 or more; send"),
        (20, r"has 20 tokens: .* fit in max_model_len=20; shorten"),
        (500, r"has 500 tokens: .* fit in max_model_len=20; shorten"),
    ],
)
def test_a_prompt_that_is_empty_or_too_long_for_the_model_is_refused(
    prompt_len: int, message: str
) -> None:
    engine = _make_engine(model_len=20)
    with pytest.raises(RequestError, match=message) as caught:
        _add(engine, "a", prompt_len)
    assert caught.value.param == "prompt"
    assert not engine.scheduler.has_work


def test_a_prompt_that_needs_more_blocks_than_there_are_is_refused_and_one_less_runs() -> None:
    engine = _make_engine(blocks=3, size=4)
    with pytest.raises(RequestError, match=r"12 tokens: .* 4 blocks of 4, .* has 3; shorten") as e:
        _add(engine, "a", 12)
    assert e.value.param == "prompt"
    sequence = _add(engine, "b", 11)
    engine.drain(max_steps=2)
    assert len(sequence.output_token_ids) == 1


def test_an_id_in_use_is_refused_and_free_again_after_the_end() -> None:
    engine = _make_engine()
    _add(engine, "a", 3, max_tokens=1)
    with pytest.raises(RequestError, match="'a': is in use"):
        _add(engine, "a", 5)
    engine.drain(max_steps=1)
    _add(engine, "a", 5)
    engine.drain(max_steps=8)


def test_decodes_and_prompt_chunks_share_a_step() -> None:
    engine = _make_engine(budget=10)
    _add(engine, "a", 3)
    assert _chunks(engine.step()) == {"a": (0, 3)}
    _add(engine, "b", 12)
    assert _chunks(engine.step()) == {"a": (3, 1), "b": (0, 9)}
    assert _chunks(engine.step()) == {"a": (4, 1), "b": (9, 3)}


def test_a_prompt_over_the_budget_is_computed_in_chunks_and_samples_after_the_last() -> None:
    engine = _make_engine(budget=4)
    sequence = _add(engine, "a", 10)
    samples = []
    for _ in range(3):
        step = engine.scheduler.schedule()
        samples.append([chunk.samples for chunk in step.chunks])
        engine.scheduler.commit(step)
    assert samples == [[False], [False], [True]]
    assert sequence.num_computed == 10


def test_a_long_prompt_of_better_rank_leaves_a_token_for_each_decode_behind_it() -> None:
    engine = _make_engine(budget=8)
    for name in "ab":
        _add(engine, name, 2)
    engine.step()
    _add(engine, "urgent", 30, priority=-1)
    engine.step()
    assert _chunks(engine.step()) == {"urgent": (6, 6), "a": (3, 1), "b": (3, 1)}


def test_waiting_sequences_are_admitted_by_priority_and_then_arrival() -> None:
    engine = _make_engine(seqs=1, budget=8)
    for name, priority in (("a", 1), ("b", 0), ("c", 1), ("d", -1), ("e", 0)):
        _add(engine, name, 2, priority, max_tokens=1)
    engine.drain(max_steps=5)
    assert _ids(engine.finished) == ["d", "b", "e", "a", "c"]


def test_no_more_sequences_run_than_allowed() -> None:
    engine = _make_engine(seqs=2)
    for name in "abc":
        _add(engine, name, 2)
    assert _chunks(engine.step()) == {"a": (0, 2), "b": (0, 2)}
    assert (engine.scheduler.num_running, engine.scheduler.num_waiting) == (2, 1)


def test_the_newest_is_preempted_requeued_in_front_and_recomputed_with_its_output() -> None:
    engine = _make_engine(blocks=4, size=4)
    for name in "abc":
        _add(engine, name, 6, max_tokens=5)
    assert _chunks(engine.step()) == {"a": (0, 6), "b": (0, 6)}
    engine.step()
    engine.step()
    newest = engine.alive[1]
    step = engine.step()
    assert _chunks(step) == {"a": (8, 1)} and _ids(step.preempted) == ["b"]
    assert newest.status is SequenceStatus.WAITING
    assert (newest.num_computed, newest.block_table) == (0, [])
    assert newest.output_token_ids == run_alone(newest.prompt_token_ids, 9)
    engine.step()
    assert _chunks(engine.step()) == {"b": (0, 9)}
    engine.drain(max_steps=20)
    assert _ids(engine.finished) == ["a", "b", "c"]


def test_none_is_admitted_in_a_step_that_preempted() -> None:
    engine = _make_engine(blocks=4, size=4)
    for name in "ab":
        _add(engine, name, 7)
    engine.step()
    engine.step()
    _add(engine, "urgent", 1, priority=-1)
    step = engine.step()
    # It needs one block, and preempting "b" left one over.
    assert _ids(step.preempted) == ["b"] and list(_chunks(step)) == ["a"]
    assert engine.blocks.num_free == 1
    assert list(_chunks(engine.step())) == ["a", "urgent"]


def test_a_sequence_is_admitted_only_with_room_for_all_its_tokens_and_the_next() -> None:
    engine = _make_engine(blocks=4, size=4, budget=8)
    _add(engine, "a", 5, max_tokens=3)
    exact = _add(engine, "exact", 8)
    for _ in range(2):
        assert list(_chunks(engine.step())) == ["a"]
    engine.step()
    assert engine.finished and exact.status is SequenceStatus.WAITING
    assert _chunks(engine.step()) == {"exact": (0, 8)}


def test_lower_priority_is_preempted_before_newer_arrival() -> None:
    engine = _make_engine(blocks=4, size=4)
    _add(engine, "old", 7, priority=1)
    _add(engine, "new", 7, priority=0)
    engine.step()
    engine.step()
    step = engine.step()
    assert _ids(step.preempted) == ["old"] and list(_chunks(step)) == ["new"]


def test_the_token_limit_is_the_least_of_max_tokens_model_length_and_cache() -> None:
    for limits, expected in (((100, 32), 11), ((9, 32), 9), ((100, 2), 8)):
        model_len, blocks = limits
        engine = _make_engine(model_len=model_len, blocks=blocks, size=4)
        sequence = _add(engine, "a", 3, max_tokens=8)
        assert engine.scheduler.token_limit(sequence) == expected
    unlimited = make_sequence("b", [1, 2, 3], max_tokens=None)
    assert engine.scheduler.token_limit(unlimited) == 8


def test_a_sequence_alone_may_fill_the_whole_cache_and_ends_there() -> None:
    engine = _make_engine(blocks=3, size=4)
    prompt = [3, 1, 4, 1]
    sequence = make_sequence("a", prompt, max_tokens=None)
    engine.add(sequence)
    engine.drain(max_steps=8)
    assert sequence.num_tokens == 12 and engine.num_preemptions == 0


def test_a_sequence_the_engine_did_not_end_at_its_limit_is_caught_not_retried_for_ever() -> None:
    engine = _make_engine(blocks=2, size=4)
    sequence = _add(engine, "a", 7)
    engine.scheduler.commit(engine.scheduler.schedule())
    sequence.append(1)
    engine.scheduler.commit(engine.scheduler.schedule())
    sequence.append(1)
    with pytest.raises(AssertionError, match="beyond its token_limit"):
        engine.scheduler.schedule()


def test_a_step_with_nothing_to_compute_for_a_sequence_is_caught() -> None:
    engine = _make_engine()
    _add(engine, "a", 3)
    engine.scheduler.commit(engine.scheduler.schedule())
    with pytest.raises(AssertionError, match="was a token appended"):
        engine.scheduler.schedule()


def test_a_step_must_be_committed_before_the_next_and_only_once() -> None:
    engine = _make_engine()
    _add(engine, "a", 3)
    step = engine.scheduler.schedule()
    with pytest.raises(AssertionError, match="before the last step was committed"):
        engine.scheduler.schedule()
    engine.scheduler.commit(step)
    with pytest.raises(AssertionError, match="another step"):
        engine.scheduler.commit(step)


def test_an_abort_ends_waiting_running_and_preempted_sequences_and_frees_their_blocks() -> None:
    engine = _make_engine(blocks=4, size=4)
    running, preempted, waiting = [_add(engine, name, 7) for name in "abc"]
    for _ in range(3):
        engine.step()
    assert preempted.status is SequenceStatus.WAITING and preempted.output_token_ids
    for sequence in (waiting, preempted, running):
        engine.abort(sequence)
        assert sequence.status is SequenceStatus.FINISHED
        assert engine.scheduler.abort(sequence.request_id) is None
        engine.scheduler.finish(sequence)  # the engine may have been about to
    engine.drain(max_steps=0)


def test_an_abort_in_a_running_step_frees_blocks_no_one_gets_before_the_step_is_over() -> None:
    engine = _make_engine(blocks=4, size=4)
    aborted, other = [_add(engine, name, 7) for name in "ab"]
    step = engine.scheduler.schedule()
    held = list(aborted.block_table)
    engine.abort(aborted)
    late = _add(engine, "late", 5)
    engine.scheduler.check_integrity()
    assert not set(held) & {*other.block_table, *late.block_table}
    engine.scheduler.commit(step)
    assert (aborted.num_computed, other.num_computed) == (0, 7)


def test_a_fork_computes_only_its_own_tokens_and_both_streams_stay_right() -> None:
    engine = _make_engine()
    parent = _add(engine, "parent", 6)
    engine.step()
    child = make_sequence("child", parent.prompt_token_ids)
    engine.fork(parent, child)
    step = engine.step()
    assert _chunks(step) == {"parent": (6, 1), "child": (5, 1)}
    assert len(step.copies) == 1
    assert parent.block_table[0] == child.block_table[0]
    engine.drain(max_steps=10)
    assert child.output_token_ids == parent.output_token_ids == run_alone(list(range(1, 7)), 14)


def test_a_fork_is_queued_and_shares_nothing_when_there_is_no_place_or_no_cache() -> None:
    engine = _make_engine(seqs=1)
    parent = _add(engine, "parent", 6)
    for name in ("of a waiting parent", "of a running one"):
        child = make_sequence(name, parent.prompt_token_ids)
        engine.fork(parent, child)
        assert child.status is SequenceStatus.WAITING and child.block_table == []
        engine.step()
    engine.drain(max_steps=30)


def test_a_fork_in_a_running_step_shares_once_the_step_is_committed() -> None:
    engine = _make_engine()
    parent = _add(engine, "parent", 6)
    step = engine.scheduler.schedule()
    child = make_sequence("child", parent.prompt_token_ids)
    engine.fork(parent, child)
    assert child.status is SequenceStatus.WAITING and child.block_table == []
    engine.scheduler.commit(step)
    assert (child.num_computed, child.block_table) == (5, parent.block_table)


def test_samples_of_one_prompt_compute_it_once_and_then_a_token_each() -> None:
    engine = _make_engine(seqs=8)
    parent = _add(engine, "parent", 30)
    for index in range(3):
        engine.fork(parent, make_sequence(f"sample {index}", parent.prompt_token_ids))
    assert _chunks(engine.step()) == {"parent": (0, 30)}
    step = engine.step()
    assert {length for _, length in _chunks(step).values()} == {1} and len(step.chunks) == 4
    assert len(step.copies) == 3, "all but the last owner of the prompt's last block"
    assert engine.blocks.num_blocks - engine.blocks.num_free == 7 + 4
    engine.drain(max_steps=10)
    assert len({tuple(sequence.output_token_ids) for sequence in engine.finished}) == 1


def test_a_fork_of_a_parent_that_ends_first_is_computed_like_any_other() -> None:
    engine = _make_engine(seqs=1)
    parent = _add(engine, "parent", 6, max_tokens=1)
    child = make_sequence("child", parent.prompt_token_ids)
    engine.fork(parent, child)
    engine.drain(max_steps=20)
    assert child.output_token_ids == run_alone(child.prompt_token_ids, 14)
