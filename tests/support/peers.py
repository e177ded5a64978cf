"""Checkpoints that other tools wrote, in ``tests/fixtures``; its README says by whom."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from qtool.formats.tensor import QuantizedTensor

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"

PEERS = tuple(sorted(path.name for path in FIXTURES.iterdir() if path.is_dir()))


@dataclass(frozen=True)
class Expected:
    """What a writer's own decoder makes of its checkpoint."""

    input_ids: list[int]
    weights_sha256: dict[str, str]
    logits: Tensor


def expected_of(name: str) -> Expected:
    """What was recorded of a fixture."""
    folder = FIXTURES / name / "expected"
    recorded = json.loads((folder / "record.json").read_text())
    logits = load_file(folder / "logits.safetensors")["logits"]
    return Expected(recorded["input_ids"], recorded["weights_sha256"], logits)


def decoded_as_recorded(name: str, weight: QuantizedTensor) -> Tensor:
    """A weight with the roundings of the code that decoded it for the record, in float32."""
    if name.startswith("awq"):
        return weight.dequantize(torch.float16).float()
    if name.startswith("gptq"):
        coarse = replace(weight, scales=weight.scales.bfloat16())
        return coarse.dequantize(torch.bfloat16).float()
    return weight.dequantize()
