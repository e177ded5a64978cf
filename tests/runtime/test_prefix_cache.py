"""What is found again, by whom, and what is forgotten first."""

from __future__ import annotations

from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qtool.runtime import prefix_cache
from qtool.runtime.blocks import BlockManager
from qtool.runtime.kv_groups import first_seen
from qtool.runtime.prefix_cache import PrefixCache
from qtool.runtime.sampling_params import SamplingParams
from qtool.runtime.sequence import FORGOTTEN, Sequence
from support.scripted import make_sequence

SIZE = 4


def _make_blocks(num_blocks: int = 16, window: int | None = None) -> BlockManager:
    return BlockManager(num_blocks, SIZE, (window,), PrefixCache(SIZE))


def _start(blocks: BlockManager, sequence: Sequence, num_tokens: int | None = None) -> int:
    """Begin with what is known and compute the rest; how many tokens were known."""
    blocks.adopt(sequence, blocks.find_prefix(sequence))
    known = sequence.num_computed
    count = (num_tokens or sequence.num_tokens) - known
    blocks.grow(sequence, count)
    blocks.advance(sequence, count)
    return known


def _known(blocks: BlockManager, tokens: list[int], salt: str = "") -> int:
    """How many tokens a newcomer would not have to compute."""
    return SIZE * len(blocks.find_prefix(make_sequence("probe", tokens, salt=salt))[0])


def test_whole_blocks_are_found_while_their_owner_runs_and_after_it_has_ended() -> None:
    blocks, tokens = _make_blocks(), list(range(11))
    owner = make_sequence("owner", tokens)
    assert _start(blocks, owner) == 0
    for free in (False, True):
        if free:
            blocks.free(owner)
        assert _known(blocks, [*tokens, 1, 2]) == 8
        assert _known(blocks, tokens[:7]) == 4
        assert _known(blocks, [9, *tokens[1:]]) == 0
        assert _known(blocks, [*tokens[:4], 9, *tokens[5:]]) == 4
    blocks.check_integrity([])


@pytest.mark.parametrize(("length", "known"), [(4, 0), (5, 4), (8, 4), (9, 8), (12, 8)])
def test_at_least_one_token_is_left_to_compute(length: int, known: int) -> None:
    blocks, tokens = _make_blocks(), list(range(12))
    _start(blocks, make_sequence("owner", tokens))
    assert _known(blocks, tokens[:length]) == known


def test_output_is_found_as_well_as_prompts() -> None:
    blocks = _make_blocks()
    owner = make_sequence("owner", [1, 2, 3])
    _start(blocks, owner)
    for token in (4, 5, 6, 7, 8):
        owner.append(token)
        blocks.grow(owner, 1)
        blocks.advance(owner, 1)
    assert _known(blocks, [1, 2, 3, 4, 5, 6, 7, 8, 9]) == 8


def test_a_salt_a_form_of_the_cache_and_a_block_size_of_their_own_share_nothing() -> None:
    blocks, tokens = _make_blocks(), list(range(9))
    _start(blocks, make_sequence("owner", tokens, salt="mine"))
    assert _known(blocks, tokens, salt="mine") == 8
    assert _known(blocks, tokens) == _known(blocks, tokens, salt="yours") == 0
    digests = set()
    for size, scheme, salt in ((4, "", ""), (4, "int8", ""), (2, "", ""), (4, "", "x")):
        sequence = make_sequence("a", [1] * 5, salt=salt)
        PrefixCache(size, scheme).find(sequence, [lambda _: 0])
        digests.add(sequence.block_digests[0])
    assert len(digests) == 4


def test_a_digest_that_collides_is_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_cache, "chain_digest", lambda parent, tokens: b"always the same")
    blocks = _make_blocks()
    owner, other = make_sequence("a", [1, 2, 3, 4, 5]), make_sequence("b", [6, 7, 8, 9, 10])
    _start(blocks, owner)
    assert _known(blocks, [6, 7, 8, 9, 10]) == 0
    assert _known(blocks, [1, 2, 3, 4, 9]) == 4
    _start(blocks, other)
    assert not set(owner.block_table) & set(other.block_table)
    blocks.check_integrity([owner, other])


def test_one_that_asks_for_scores_of_its_prompt_computes_all_of_it() -> None:
    blocks, tokens = _make_blocks(), list(range(9))
    _start(blocks, make_sequence("owner", tokens))
    scored = Sequence("scored", tokens, SamplingParams(prompt_logprobs=0))
    assert blocks.find_prefix(scored) == [[]]


def test_two_that_computed_the_same_end_up_with_the_same_blocks() -> None:
    blocks, tokens = _make_blocks(), list(range(9))
    first, second = make_sequence("a", tokens), make_sequence("b", tokens)
    for sequence in (first, second):
        blocks.grow(sequence, 9)
    assert not set(first.block_table) & set(second.block_table)
    for sequence in (first, second):
        blocks.advance(sequence, 9)
    assert first.block_table[:2] == second.block_table[:2]
    assert first.block_table[2] != second.block_table[2]
    assert blocks.num_free == 16 - 4
    blocks.check_integrity([first, second])


