"""Groups of layers with block tables of their own: whatever the schedule, every request gets the
tokens it gets alone, and windows give their blocks back. As test_scheduler_properties.py has it.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from qtool.runtime.blocks import BlockManager
from qtool.runtime.prefix_cache import PrefixCache
from qtool.runtime.scheduler import Scheduler
from qtool.runtime.sequence import Sequence
from support.schedules import check_schedules, layer_groups, no_window


@pytest.mark.parametrize("tails", [False, True])
def test_every_request_gets_its_solo_tokens_and_windows_their_blocks_back(tails: bool) -> None:
    tried = check_schedules(range(300), no_window, tails=tails, more_windows=layer_groups)
    assert tried["preemptions"] > 0.05 and tried["copies"] > 0.2 and tried["hits"] > 0.5
    assert tried["finished"] > 3


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_so_it_does_in_many_more() -> None:
    check_schedules(range(300, 10_000), no_window, more_windows=layer_groups)


class TestPlantedBugs:
    """The property is worth something only if it fails when it should."""

    def _is_caught(self) -> bool:
        try:
            check_schedules(range(150), no_window, more_windows=layer_groups)
        except (AssertionError, KeyError, IndexError):
            return True
        return False

    @pytest.fixture(autouse=True)
    def unchecked(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The scripted model alone must see it, without the books."""
        monkeypatch.setattr(Scheduler, "check_integrity", lambda _: None)

    def test_without_a_bug_nothing_is_caught(self) -> None:
        assert not self._is_caught()

    def test_a_window_that_is_forgotten_a_token_early(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        forget = BlockManager._forget

        def early(blocks: BlockManager, sequence: Sequence) -> None:
            sequence.num_computed += 1
            forget(blocks, sequence)
            sequence.num_computed -= 1

        monkeypatch.setattr(BlockManager, "_forget", early)
        assert self._is_caught()

    def test_a_hit_of_which_one_group_alone_knows_enough(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        find = PrefixCache.find

        def by_the_first(
            prefixes: PrefixCache, sequence: Sequence, first_seen: list[Callable[[int], int]]
        ) -> list[list[int]]:
            (table,) = find(prefixes, sequence, first_seen[:1])
            others = [
                [prefixes._lookup(sequence, index, group) for index in range(len(table))]
                for group in range(1, len(first_seen))
            ]
            return [table, *others]

        monkeypatch.setattr(PrefixCache, "find", by_the_first)
        assert self._is_caught()

    def test_groups_that_take_one_anothers_blocks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        lookup = PrefixCache._lookup
        monkeypatch.setattr(PrefixCache, "_lookup", lambda *args: lookup(*args[:3], 0))
        assert self._is_caught()

    def test_a_window_whose_blocks_are_not_given_back(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Nobody's tokens are wrong, but sequences that should fit do not."""
        monkeypatch.setattr(BlockManager, "_forget", lambda *_: None)
        assert self._is_caught()
