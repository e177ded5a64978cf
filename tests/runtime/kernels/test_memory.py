"""Memory of a step's weights: in order, aligned, and not more than asked for."""

from __future__ import annotations

import torch

from qtool.runtime.kernels.cpu.memory import ALIGNMENT, HUGE_PAGE, REGION, Arena, huge_zeros


def test_pieces_follow_one_another_at_cache_lines_and_overlap_nowhere() -> None:
    arena = Arena()
    sizes = [1, 64, 65, 4096, 7]
    pieces = [arena.take(size) for size in sizes]
    addresses = [piece.data_ptr() for piece in pieces]
    for number, piece in enumerate(pieces, 1):
        piece.fill_(number)
    assert [len(piece) for piece in pieces] == sizes
    assert all(address % ALIGNMENT == 0 for address in addresses)
    assert addresses == sorted(addresses)
    assert addresses[-1] - addresses[0] < sum(sizes) + len(sizes) * ALIGNMENT
    assert all(bool((piece == n).all()) for n, piece in enumerate(pieces, 1))


def test_a_piece_larger_than_a_region_gets_one_of_its_own() -> None:
    arena = Arena()
    first = arena.take(100)
    large = arena.take(REGION + 1)
    large[-1] = 5
    assert len(large) == REGION + 1
    assert not first.any()


def test_huge_memory_starts_at_a_page_of_two_megabytes_and_is_zero() -> None:
    memory = huge_zeros(3 * HUGE_PAGE + 5)
    assert memory.data_ptr() % HUGE_PAGE == 0
    assert len(memory) == 3 * HUGE_PAGE + 5
    assert torch.count_nonzero(memory) == 0
