"""Probes on disk: what they hold, and what they refuse."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from qtool.errors import CheckpointError
from qtool.formats.probe import NUM_TOKENS, PROBE_PATH, Probe, make_probe, read_probe

GENERATOR = torch.Generator().manual_seed(0)
LOGITS = 5 * torch.randn(2, 50, generator=GENERATOR) + 3


def _probe() -> Probe:
    return make_probe([[1, 2, 3], [4]], lambda index: LOGITS[index])


def _write(folder: Path, values: Any) -> None:
    (folder / "qtool").mkdir(exist_ok=True)
    (folder / PROBE_PATH).write_text(json.dumps(values))


def test_a_probe_survives_the_disk(tmp_path: Path) -> None:
    _write(tmp_path, _probe().to_dict())
    assert read_probe(tmp_path) == _probe()
    assert [len(prompt.tokens) for prompt in _probe().prompts] == [NUM_TOKENS] * 2


def test_the_distance_is_relative_to_the_spread() -> None:
    prompt = _probe().prompts[0]
    assert prompt.distance(LOGITS[0]) == 0
    assert prompt.distance(LOGITS[0] + 1) == pytest.approx(1 / float(LOGITS[0].std()), rel=1e-5)
    scaled = make_probe([[1]], lambda _: 10 * LOGITS[0]).prompts[0]
    assert scaled.distance(10 * (LOGITS[0] + 1)) == pytest.approx(prompt.distance(LOGITS[0] + 1))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_logits_that_are_not_finite_are_infinitely_far(value: float) -> None:
    damaged = LOGITS[0].clone()
    damaged[_probe().prompts[0].tokens[3]] = value
    assert _probe().prompts[0].distance(damaged) == math.inf
    assert _probe().prompts[0].distance(LOGITS[0][:2]) == math.inf


def test_no_probe_and_a_later_kind_of_probe_are_no_obstacle(tmp_path: Path) -> None:
    assert read_probe(tmp_path) is None
    _write(tmp_path, {"version": 99})
    assert read_probe(tmp_path) is None


@pytest.mark.parametrize(
    "values",
    [
        {"version": 1},
        {"version": 1, "tolerance": {}, "prompts": [{"ids": [1]}]},
        {
            "version": 1,
            "tolerance": {},
            "prompts": [{"ids": [1], "tokens": [1, 2], "logits": [0.5], "spread": 1}],
        },
        {
            "version": 1,
            "tolerance": {},
            "prompts": [{"ids": [1], "tokens": [1], "logits": [0.5], "spread": 0}],
        },
    ],
)
def test_a_damaged_probe_is_an_error_with_a_way_out(values: Any, tmp_path: Path) -> None:
    _write(tmp_path, values)
    with pytest.raises(CheckpointError, match="is damaged .*delete this file"):
        read_probe(tmp_path)
