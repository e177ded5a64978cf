"""Mixture of experts (Shazeer et al. 2017): a router sends every token to a few MLPs.

Tokens are sorted by expert, so that each expert runs once a step, over all rows it got; a back end
may run all of them at once. The order of a row's sum does not depend on other rows: that of the
experts' numbers, or all at once that of their weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qtool.runtime.kernels.backend import Backend, ExpertsOp, LinearOp, Rows
from qtool.runtime.layers import Mlp


@dataclass(frozen=True, slots=True)
class SharedExpert:
    """An expert that sees every token, behind a sigmoid gate of its own, hidden -> 1."""

    mlp: Mlp
    gate: LinearOp

    def __call__(self, x: Tensor, backend: Backend) -> Tensor:
        """x [T, hidden] -> float32 [T, hidden]."""
        # Not torch.sigmoid: its bits depend on a value's place in a vector of 8 or 16.
        share = 1 / (1 + torch.exp(-self.gate(x.float())))
        return share * self.mlp(x, backend).float()


@dataclass(frozen=True, slots=True)
class MixtureOfExperts:
    """Routed experts and, in some families, a shared one.

    Attributes:
        router: hidden -> experts, in float32.
        top_k: experts a token goes to.
        normalize: whether their weights are made to sum to one.
        together: the routed experts as one operation, where the back end has one.
    """

    router: LinearOp
    experts: tuple[Mlp, ...]
    top_k: int
    normalize: bool
    shared: SharedExpert | None = None
    together: ExpertsOp | None = None

    @property
    def reader(self) -> None:
        """Its router and its experts read its input."""
        return

    def __call__(self, x: Rows, backend: Backend) -> Tensor:
        """x [T, hidden] -> [T, hidden]."""
        assert isinstance(x, Tensor), "rounded for another linear"
        weights, chosen = self.route(x)
        if self.together is not None:
            out = self.together(x, weights, chosen)
        else:
            out = self._one_by_one(x, weights, chosen, backend)
        if self.shared is not None:
            out += self.shared(x, backend)
        return out.to(x.dtype)

    def _one_by_one(self, x: Tensor, weights: Tensor, chosen: Tensor, backend: Backend) -> Tensor:
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        order = chosen.flatten().argsort(stable=True)
        counts = chosen.flatten().bincount(minlength=len(self.experts)).tolist()
        for expert, places in zip(self.experts, order.split(counts), strict=True):
            if len(places):
                rows = places // self.top_k
                part = expert(x[rows], backend).float() * weights.flatten()[places].unsqueeze(1)
                out.index_add_(0, rows, part)
        return out

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Weights, float32, and numbers, int64, of each token's experts; both [T, top_k]."""
        shares = torch.softmax(self.router(x.float()), dim=-1)
        weights, chosen = shares.topk(self.top_k, dim=-1)
        if self.normalize:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return weights, chosen
