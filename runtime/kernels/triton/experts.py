"""All experts of a mixture at once: routed, multiplied, gated, multiplied, added up.

The experts' weights lie one behind the other, and a program of a GEMM takes up to 64 rows of one
of them, so that the number of launches and their grids do not depend on who was chosen.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from qtool.runtime.kernels.backend import ExpertsOp, LinearOp
from qtool.runtime.kernels.triton.config import (
    BUCKETS,
    LONG_PROMPT,
    Tiles,
    bucket_of,
    select_experts_config,
    shape_of,
)
from qtool.runtime.kernels.triton.gated import gated
from qtool.runtime.kernels.triton.layout import PackedWeight, stack
from qtool.runtime.kernels.triton.linear import PackedLinear, Place, result_like
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
        self.configs = {bucket: self._choose(bucket) for bucket in (*BUCKETS, LONG_PROMPT)}

    def _choose(self, bucket: int) -> Pair:
        """Tiles for a bucket of tokens, with room for their splits."""
        target, slots = self._place.target, bucket * self._top_k
        up, down = (
            select_experts_config(target, shape_of(op.weight), slots, self._count)
            for op in (self._gate_up, self._down)
        )
        if bucket == LONG_PROMPT:
            return up.unsplit(), down.unsplit()
        for op, tiles in ((self._gate_up, up), (self._down, down)):
            blocks = max_blocks(slots, self._count, tiles.block_m)
            self._place.workspace.reserve(op.weight.padded[0], blocks * tiles.block_m, tiles)
        return up, down

    def __call__(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        up, down = self.configs[bucket_of(x.shape[0])]
        routing = route(chosen, self._count, up.block_m)
        hidden = self._hidden(x, up, Routed(*routing, self._top_k))
        if down.block_m != up.block_m:
            routing = route(chosen, self._count, down.block_m)
        parts = hidden.new_empty(len(hidden), self._down.weight.shape[0], dtype=torch.float32)
        scales = weights.flatten()
        self._down.multiply(hidden, parts, down, Routed(*routing, scales=scales))
        return combine(parts, self._top_k)

    def _hidden(self, x: Tensor, tiles: Tiles, routed: Routed) -> Tensor:
        """Gated products [T * top_k, width] in x's dtype."""
        slots, rows = x.shape[0] * self._top_k, self._gate_up.weight.shape[0]
        width = rows // 2 if self._gate_up.gates else rows
        out = result_like(x.new_empty(slots, 0), width, x.dtype)
        self._gate_up.multiply(x, out, tiles, routed)
        if not self._gate_up.gates:
            both, out = out, result_like(out, rows // 2, x.dtype)
            gated(both, out, gelu=self._gelu)
        return out.to(x.dtype)

    def warm_up(self) -> None:
        """Compile everything a call can need."""
        device, columns = self._gate_up.weight.words.device, self._gate_up.weight.shape[1]
        seen: set[Pair] = set()
        for tokens, pair in self.configs.items():
            if pair not in seen:
                seen.add(pair)
                x = torch.zeros(tokens, columns, dtype=self._gate_up.dtype, device=device)
                chosen = torch.arange(tokens * self._top_k, device=device) % self._count
                chosen = chosen.view(tokens, self._top_k)
                self(x, torch.ones(chosen.shape, device=device), chosen)


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
