"""What the machine could do at most with a scenario, and how near an engine came.

A step takes at least as long as reading its weights and cache, and at least as long as its
multiply-adds on the fastest 8-bit unit (Williams et al. 2009: the lower of two roofs).
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from comparison.scenarios import Scenario
from comparison.worker import About
from qtool.errors import EngineError

SOURCE = Path(__file__).with_name("ceilings.cpp")
FLAGS = ("-O3", "-march=native", "-std=c++17", "-pthread")
# Seconds a measurement: a few passes over the largest model.
READ_SECONDS = 0.5
PEAK_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Peaks of the cores in use.

    Attributes:
        read_gbs: GB/s of reading memory at the size of the weights.
        int8_gops: Gop/s of the fastest unit for 8-bit integers, 2 a multiply-add.
        units: Gop/s of every unit, by name.
    """

    read_gbs: float
    int8_gops: float
    units: dict[str, float]


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes that give the work of a token."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int

    @classmethod
    def of(cls, folder: Path) -> ModelShape:
        """From a Hugging Face config."""
        config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        heads = config["num_attention_heads"]
        return cls(
            layers=config["num_hidden_layers"],
            hidden=config["hidden_size"],
            intermediate=config["intermediate_size"],
            heads=heads,
            kv_heads=config["num_key_value_heads"],
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            vocab=config["vocab_size"],
        )

    @property
    def body_weights(self) -> int:
        """Weights of all linears but the head."""
        width = self.heads * self.head_dim
        attention = self.hidden * (2 * width + 2 * self.kv_heads * self.head_dim)
        return self.layers * (attention + 3 * self.hidden * self.intermediate)

    def row_ops(self, context: float) -> float:
        """Operations of one token through the layers, 2 a multiply-add, without the head."""
        return 2 * self.body_weights + 4 * self.layers * self.heads * self.head_dim * context

    @property
    def head_ops(self) -> int:
        """Operations of one row of logits."""
        return 2 * self.hidden * self.vocab


def roof(scenario: Scenario, shape: ModelShape, about: About, ceilings: Ceilings) -> float:
    """Tokens per second that neither memory nor arithmetic allows to exceed."""
    rows = scenario.prompt_tokens if scenario.is_prefill else 1
    tokens = scenario.sequences * rows
    context = scenario.mean_context
    read = about.weight_bytes
    if not scenario.is_prefill:
        # A prompt finds its keys and values in the cache of the core that made them.
        read += int(scenario.sequences * context * about.kv_bytes_per_token)
    ops = tokens * shape.row_ops(context) + scenario.sequences * shape.head_ops
    seconds = max(read / (ceilings.read_gbs * 1e9), ops / (ceilings.int8_gops * 1e9))
    return tokens / seconds


class Probe:
    """The compiled measuring program; a context manager that keeps it for as long."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._folder = tempfile.TemporaryDirectory(prefix="qtool-ceilings-")
        self._program = Path(self._folder.name) / "ceilings"

    def __enter__(self) -> Probe:
        command = ["g++", *FLAGS, str(SOURCE), "-o", str(self._program)]
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode != 0:
            raise EngineError(f"{' '.join(command)} failed: {result.stderr[-2000:]}")
        return self

    def __exit__(self, *_: object) -> None:
        self._folder.cleanup()

    def read_gbs(self, size: int) -> float:
        """GB/s of reading ``size`` bytes again and again."""
        return self._run(size, READ_SECONDS)["read_gbs"]

    def units(self) -> dict[str, float]:
        """Gop/s of the multiply-add units this CPU and compiler have."""
        return self._run(0, PEAK_SECONDS)

    def _run(self, size: int, seconds: float) -> dict[str, float]:
        command = [str(self._program), str(self._threads), str(size), str(seconds)]
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        values: dict[str, float] = json.loads(output)
        return values


def fastest_int8(units: dict[str, float]) -> float:
    """Gop/s; a CPU without 8-bit units multiplies in float32."""
    return max(
        (rate for name, rate in units.items() if name.endswith("_gops")),
        default=units["fp32_gflops"],
    )
