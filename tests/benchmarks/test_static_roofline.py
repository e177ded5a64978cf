"""The prediction is arithmetic on counted code: each limit binds where it should."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("triton")
import static_roofline as roofline

from qtool.runtime.kernels.triton.config import Tiles
from qtool.runtime.kernels.triton.machine_code import MachineCode

GPU = roofline.GPUS[1]
SHAPE = roofline.shape_for(roofline.KERNELS["W4A16 g128"], 28672, 4096)
TILES = Tiles(8, 64, 2, 5)
CODE = MachineCode(96, 0, 25600, frozenset({"HMMA"}), ("LOP3",) * 256)


def test_bytes_are_those_of_the_layout() -> None:
    weights = 28672 * 4096
    expected = weights / 2 + weights / 128 * 4 + 8 * 4096 * 2 + 8 * 28672 * 2
    assert roofline.moved_bytes(SHAPE, 8) == expected
    blocks = roofline.shape_for(roofline.KERNELS["W8A8 FP8 blocks"], 28672, 4096)
    scales = 28672 / 64 * 4096 / 128 * 32
    assert roofline.moved_bytes(blocks, 8) == weights + scales + 8 * 4096 + 8 * 28672 * 2


def test_two_instructions_a_weight_leave_an_h100_bound_by_memory() -> None:
    found = roofline.predict(GPU, SHAPE, TILES, CODE, 8)
    assert found.issue < found.memory and found.fraction == 1.0
    assert 3.4 < found.speedup < 3.8


def test_too_many_instructions_bind() -> None:
    slow = replace(CODE, loop=("LOP3",) * 1280)
    found = roofline.predict(GPU, SHAPE, TILES, slow, 8)
    assert found.issue == max(found.memory, found.issue, found.matrix, found.latency)
    assert found.fraction == pytest.approx(found.memory / found.issue)


def test_a_tile_of_tokens_more_is_a_pass_more() -> None:
    one, two = (roofline.predict(GPU, SHAPE, TILES, CODE, tokens) for tokens in (8, 9))
    assert two.issue == 2 * one.issue


def test_many_tokens_are_bound_by_the_matrix_units() -> None:
    tiles = Tiles(128, 128, 8, 3)
    found = roofline.predict(GPU, SHAPE, tiles, CODE, 512)
    assert found.matrix == max(found.memory, found.issue, found.matrix, found.latency)
    assert found.matrix == pytest.approx(2 * 28672 * 4096 * 512 / 989e12)
    slower = roofline.predict(GPU, SHAPE, Tiles(128, 128, 2, 3), CODE, 512)
    assert slower.matrix == pytest.approx(found.matrix / 0.62)


def test_few_programs_with_one_stage_leave_memory_waiting() -> None:
    small = roofline.shape_for(SHAPE, 64, 4096)
    found = roofline.predict(GPU, small, Tiles(8, 64, 2, 2), CODE, 8)
    assert found.latency > found.memory and found.fraction < 0.1


def test_registers_and_shared_memory_limit_programs() -> None:
    assert roofline.programs_per_sm(CODE, TILES, GPU.target) == 9
    assert roofline.programs_per_sm(replace(CODE, registers=255), TILES, GPU.target) == 4
    assert roofline.programs_per_sm(replace(CODE, shared=200_000), TILES, GPU.target) == 1
