"""Mixtures of experts in the hub's shape: a linear for each projection of each expert.

Transformers 5 holds all experts of a block in two 3-D parameters, which no checkpoint has and no
hook sees. Here the module of experts is exchanged for one with linears under the names on disk,
so that the walk loads, observes and replaces them like any others.

Every expert runs on every token, and what the router did not choose counts nothing: each is
calibrated on all of the text, however rarely it is chosen, at ``experts / chosen`` times the
arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from qtool.calibration.families import ExpertNames, ModelFamily


class _Expert(nn.Module):
    """One gated MLP; its parameters are on meta until the walk loads them."""

    def __init__(
        self, names: ExpertNames, hidden: int, width: int, activation: Callable[[Tensor], Tensor]
    ) -> None:
        super().__init__()
        self._names, self._activation = names.projections, activation
        shapes = ((hidden, width), (hidden, width), (width, hidden))
        for name, (columns, rows) in zip(names.projections, shapes, strict=True):
            self.add_module(name, nn.Linear(columns, rows, bias=False, device="meta"))

    def forward(self, x: Tensor) -> Tensor:
        gate, up, down = (self.get_submodule(name) for name in self._names)
        output: Tensor = down(self._activation(gate(x)) * up(x))
        return output


class Experts(nn.ModuleList):
    """Takes the place of transformers' module of experts."""

    def forward(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """hidden [T, K], chosen and weights [T, top_k] -> [T, K]."""
        shares = hidden.new_zeros(len(hidden), len(self))
        shares = shares.scatter(1, chosen, weights.to(hidden.dtype))
        output = torch.zeros_like(hidden)
        for number, expert in enumerate(self):
            output += expert(hidden) * shares[:, number, None]
        return output


def use_hub_names(model: nn.Module, family: ModelFamily) -> None:
    """Give every block of a model on meta its experts as they lie on disk; others are left."""
    if family.experts is None:
        return
    for block in model.get_submodule(family.blocks).children():
        mixture = block.get_submodule(family.experts.in_memory)
        if not hasattr(mixture, "experts"):
            continue
        fused = mixture.get_submodule("experts")
        count, hidden, width = fused.get_parameter("down_proj").shape
        experts = (
            _Expert(family.experts, hidden, width, fused.get_submodule("act_fn"))
            for _ in range(count)
        )
        mixture.add_module("experts", Experts(experts))
        _rename(block, family.experts.in_memory, family.experts.module)


def _rename(block: nn.Module, old: str, new: str) -> None:
    """A child under another name; the block's own code still finds it by the old one."""
    if old == new:
        return
    child = block.get_submodule(old)
    delattr(block, old)
    block.add_module(new, child)
    # A plain attribute: a second registration would show its parameters twice.
    block.__dict__[old] = child
