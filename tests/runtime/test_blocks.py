"""Block accounting: who owns what, what is shared, and what must be copied before a write."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qtool.errors import EngineError
from qtool.runtime.blocks import FORGOTTEN, BlockManager
from qtool.runtime.sequence import Sequence
from qtool.runtime.tails import BlockCopy
from support.scripted import make_sequence


def _compute(blocks: BlockManager, sequence: Sequence, num_tokens: int) -> list[BlockCopy]:
    """One step of a sequence."""
    copies = blocks.grow(sequence, num_tokens)
    blocks.advance(sequence, num_tokens)
    return copies


def _make_parent(blocks: BlockManager, num_computed: int) -> Sequence:
    parent = make_sequence("parent", list(range(num_computed)))
    _compute(blocks, parent, num_computed)
    return parent


def _fork(blocks: BlockManager, parent: Sequence, num_tokens: int | None = None) -> Sequence:
    """A child with the parent's tokens and one more, or with the first ``num_tokens`` of them."""
    tokens = parent.token_ids(0, parent.num_tokens)
    child = make_sequence("child", [*tokens, 7] if num_tokens is None else tokens[:num_tokens])
    blocks.fork(parent, child)
    return child


@pytest.mark.parametrize(("num_blocks", "block_size"), [(0, 16), (-1, 16), (4, 0)])
def test_a_cache_without_blocks_or_slots_is_refused(num_blocks: int, block_size: int) -> None:
    with pytest.raises(EngineError, match="must be 1 or more"):
        BlockManager(num_blocks, block_size)


def test_a_sequence_gets_exactly_the_blocks_its_tokens_need() -> None:
    blocks = BlockManager(num_blocks=8, block_size=4)
    sequence = make_sequence("a", list(range(12)))
    for num_tokens, num_held in ((3, 1), (1, 1), (1, 2), (7, 3)):
        assert _compute(blocks, sequence, num_tokens) == []
        assert len(sequence.block_table) == num_held
        assert blocks.num_free == 8 - num_held
        blocks.check_integrity([sequence])


def test_asking_whether_a_sequence_can_grow_changes_nothing() -> None:
    blocks = BlockManager(num_blocks=2, block_size=4)
    sequence = make_sequence("a", list(range(12)))
    assert blocks.can_grow(sequence, 8)
    assert not blocks.can_grow(sequence, 9)
    assert sequence.block_table == [] and blocks.num_free == 2


def test_growing_beyond_the_free_blocks_fails_and_takes_none() -> None:
    blocks = BlockManager(num_blocks=2, block_size=4)
    sequence = make_sequence("a", list(range(12)))
    with pytest.raises(AssertionError, match="no blocks left"):
        blocks.grow(sequence, 9)
    assert blocks.num_free == 2


def test_blocks_are_reused_least_recently_freed_first_and_a_tail_before_its_head() -> None:
    blocks = BlockManager(num_blocks=4, block_size=1)
    first, second = make_sequence("a", [1, 2]), make_sequence("b", [1, 2])
    _compute(blocks, first, 2)
    _compute(blocks, second, 2)
    expected = [*reversed(second.block_table), *reversed(first.block_table)]
    blocks.free(second)
    blocks.free(first)
    third = make_sequence("c", [1, 2, 3, 4])
    _compute(blocks, third, 4)
    assert third.block_table == expected


def test_freeing_leaves_nothing_computed_and_is_harmless_twice() -> None:
    blocks = BlockManager(num_blocks=4, block_size=2)
    sequence = _make_parent(blocks, num_computed=5)
    for _ in range(2):
        blocks.free(sequence)
        assert (sequence.block_table, sequence.num_computed, blocks.num_free) == ([], 0, 4)
        blocks.check_integrity([sequence])


def test_a_freed_block_is_reused_only_when_unreferenced() -> None:
    blocks = BlockManager(num_blocks=4, block_size=4)
    parent = _make_parent(blocks, num_computed=8)
    child = _fork(blocks, parent)
    assert child.block_table == parent.block_table and blocks.num_free == 2
    blocks.free(parent)
    assert blocks.num_free == 2
    other = make_sequence("other", list(range(8)))
    _compute(blocks, other, 8)
    assert not set(other.block_table) & set(child.block_table)
    blocks.check_integrity([child, other])


