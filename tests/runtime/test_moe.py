"""A mixture of experts against its formula, a token at a time."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from qtool.runtime.kernels.cpu.torch_ops import CpuBackend
from qtool.runtime.kernels.reference import ReferenceBackend
from qtool.runtime.layers import Mlp
from qtool.runtime.moe import MixtureOfExperts, SharedExpert

HIDDEN, WIDTH, EXPERTS = 24, 16, 5
CPU = torch.device("cpu")
BACKENDS = {
    "reference": ReferenceBackend(CPU, torch.float32),
    "cpu": CpuBackend(CPU, torch.float32),
}


def _weights(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) * shape[-1] ** -0.5

    return {
        "router": draw(EXPERTS, HIDDEN),
        "gate_up": draw(EXPERTS + 1, 2 * WIDTH, HIDDEN),
        "down": draw(EXPERTS + 1, HIDDEN, WIDTH),
        "gate": draw(1, HIDDEN),
    }


def _mixture(backend: str, top_k: int, normalize: bool, shared: bool) -> MixtureOfExperts:
    weights, ops = _weights(0), BACKENDS[backend]
    mlps = [
        Mlp(ops.linear(weights["gate_up"][i], None), ops.linear(weights["down"][i], None))
        for i in range(EXPERTS + 1)
    ]
    extra = SharedExpert(mlps[-1], ops.router(weights["gate"])) if shared else None
    experts = tuple(mlps[:-1])
    return MixtureOfExperts(ops.router(weights["router"]), experts, top_k, normalize, extra)


def _ref_mlp(x: Tensor, index: int) -> Tensor:
    gate, up = (_weights(0)["gate_up"][index].double() @ x).chunk(2)
    return _weights(0)["down"][index].double() @ (functional.silu(gate) * up)


def _ref_token(x: Tensor, top_k: int, normalize: bool, shared: bool) -> Tensor:
    x, weights = x.double(), _weights(0)
    shares = torch.softmax(weights["router"].double() @ x, 0)
    best = sorted(range(EXPERTS), key=lambda i: -float(shares[i]))[:top_k]
    total = sum(float(shares[i]) for i in best) if normalize else 1.0
    out = torch.zeros(HIDDEN, dtype=torch.float64)
    for i in best:
        out += _ref_mlp(x, i) * (shares[i] / total)
    if shared:
        out += _ref_mlp(x, EXPERTS) * torch.sigmoid(weights["gate"].double()[0] @ x)
    return out


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("top_k", "normalize", "shared"),
    [(1, False, False), (2, True, False), (3, False, True), (EXPERTS, True, True)],
)
def test_tokens_get_their_experts_by_the_formula(
    backend: str, top_k: int, normalize: bool, shared: bool
) -> None:
    x = torch.randn(37, HIDDEN, generator=torch.Generator().manual_seed(1))
    out = _mixture(backend, top_k, normalize, shared)(x, BACKENDS[backend])
    expected = torch.stack([_ref_token(row, top_k, normalize, shared) for row in x])
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


def test_a_token_has_the_same_bits_in_any_company() -> None:
    x = torch.randn(50, HIDDEN, generator=torch.Generator().manual_seed(2))
    mixture, backend = _mixture("reference", 2, True, True), BACKENDS["reference"]
    whole = mixture(x, backend)
    for size in (1, 7, 16, 33):
        assert torch.equal(mixture(x[:size], backend), whole[:size])
    order = torch.randperm(50, generator=torch.Generator().manual_seed(3))
    assert torch.equal(mixture(x[order], backend), whole[order])


def test_an_expert_without_tokens_is_not_run() -> None:
    mixture = _mixture("cpu", 1, True, False)
    x = torch.randn(1, HIDDEN, generator=torch.Generator().manual_seed(4))
    _, chosen = mixture.route(x)
    calls: list[int] = []

    class Counting:
        def __init__(self, number: int) -> None:
            self.number = number

        def __call__(self, x: Tensor, backend: object) -> Tensor:
            calls.append(self.number)
            return x

    experts = tuple(Counting(i) for i in range(EXPERTS))
    counted = MixtureOfExperts(mixture.router, experts, 1, True)  # type: ignore[arg-type]
    counted(x, BACKENDS["cpu"])
    assert calls == chosen.flatten().tolist()
