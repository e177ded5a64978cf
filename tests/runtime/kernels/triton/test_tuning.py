"""Measured tiles: the fastest wins, and a table is used only where it holds."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from qtool.runtime.kernels.triton.config import (
    BUCKETS,
    LONG_PROMPT,
    ExpertsShape,
    GemmShape,
    ProductShape,
    Tiles,
    configs_of,
    select_config,
    select_experts_config,
)
from qtool.runtime.kernels.triton.layout import Codes
from qtool.runtime.kernels.triton.target import sample_target
from qtool.runtime.kernels.triton.tuning import (
    TunedFor,
    candidates,
    minor_version,
    read_table,
    tune,
    write_table,
)

TARGET = sample_target("sm_90")
SHAPE = GemmShape(Codes.INT4, 4096, 32, 128, True, "groups")
EXPERTS = ExpertsShape(SHAPE, experts=64, top_k=8)
KEY = TunedFor("NVIDIA H200", "3.9")


def test_the_rules_choice_is_measured_first_and_its_neighbours_fit() -> None:
    for bucket in BUCKETS:
        first, *others = candidates(TARGET, SHAPE, bucket)
        assert first == select_config(TARGET, SHAPE, bucket)
        assert len(others) >= 3 and len(set(others)) == len(others)
        for tiles in others:
            assert tiles is None or (SHAPE.rows % tiles.block_n == 0 and tiles.splits <= 8)
    assert None not in candidates(TARGET, SHAPE, 128)
    assert None in candidates(TARGET, SHAPE, 256)
    assert candidates(TARGET, SHAPE, LONG_PROMPT) == (None,)
    integers = replace(SHAPE, codes=Codes.INT8_BYTES, grouped=False, zeros="constant")
    assert None not in candidates(TARGET, integers, 1024)
    blocks = replace(SHAPE, codes=Codes.FP8, zeros="constant", token_steps=True)
    for bucket in (*BUCKETS, LONG_PROMPT):
        assert None not in candidates(TARGET, blocks, bucket), "tokens have scales a step"


def test_experts_have_neighbours_and_are_never_dequantized() -> None:
    for bucket in (*BUCKETS, LONG_PROMPT):
        first, *others = candidates(TARGET, EXPERTS, bucket)
        assert first == select_experts_config(TARGET, EXPERTS, bucket)
        assert len(others) >= 2 and None not in others
        limit = 1 if bucket == LONG_PROMPT else 8
        assert all(tiles is not None and tiles.splits <= limit for tiles in others)


def test_measured_tiles_of_experts_are_theirs_alone(tmp_path: Path) -> None:
    def seconds(shape: ProductShape, tokens: int, tiles: Tiles | None) -> float:
        return 9.0 if tiles is None else float(tiles.num_stages)

    table = tune(TARGET, (EXPERTS,), seconds)
    write_table(tmp_path / KEY.file_name, KEY, table)
    read, _ = read_table(tmp_path, KEY)
    assert read == table
    for bucket in (*BUCKETS, LONG_PROMPT):
        chosen = select_experts_config(TARGET, EXPERTS, bucket, read)
        assert chosen == table[EXPERTS, bucket]
        assert select_config(TARGET, SHAPE, bucket, read) == select_config(TARGET, SHAPE, bucket)
        other = replace(EXPERTS, top_k=2)
        assert select_experts_config(TARGET, other, bucket, read).num_stages >= chosen.num_stages


def test_the_fastest_candidate_wins_and_serving_compiles_it() -> None:
    def seconds(shape: ProductShape, tokens: int, tiles: Tiles | None) -> float:
        assert shape == SHAPE
        return 5.0 if tiles is None else float(tiles.num_stages)

    table = tune(TARGET, (SHAPE, SHAPE), seconds)
    for bucket in BUCKETS:
        best = table[SHAPE, bucket]
        possible = [t.num_stages for t in candidates(TARGET, SHAPE, bucket) if t is not None]
        assert best is not None and best.num_stages == min(possible)
        assert select_config(TARGET, SHAPE, bucket, table) == best
    assert set(table.values()) == set(configs_of(TARGET, SHAPE, table))


def test_a_table_comes_back_as_it_was(tmp_path: Path) -> None:
    table = {(SHAPE, 8): Tiles(8, 64, 2, 5, 4), (SHAPE, 512): None}
    write_table(tmp_path / "deep" / KEY.file_name, KEY, table)
    assert KEY.file_name == "tiles-nvidia-h200.json"
    assert read_table(tmp_path / "deep", KEY) == (table, None)
    assert list((tmp_path / "deep").iterdir()) == [tmp_path / "deep" / KEY.file_name]


def test_another_compiler_or_layout_is_not_used_and_says_so(tmp_path: Path) -> None:
    assert read_table(tmp_path, KEY) == (None, None)
    write_table(tmp_path / KEY.file_name, KEY, {(SHAPE, 8): None})
    for other in (replace(KEY, triton="3.10"), replace(KEY, layout=99)):
        table, reason = read_table(tmp_path, other)
        assert table is None and reason is not None and "run qtool tune again" in reason


@pytest.mark.parametrize("text", ["{", "[]", json.dumps({"device": "x"}), "{}"])
def test_a_damaged_table_is_not_used_and_says_so(text: str, tmp_path: Path) -> None:
    (tmp_path / KEY.file_name).write_text(text)
    table, reason = read_table(tmp_path, KEY)
    assert table is None and reason is not None and "is damaged" in reason


def test_patches_of_a_compiler_share_tables() -> None:
    assert minor_version("3.9.1") == "3.9" == minor_version("3.9.0+git")