def test_a_fork_keeps_one_token_to_compute_and_shares_no_block_beyond_it() -> None:
    blocks = BlockManager(num_blocks=4, block_size=4)
    parent = _make_parent(blocks, num_computed=9)
    for num_tokens, num_computed, num_shared in ((9, 8, 2), (5, 4, 1), (4, 3, 1), (1, 0, 0)):
        child = _fork(blocks, parent, num_tokens)
        assert child.num_computed == num_computed
        assert child.block_table == parent.block_table[:num_shared]
        blocks.check_integrity([parent, child])
        blocks.free(child)


def test_only_the_shared_block_about_to_be_written_is_copied_and_by_all_but_its_last_owner() -> (
    None
):
    blocks = BlockManager(num_blocks=4, block_size=4)
    parent = _make_parent(blocks, num_computed=6)
    child = _fork(blocks, parent)
    full, partial = parent.block_table
    copies = _compute(blocks, child, 1)
    assert copies == [BlockCopy(src=partial, dst=child.block_table[1])]
    assert child.block_table[0] == full and child.block_table[1] != partial
    parent.append(3)
    assert _compute(blocks, parent, 1) == []
    assert parent.block_table == [full, partial]
    blocks.check_integrity([parent, child])


def test_a_fork_at_a_block_border_copies_nothing() -> None:
    blocks = BlockManager(num_blocks=3, block_size=4)
    parent = _make_parent(blocks, num_computed=8)
    child = _fork(blocks, parent)
    assert _compute(blocks, child, 1) == []
    assert child.block_table[:2] == parent.block_table


def test_the_copy_of_a_shared_block_counts_as_a_block_taken() -> None:
    blocks = BlockManager(num_blocks=2, block_size=4)
    parent = _make_parent(blocks, num_computed=6)
    child = _fork(blocks, parent)
    assert blocks.num_free == 0
    assert not blocks.can_grow(child, 1)
    blocks.free(parent)
    assert blocks.can_grow(child, 1) and _compute(blocks, child, 1) == []


@pytest.mark.parametrize(("num_equal", "num_shared"), [(0, 0), (1, 1), (4, 1), (5, 2), (6, 2)])
def test_a_fork_shares_only_up_to_the_first_token_that_differs(
    num_equal: int, num_shared: int
) -> None:
    blocks = BlockManager(num_blocks=4, block_size=4)
    parent = _make_parent(blocks, num_computed=6)
    child = make_sequence("child", [*range(num_equal), 9, 9, 9])
    blocks.fork(parent, child)
    assert child.num_computed == num_equal
    assert child.block_table == parent.block_table[:num_shared]
    blocks.check_integrity([parent, child])


def test_a_fork_into_a_sequence_with_blocks_is_caught() -> None:
    blocks = BlockManager(num_blocks=4, block_size=4)
    parent = _make_parent(blocks, num_computed=6)
    child = _fork(blocks, parent)
    with pytest.raises(AssertionError, match="has blocks"):
        blocks.fork(parent, child)


def test_a_chunk_with_missing_or_shared_slots_is_not_writable() -> None:
    blocks = BlockManager(num_blocks=4, block_size=4)
    parent = _make_parent(blocks, num_computed=6)
    blocks.check_writable(parent, 2)
    with pytest.raises(AssertionError, match="1 blocks short"):
        blocks.check_writable(parent, 3)
    _fork(blocks, parent)
    with pytest.raises(AssertionError, match=f"block {parent.block_table[1]}: .* 2 references"):
        blocks.check_writable(parent, 1)


def test_the_integrity_check_names_the_block_whose_books_are_wrong() -> None:
    blocks = BlockManager(num_blocks=4, block_size=4)
    sequence = _make_parent(blocks, num_computed=8)
    blocks.check_integrity([sequence])
    with pytest.raises(AssertionError, match="block 0: 1 references, but in 0 tables"):
        blocks.check_integrity([])
    sequence.block_table[1] = 3
    with pytest.raises(AssertionError, match="block 1: 1 references, but in 0 tables"):
        blocks.check_integrity([sequence])
    sequence.block_table[1] = 0
    with pytest.raises(AssertionError, match="stands twice"):
        blocks.check_integrity([sequence])
    del sequence.block_table[1]
    with pytest.raises(AssertionError, match="has 1 blocks, computed 2"):
        blocks.check_integrity([sequence])


