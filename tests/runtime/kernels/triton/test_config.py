"""The choice of tiles: pure, closed, and within what a GPU has."""

from __future__ import annotations

from itertools import product

import pytest

from qtool.runtime.kernels.triton.config import (
    BUCKETS,
    LONG_PROMPT,
    GemmShape,
    Tiles,
    bucket_of,
    configs_of,
    select_config,
)
from qtool.runtime.kernels.triton.layout import Codes
from qtool.runtime.kernels.triton.target import SHARED_MEMORY, Target, sample_target
from qtool.runtime.kernels.triton.tuning import candidates

SHAPES = [
    GemmShape(codes, rows, columns // step, step, grouped, "groups" if grouped else "constant")
    for codes, (rows, columns), step, grouped in product(
        Codes, [(64, 128), (4096, 4096), (576, 1536), (28672, 8192)], (32, 128), (False, True)
    )
]


@pytest.mark.parametrize("arch", SHARED_MEMORY)
def test_what_serving_can_ask_for_is_what_warm_up_compiles(arch: str) -> None:
    target = sample_target(arch)
    for shape in SHAPES:
        compiled = set(configs_of(target, shape))
        lengths = [*range(1, 1100), 2048, 16384, 100_000]
        assert {select_config(target, shape, tokens) for tokens in lengths} == compiled
        assert len(compiled) <= len(BUCKETS) + 1


@pytest.mark.parametrize("arch", SHARED_MEMORY)
def test_tiles_fit_the_weight(arch: str) -> None:
    for shape, tokens in product(SHAPES, BUCKETS):
        tiles = select_config(sample_target(arch), shape, tokens)
        assert tiles is not None and shape.rows % tiles.block_n == 0
        assert tiles.splits <= max(1, shape.steps // 4), "a split with too little to do"


def test_buckets_round_tokens_up() -> None:
    assert [bucket_of(tokens) for tokens in (1, 8, 9, 1024, 1025)] == [8, 8, 16, 1024, LONG_PROMPT]


def test_columns_are_split_only_while_multiprocessors_would_idle() -> None:
    narrow = GemmShape(Codes.INT4, 4096, 32, 128, True, "groups")
    wide = GemmShape(Codes.INT4, 128 * 1024, 32, 128, True, "groups")
    few, many = Target("sm_90", 16), Target("sm_90", 132)

    def splits(target: Target, shape: GemmShape) -> int:
        tiles = select_config(target, shape, 1)
        assert tiles is not None
        return tiles.splits

    assert splits(many, narrow) == 8 and splits(many, wide) == 1
    assert splits(few, narrow) == 1


def test_long_prompts_go_to_the_vendors_gemm_but_8_bit_products_stay() -> None:
    target = sample_target("sm_90")
    assert select_config(target, SHAPES[0], 1025) is None
    integers = GemmShape(Codes.INT8_BYTES, 4096, 32, 128, False, "constant")
    assert select_config(target, integers, 100_000) is not None


@pytest.mark.parametrize("arch", SHARED_MEMORY)
def test_prompts_of_any_length_are_not_split(arch: str) -> None:
    target = sample_target(arch)
    for shape in SHAPES:
        chosen = select_config(target, shape, LONG_PROMPT)
        tried = (chosen, *candidates(target, shape, LONG_PROMPT))
        assert all(tiles is None or tiles.splits == 1 for tiles in tried), "no workspace for it"


def test_e4m3_on_hopper_always_has_a_group_of_four_warps() -> None:
    for shape in SHAPES:
        if shape.codes is Codes.FP8_BYTES:
            for tokens in BUCKETS:
                tiles = select_config(sample_target("sm_90"), shape, tokens)
                assert tiles is not None and tiles.num_warps >= 4


def test_a_table_of_measured_tiles_overrides_the_rules() -> None:
    target, shape = sample_target("sm_80"), SHAPES[0]
    measured = Tiles(16, 64, 4, 2)
    table = {(shape, 8): measured, (shape, 64): None}
    assert select_config(target, shape, 5, table) == measured
    assert select_config(target, shape, 40, table) is None
    assert select_config(target, shape, 16, table) == select_config(target, shape, 16)
    assert measured in configs_of(target, shape, table)


def test_impossible_tiles_and_gpus_are_refused() -> None:
    with pytest.raises(ValueError, match="block_m=12: tiles are powers of two"):
        Tiles(12, 64, 2, 3)
    with pytest.raises(ValueError, match="block_n=32"):
        Tiles(8, 32, 2, 3)
    with pytest.raises(ValueError, match="arch='sm_75': known are sm_80"):
        Target("sm_75", 40)
