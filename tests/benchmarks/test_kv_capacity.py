"""How many tokens fit under each form of the cache: the ratios that docs/kv-cache.md promises."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from kv_capacity import LENGTHS, MIXED, SHAPES, capacity, sequences

from qtool.runtime.engine import Engine
from qtool.runtime.kv_schemes import SCHEMES, WIDE
from qtool.runtime.loaded_model import load_model
from qtool.runtime.options import EngineOptions, ModelOptions
from qtool.runtime.tokenizer import Tokenizer

GIB = 2**30


@pytest.mark.parametrize("shape", SHAPES)
def test_tokens_in_the_same_memory_tail_pages_counted(shape: str) -> None:
    options = EngineOptions(model="m", kv_cache_memory=16 * GIB, max_num_seqs=64)
    rows = {name: capacity(scheme, shape, options) for name, scheme in SCHEMES.items()}
    ratios = {name: row.tokens / rows[WIDE.name].tokens for name, row in rows.items()}
    assert ratios["int8"] >= 1.9 and ratios["fp8"] >= 1.9
    assert ratios["int4"] >= 3.3 and ratios["k8v4"] >= 2.4
    for row in rows.values():
        assert 0.999 * 16 * GIB < row.allocated <= 16 * GIB
    assert rows["int4"].tails == rows["k8v4"].tails > 0


def test_more_sequences_take_tail_pages_from_what_int4_saves() -> None:
    sizes = [
        EngineOptions(model="m", kv_cache_memory=16 * GIB, max_num_seqs=count)
        for count in (64, 256)
    ]
    few, many = (capacity(SCHEMES["int4"], "8b", options) for options in sizes)
    assert many.tails == 4 * few.tails and many.tokens < 0.92 * few.tokens


@pytest.mark.parametrize("name", SCHEMES)
def test_it_is_what_an_engine_reports(name: str, model_factory: Callable[..., Path]) -> None:
    folder = model_factory(max_positions=100_000)
    loading = ModelOptions(device="cpu", dtype="bf16", backend="reference", kv_cache_dtype=name)
    options = EngineOptions(model="m", loading=loading, kv_cache_memory=5 * 10**6, max_num_seqs=8)
    engine = Engine(load_model(folder, loading), Tokenizer.load(folder), options)
    found = capacity(SCHEMES[name], "2x2x16", options)
    assert engine.info.num_cache_tokens == found.tokens
    assert engine.info.kv_tail_bytes == found.tails


@pytest.mark.parametrize("name", MIXED)
def test_windows_give_long_sequences_room_and_take_little_from_short_ones(name: str) -> None:
    options = EngineOptions(model="m", kv_cache_memory=16 * GIB, max_num_seqs=64)
    ratios = []
    for length in LENGTHS:
        one, groups = sequences(WIDE, name, length, options)
        ratios.append(groups / one)
    # As many places of blocks are empty in 27B: 8 of 70.
    assert ratios[0] > (0.99 if name == "gemma3-270m" else 0.88)
    assert ratios == sorted(ratios) and ratios[-1] > 4.5


def test_an_engine_reports_as_many_sequences(model_factory: Callable[..., Path]) -> None:
    folder = model_factory(
        model_type="gemma3_text",
        layers=6,
        head_dim=16,
        sliding_window=32,
        layer_types=["sliding_attention"] * 5 + ["full_attention"],
        max_positions=4096,
    )
    loading = ModelOptions(device="cpu", dtype="bf16", backend="reference")
    options = EngineOptions(model="m", loading=loading, kv_cache_memory=10**6, max_num_seqs=64)
    info = Engine(load_model(folder, loading), Tokenizer.load(folder), options).info
    # A block is one layer deep: keys and values of 2 heads. A sequence has 256 of the full layer,
    # and of each window the 2 that its last token sees and one begun.
    assert info.num_blocks == 10**6 // (16 * 2 * 2 * 16 * 2)
    assert info.kv_sequence_blocks == 256 + 5 * 3
    assert info.num_full_sequences == info.num_blocks / info.kv_sequence_blocks
    assert info.kv_bytes_per_token == 6 * info.kv_full_bytes_per_token == 6 * 2 * 2 * 16 * 2
    assert info.kv_window_bytes == 5 * 3 * 16 * info.kv_full_bytes_per_token
    assert "5 see 32 tokens, 1 see everything" in info.kv_groups
    assert abs(info.num_cache_tokens - info.num_full_sequences * 4096) < 1