class TestWindow:
    """Every layer sees so many tokens, and older blocks return while their sequence runs."""

    def _compute(self, blocks: BlockManager, sequence: Sequence, num_tokens: int) -> list[int]:
        _compute(blocks, sequence, num_tokens)
        blocks.check_integrity([sequence])
        return [block for block in sequence.block_table if block != FORGOTTEN]

    def test_a_block_returns_when_the_next_token_sees_none_of_it(self) -> None:
        blocks = BlockManager(num_blocks=8, block_size=4, windows=(6,))
        sequence = make_sequence("a", list(range(30)))
        # After 8 tokens the next stands at 8 and sees 3 .. 8; after 9, 4 .. 9.
        assert len(self._compute(blocks, sequence, 8)) == 2
        assert len(self._compute(blocks, sequence, 1)) == 2
        assert sequence.block_table[0] == FORGOTTEN
        assert blocks.num_free == 6

    def test_a_sequence_longer_than_the_cache_goes_on(self) -> None:
        blocks = BlockManager(num_blocks=3, block_size=4, windows=(6,))
        sequence = make_sequence("a", list(range(100)))
        for _ in range(100):
            assert len(self._compute(blocks, sequence, 1)) <= 3
        blocks.free(sequence)
        assert blocks.num_free == 3

    def test_a_child_shares_nothing_where_the_parent_forgot_what_it_would_see(self) -> None:
        blocks = BlockManager(num_blocks=8, block_size=4, windows=(6,))
        parent = make_sequence("parent", list(range(20)))
        self._compute(blocks, parent, 16)
        near, far = _fork(blocks, parent), make_sequence("far", list(range(9)))
        blocks.fork(parent, far)
        assert (near.num_computed, far.num_computed) == (16, 0)
        assert far.block_table == []
        blocks.check_integrity([parent, near, far])

    def test_a_shared_block_stays_until_all_have_forgotten_it(self) -> None:
        blocks = BlockManager(num_blocks=8, block_size=4, windows=(4,))
        parent = make_sequence("parent", list(range(40)))
        self._compute(blocks, parent, 4)
        child = _fork(blocks, parent)
        shared = parent.block_table[0]
        _compute(blocks, parent, 4)
        assert parent.block_table[0] == FORGOTTEN and child.block_table == [shared]
        blocks.check_integrity([parent, child])


Actions = st.lists(st.tuples(st.sampled_from("gff"), st.integers(0, 9), st.integers(1, 9)))


@settings(max_examples=300, derandomize=True, database=None, deadline=None)
@given(actions=Actions, block_size=st.integers(1, 5), window=st.sampled_from([None, 1, 3, 4, 11]))
def test_the_books_are_exact_after_any_growing_forking_and_freeing(
    actions: list[tuple[str, int, int]], block_size: int, window: int | None
) -> None:
    blocks = BlockManager(num_blocks=12, block_size=block_size, windows=(window,))
    tokens = list(range(200))
    owners = [make_sequence(str(i), tokens) for i in range(3)]
    for action, which, size in actions:
        sequence = owners[which % len(owners)]
        if action == "g" and blocks.can_grow(sequence, size):
            copies = blocks.grow(sequence, size)
            table = sequence.block_table
            assert {copy.dst for copy in copies} <= set(table)
            assert not {copy.src for copy in copies} & set(table)
            blocks.advance(sequence, size)
        elif action == "f" and size > 4:
            blocks.free(sequence)
        elif action == "f":
            owners.append(make_sequence(str(len(owners)), tokens))
            blocks.fork(sequence, owners[-1])
        blocks.check_integrity(owners)
        tables = [owner.block_table for owner in owners]
        used = {block for table in tables for block in table if block != FORGOTTEN}
        assert len(used) + blocks.num_free == blocks.num_blocks
    for owner in owners:
        blocks.free(owner)
    assert blocks.num_free == blocks.num_blocks
