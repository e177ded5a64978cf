"""How many blocks and tail pages fit a budget."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qtool.errors import EngineError, UsageError
from qtool.runtime.capacity import cache_size
from qtool.runtime.kv_schemes import kv_scheme
from qtool.runtime.options import EngineOptions, ModelOptions

CPU = torch.device("cpu")
INT4 = ModelOptions(kv_cache_dtype="int4")


@given(memory=st.integers(1, 10**7), seqs=st.integers(1, 64), bytes_per_token=st.integers(1, 300))
def test_blocks_and_tails_fit_the_budget_and_leave_no_room_for_another_block(
    memory: int, seqs: int, bytes_per_token: int
) -> None:
    tail_bytes = 64 * 4 * bytes_per_token
    options = EngineOptions(model="m", loading=INT4, kv_cache_memory=memory, max_num_seqs=seqs)
    block_bytes = 64 * bytes_per_token
    if memory < block_bytes + tail_bytes:
        with pytest.raises(EngineError, match=f"one block of {block_bytes + tail_bytes}"):
            cache_size(options, 4096, 64, bytes_per_token, tail_bytes, CPU)
        return
    size = cache_size(options, 4096, 64, bytes_per_token, tail_bytes, CPU)
    taken = size.blocks * block_bytes + size.tails * tail_bytes
    assert taken <= memory and 1 <= size.tails <= min(seqs, size.blocks)
    most = seqs * 64
    assert size.blocks == most or memory - taken < block_bytes + tail_bytes
    assert size.tails == seqs or memory < (size.tails + 1) * (block_bytes + tail_bytes)


def test_without_tail_pages_there_are_blocks_alone() -> None:
    options = EngineOptions(model="m", kv_cache_memory=1000)
    assert cache_size(options, 4096, 16, 3, 0, CPU) == (1000 // 48, 0)


def test_a_block_size_that_the_form_cannot_have_is_refused_before_anything_is_loaded() -> None:
    with pytest.raises(UsageError, match="block_size=16: the int4 cache"):
        EngineOptions(model="m", loading=INT4, block_size=16)
    assert kv_scheme("int4").block_size(None) == 64 and kv_scheme("wide").block_size(None) == 16
