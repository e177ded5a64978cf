"""How many tokens fit under each form of the cache: the ratios that docs/kv-cache.md promises."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from kv_capacity import SHAPES, capacity

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
    assert ratios["int4"] >= 3.3 and ratios["k8v4"] >= 2.5
    for row in rows.values():
        assert 0.999 * 16 * GIB < row.allocated <= 16 * GIB
    assert rows["int4"].tails > 0


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
