"""Slots sorted by expert, cut into blocks, and added up again, in the interpreter."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from support.gemm import fenced, make_input

pytest.importorskip("triton")
from qtool.runtime.kernels.triton import routing


def _slots_by_block(order: Tensor, blocks: Tensor, block_m: int) -> list[tuple[int, list[int]]]:
    """(expert, its slots) of every block that has any."""
    found = []
    for expert, place, end in blocks.T.tolist():
        if place < end:
            found.append((expert, order[place : min(place + block_m, end)].tolist()))
    return found


@settings(max_examples=40)
@given(
    data=st.data(),
    tokens=st.integers(1, 40),
    num_experts=st.integers(1, 9),
    block_m=st.sampled_from([8, 16]),
    chunk=st.sampled_from([16, 1024]),
)
def test_blocks_hold_every_slot_once_under_its_expert(
    data: st.DataObject, tokens: int, num_experts: int, block_m: int, chunk: int
) -> None:
    top_k = data.draw(st.integers(1, num_experts))
    numbers = st.lists(
        st.integers(0, num_experts - 1), min_size=tokens * top_k, max_size=tokens * top_k
    )
    chosen = torch.tensor(data.draw(numbers)).view(tokens, top_k)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(routing, "COMPARED", chunk)
        order, blocks = routing.route(chosen, num_experts, block_m)
    assert blocks.shape[1] == routing.max_blocks(chosen.numel(), num_experts, block_m)
    assert sorted(order.tolist()) == list(range(chosen.numel()))
    found = _slots_by_block(order, blocks, block_m)
    flat = chosen.flatten().tolist()
    assert [slot for _, slots in found for slot in slots] == order.tolist()
    assert order.tolist() == sorted(range(len(flat)), key=lambda slot: (flat[slot], slot))
    for expert, slots in found:
        assert len(slots) <= block_m and {flat[slot] for slot in slots} == {expert}


@pytest.mark.parametrize("experts", [1, 2, 8])
def test_the_bound_on_blocks_is_reached(experts: int) -> None:
    slots = [expert for expert in range(1, experts)] + [0] * 33
    _, blocks = routing.route(torch.tensor(slots).view(-1, 1), experts, 16)
    assert int((blocks[1] < blocks[2]).sum()) == blocks.shape[1] == experts + 2


@pytest.mark.parametrize(("tokens", "top_k", "width"), [(3, 2, 100), (5, 8, 1500), (1, 1, 8)])
def test_slots_are_added_in_their_order(tokens: int, top_k: int, width: int) -> None:
    parts = make_input(tokens * top_k, width, torch.float32)
    expected = torch.zeros(tokens, width)
    for i in range(top_k):
        expected += parts.view(tokens, top_k, width)[:, i]
    assert torch.equal(routing.combine(fenced(parts), top_k), expected)