def test_blocks_of_unknown_contents_are_reused_first_and_then_the_longest_unused_tail_first() -> (
    None
):
    blocks = _make_blocks(num_blocks=6)
    old, new = make_sequence("old", [1] * 10), make_sequence("new", [2] * 10)
    for sequence in (old, new):
        _start(blocks, sequence)
        blocks.free(sequence)
    expected = [(8, 8), (8, 8), (4, 8), (0, 8), (0, 4), (0, 0)]
    taker = make_sequence("taker", list(range(100, 124)))
    for known in expected:
        blocks.grow(taker, SIZE)
        taker.num_computed += SIZE  # nothing of it is made known
        assert (_known(blocks, [1] * 10), _known(blocks, [2] * 10)) == known


def test_a_hit_makes_a_prefix_young_again() -> None:
    blocks = _make_blocks(num_blocks=5)
    old, new = make_sequence("old", [1] * 9), make_sequence("new", [2] * 9)
    for sequence in (old, new):
        _start(blocks, sequence)
        blocks.free(sequence)
    visitor = make_sequence("visitor", [1] * 9)
    assert _start(blocks, visitor) == 8
    blocks.free(visitor)
    taker = make_sequence("taker", list(range(100, 108)))
    blocks.grow(taker, 8)
    assert (_known(blocks, [1] * 9), _known(blocks, [2] * 9)) == (8, 4)


def test_a_known_block_that_is_written_again_is_forgotten() -> None:
    blocks = _make_blocks()
    parent = make_sequence("parent", [1, 2, 3, 4, 5])
    _start(blocks, parent)
    child = make_sequence("child", [1, 2, 9])
    blocks.fork(parent, child)
    blocks.free(parent)
    assert _known(blocks, [1, 2, 3, 4, 5]) == 4
    assert blocks.grow(child, 1) == [], "nobody else owns it"
    assert _known(blocks, [1, 2, 3, 4, 5]) == 0
    blocks.check_integrity([child])


class TestWindow:
    """Only what the next token sees must be known."""

    def test_a_prefix_is_found_whose_beginning_is_forgotten(self) -> None:
        blocks, tokens = _make_blocks(num_blocks=8, window=5), list(range(21))
        owner = make_sequence("owner", tokens)
        for _ in range(21):
            blocks.grow(owner, 1)
            blocks.advance(owner, 1)
        blocks.free(owner)
        taker = make_sequence("taker", list(range(50, 70)))
        blocks.grow(taker, 20)  # takes the blank ones and the oldest
        visitor = make_sequence("visitor", tokens)
        found = blocks.find_prefix(visitor)
        (table,) = found
        assert len(table) == 5 and table[:4] == [FORGOTTEN] * 4 and table[4] != FORGOTTEN
        blocks.adopt(visitor, found)
        assert visitor.num_computed == 20
        blocks.check_integrity([taker, visitor])


Known = st.lists(st.lists(st.booleans(), min_size=9, max_size=9), min_size=1, max_size=3)


@settings(max_examples=300, derandomize=True, database=None, deadline=None)
@given(known=Known, windows=st.lists(st.sampled_from([None, 1, 5, 9, 18]), min_size=3, max_size=3))
def test_the_longest_prefix_is_found_of_which_every_group_knows_what_the_next_token_sees(
    known: list[list[bool]], windows: list[int | None]
) -> None:
    prefixes, owner = PrefixCache(SIZE), make_sequence("owner", list(range(9 * SIZE)))
    owner.block_table, *more = (list(range(9 * g, 9 * g + 9)) for g in range(len(known)))
    owner.more_tables = tuple(more)
    for group, blocks in enumerate(known):
        for index in range(9):
            if blocks[index]:
                prefixes.register(owner, index, group)
    seen = [partial(first_seen, window=w, block_size=SIZE) for w in windows[: len(known)]]

    def valid(length: int) -> bool:
        starts = [min(first(length * SIZE), length - 1) for first in seen]
        parts = zip(known, starts, strict=True)
        return length == 0 or all(all(blocks[start:length]) for blocks, start in parts)

    visitor = make_sequence("visitor", [*range(9 * SIZE), 1])
    length = max(filter(valid, range(10)))
    for group, table in enumerate(prefixes.find(visitor, seen)):
        start = min(seen[group](length * SIZE), length)
        held = list(range(9 * group + start, 9 * group + length))
        assert table == [FORGOTTEN] * start + held


Steps = st.lists(st.tuples(st.sampled_from("agf"), st.integers(0, 7), st.integers(1, 9)))


@settings(max_examples=300, derandomize=True, database=None, deadline=None)
@given(steps=Steps)
def test_a_block_is_never_forgotten_before_one_that_continues_it(
    steps: list[tuple[str, int, int]],
) -> None:
    blocks = _make_blocks(num_blocks=10)
    prefixes = blocks._prefixes
    assert prefixes is not None
    owners: list[Sequence] = []
    for action, which, size in steps:
        if action == "a":
            tokens = [0] * size + [which] * 30
            owners.append(make_sequence(str(len(owners)), tokens))
            prefix = blocks.find_prefix(owners[-1])
            if blocks.num_idle(prefix) + 1 <= blocks.num_free:
                blocks.adopt(owners[-1], prefix)
        elif owners and action == "g":
            sequence = owners[which % len(owners)]
            if blocks.can_grow(sequence, size) and sequence.num_computed < 25:
                blocks.grow(sequence, size)
                blocks.advance(sequence, size)
        elif owners:
            blocks.free(owners[which % len(owners)])
        blocks.check_integrity(owners)
        roots = {prefixes._parent(owner, 0) for owner in owners}
        known = {digest for _, digest in prefixes._known}
        for entry in prefixes._known.values():
            assert entry.parent in known or entry.parent in roots
