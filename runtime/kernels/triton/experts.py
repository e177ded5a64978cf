"""All experts of a mixture at once: routed, multiplied, gated, multiplied, added up.

The experts' weights lie one behind the other, and a program of a GEMM takes up to 64 rows of one
of them, so that the number of launches and their grids do not depend on who was chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from qtool.runtime.kernels.backend import ExpertsOp, LinearOp, Rows
from qtool.runtime.kernels.triton.config import (
    BUCKETS,
    LONG_PROMPT,
    ExpertsShape,
    Tiles,
    bucket_of,
    select_experts_config,
)
from qtool.runtime.kernels.triton.launch import result_like
from qtool.runtime.kernels.triton.layout import PackedWeight, stack
from qtool.runtime.kernels.triton.linear import PackedLinear, Place
from qtool.runtime.kernels.triton.routing import Routed, combine, max_blocks, route

# Tiles of the two products: gate and up; down.
Pair = tuple[Tiles, Tiles]


class PackedExperts(ExpertsOp):
    """Experts whose linears are packed alike.

    Args:
        gate_up, down: an expert each, for which :func:`why_apart` finds nothing. Their weights
            move into common memory, and they go on working by themselves.
    """

    def __init__(
        self,
        gate_up: Sequence[PackedLinear],
        down: Sequence[PackedLinear],
        activation: str,
        top_k: int,
        place: Place,
    ) -> None:
        for linears in (gate_up, down):
            for linear, weight in zip(linears, stack([op.weight for op in linears]), strict=True):
                linear.weight = weight
                linear.kernel = f"{linear.kernel}, all experts at once"
        self._gate_up, self._down = gate_up[0], down[0]
        self._count, self._top_k, self._gelu = len(gate_up), top_k, activation != "silu"
        self._place = place
        self.configs: dict[int, Pair] = {}
        for bucket in (*BUCKETS, LONG_PROMPT):
            first, second = (
                select_experts_config(place.target, shape, bucket, place.table)
                for shape in self.shapes
            )
            self.choose(bucket, (first, second))

    @property
    def shapes(self) -> tuple[ExpertsShape, ExpertsShape]:
        """What decides about its tiles: gate and up; down."""
        up, down = (
            ExpertsShape(op.shape, self._count, self._top_k) for op in (self._gate_up, self._down)
        )
        return up, down

    def choose(self, bucket: int, pair: Pair) -> None:
        """Take these tiles for a bucket, and make room for them; not while serving."""
        self.configs[bucket] = pair
        if bucket == LONG_PROMPT:
            return
        for op, tiles in zip((self._gate_up, self._down), pair, strict=True):
            blocks = max_blocks(bucket * self._top_k, self._count, tiles.block_m)
            self._place.workspace.reserve(op.weight.padded[0], blocks * tiles.block_m, tiles)

    def __call__(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        up, down = self.configs[bucket_of(x.shape[0])]
        routing = route(chosen, self._count, up.block_m)
        hidden = self._hidden(x, up, Routed(*routing, self._top_k))
        if down.block_m != up.block_m:
            routing = route(chosen, self._count, down.block_m)
        slots, width = chosen.numel(), self._down.weight.shape[0]
        parts = torch.empty(slots, width, dtype=torch.float32, device=x.device)
        scales = weights.flatten()
        self._down.multiply(hidden, parts, down, Routed(*routing, scales=scales))
        return combine(parts, self._top_k)

    def _hidden(self, x: Tensor, tiles: Tiles, routed: Routed) -> Rows:
        """Gated products [T * top_k, width], for the second product."""
        slots, rows = x.shape[0] * self._top_k, self._gate_up.weight.shape[0]
        width = rows // 2 if self._gate_up.gates else rows
        out = result_like(x.new_empty(slots, 0), width, x.dtype)
        self._gate_up.multiply(x, out, tiles, routed)
        out = out.to(x.dtype)
        return out if self._gate_up.gates else self._down.gated(out, gelu=self._gelu)

    def warm_up(self) -> None:
        """Compile everything a call can need."""
        seen: set[Pair] = set()
        for tokens, pair in self.configs.items():
            if pair not in seen:
                seen.add(pair)
                self.idle_call(tokens)()

    def idle_call(self, tokens: int) -> Callable[[], object]:
        """So many rows of zeros through experts in turns, for warm-up and timing."""
        device, columns = self._gate_up.weight.words.device, self._gate_up.weight.shape[1]
        x = torch.zeros(tokens, columns, dtype=self._gate_up.dtype, device=device)
        chosen = torch.arange(tokens * self._top_k, device=device) % self._count
        chosen = chosen.view(tokens, self._top_k)
        weights = torch.ones(chosen.shape, device=device)
        return lambda: self(x, weights, chosen)


def why_apart(linears: Sequence[LinearOp]) -> str | None:
    """What keeps experts' linears from running at once, or ``None``."""
    forms = set()
    for linear in linears:
        if not isinstance(linear, PackedLinear):
            return f"an expert runs on {linear.kernel}"
        if reason := linear.why_alone():
            return reason
        forms.add(_form(linear.weight))
    return None if len(forms) == 1 else "experts are packed in different forms"


def _form(weight: PackedWeight) -> tuple[object, ...]:
    zeros = None if weight.zeros is None else weight.zeros.shape
    return weight.codes, weight.scheme, weight.gate_up, weight.shape, weight.words.shape, zeros
