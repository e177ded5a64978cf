"""All experts of a mixture at once against the reference's, one after another."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from qtool.formats.scheme import WeightScheme, fp8_scheme, w8a8_scheme, weight_scheme
from qtool.formats.tensor import QuantizedTensor
from qtool.quantize.options import QuantizeOptions
from qtool.quantize.pipeline import quantize_model
from qtool.quantize.rtn import quantize_rtn
from qtool.runtime.kernels.backend import Backend, ExpertsOp
from qtool.runtime.kernels.reference import ReferenceBackend
from qtool.runtime.layers import Mlp
from qtool.runtime.loaded_model import load_model
from qtool.runtime.moe import MixtureOfExperts
from qtool.runtime.options import ModelOptions
from support.batches import run_whole
from support.families import FAMILY_VARIANTS
from support.gemm import fenced, make_input, relative_error

pytest.importorskip("triton")
from qtool.runtime.kernels.triton.backend import TritonBackend
from qtool.runtime.kernels.triton.config import (
    BUCKETS,
    LONG_PROMPT,
    ExpertsShape,
    Tiles,
    select_experts_config,
    shape_of,
)
from qtool.runtime.kernels.triton.experts import PackedExperts, why_apart
from qtool.runtime.kernels.triton.launch import Workspace
from qtool.runtime.kernels.triton.layout import stack, unpack
from qtool.runtime.kernels.triton.linear import PackedLinear
from qtool.runtime.kernels.triton.routing import Routed, route
from qtool.runtime.kernels.triton.target import sample_target
from qtool.runtime.kernels.triton.weight_gemm import weight_gemm

CPU = torch.device("cpu")
HIDDEN, WIDTH, EXPERTS = 128, 128, 5
SCHEMES = (
    weight_scheme(4, False, 64),
    weight_scheme(4, True, 32),
    weight_scheme(4, False, None),
    weight_scheme(8, True, None),
    fp8_scheme(weight_only=True),
    w8a8_scheme(),
    fp8_scheme("channel"),
    fp8_scheme("block"),
)
# GPUs differ in how they multiply e4m3.
CASES = [(s, "sm_90") for s in SCHEMES] + [(s, "sm_80") for s in SCHEMES[-2:]]
ROUTES: dict[str, Callable[[], Tensor]] = {
    "two experts without tokens": lambda: (
        torch.rand(11, EXPERTS - 2, generator=_seeded(2)).topk(2).indices + 1
    ),
    "one for all": lambda: torch.tensor([[2, 0]]).repeat(9, 1),
}


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _weights(scheme: WeightScheme, rows: int, columns: int) -> list[QuantizedTensor]:
    """One an expert, all different."""
    return [
        quantize_rtn(
            torch.randn(rows, columns, generator=_seeded(expert)) * columns**-0.5,
            scheme,
            torch.bfloat16,
            None,
            None,
        )
        for expert in range(EXPERTS)
    ]


def _mlps(backend: Backend, scheme: WeightScheme, activation: str) -> list[Mlp]:
    up, down = _weights(scheme, 2 * WIDTH, HIDDEN), _weights(scheme, HIDDEN, WIDTH)
    return [
        Mlp(backend.gate_up(u, None, activation), backend.linear(d, None), activation)  # type: ignore[arg-type]
        for u, d in zip(up, down, strict=True)
    ]


def _together(backend: Backend, mlps: list[Mlp], activation: str = "silu") -> ExpertsOp | None:
    ups, downs = [m.gate_up for m in mlps], [m.down for m in mlps]
    return backend.experts(ups, downs, activation, 2)


def _one_by_one(backend: Backend, mlps: list[Mlp], x: Tensor, w: Tensor, chosen: Tensor) -> Tensor:
    out = torch.zeros(x.shape, dtype=torch.float64)
    for token in range(len(x)):
        for share, expert in zip(w[token], chosen[token].tolist(), strict=True):
            out[token] += share.double() * mlps[expert](x[token : token + 1], backend)[0].double()
    return out


@pytest.mark.parametrize(
    ("scheme", "arch"), CASES, ids=[f"{s.describe()}, {arch}" for s, arch in CASES]
)
def test_experts_at_once_are_the_references_one_by_one(scheme: WeightScheme, arch: str) -> None:
    backend = TritonBackend(CPU, torch.float16, sample_target(arch))
    reference = ReferenceBackend(CPU, torch.float32)
    together = _together(backend, _mlps(backend, scheme, "silu"))
    assert together is not None
    mlps = _mlps(reference, scheme, "silu")
    # Where what is between the products is rounded to 8 bits, a last bit may move a code.
    bound = 2e-3 if scheme.activations is None else 2e-2
    for number, draw in enumerate(ROUTES.values()):
        chosen = draw()
        x = fenced(make_input(len(chosen), HIDDEN, torch.float16))
        w = torch.rand(chosen.shape, generator=_seeded(number))
        found = together(x, w, chosen)
        assert found.dtype == torch.float32
        assert relative_error(found, _one_by_one(reference, mlps, x.float(), w, chosen)) < bound


def test_other_activations_and_bfloat16_too() -> None:
    backend = TritonBackend(CPU, torch.bfloat16, sample_target("sm_90"))
    reference = ReferenceBackend(CPU, torch.float32)
    together = _together(backend, _mlps(backend, SCHEMES[0], "gelu_tanh"), "gelu_tanh")
    assert together is not None
    chosen = ROUTES["one for all"]()
    x, w = make_input(len(chosen), HIDDEN, torch.bfloat16), torch.full(chosen.shape, 0.5)
    expected = _one_by_one(
        reference, _mlps(reference, SCHEMES[0], "gelu_tanh"), x.float(), w, chosen
    )
    assert relative_error(together(x, w, chosen), expected) < 1e-2


def test_a_token_has_the_same_bits_in_any_company_of_its_bucket() -> None:
    backend = TritonBackend(CPU, torch.float16, sample_target("sm_90"))
    together = _together(backend, _mlps(backend, SCHEMES[0], "silu"))
    assert together is not None
    x, w = make_input(8, HIDDEN, torch.float16), torch.rand(8, 2, generator=_seeded(0))
    chosen = torch.rand(8, EXPERTS, generator=_seeded(5)).topk(2).indices
    whole = together(x, w, chosen)
    for token in (0, 7):
        one = slice(token, token + 1)
        assert torch.equal(together(x[one], w[one], chosen[one])[0], whole[token])
    order = torch.randperm(8, generator=_seeded(6))
    assert torch.equal(together(x[order], w[order], chosen[order]), whole[order])


def test_common_memory_holds_every_expert_as_it_was() -> None:
    backend = TritonBackend(CPU, torch.float16, sample_target("sm_90"))
    originals = _weights(SCHEMES[2], 2 * WIDTH, HIDDEN)
    ops = [backend.linear(weight, None) for weight in originals]
    packed = [op.weight for op in ops if isinstance(op, PackedLinear)]
    stacked = stack(packed)
    for index, (weight, original) in enumerate(zip(stacked, originals, strict=True)):
        offset = weight.words.data_ptr() - stacked[0].words.data_ptr()
        assert offset == index * weight.words.nbytes
        assert torch.equal(unpack(weight).dequantize(), original.dequantize())


def test_what_experts_cannot_share_is_run_one_by_one() -> None:
    backend = TritonBackend(CPU, torch.float16, sample_target("sm_90"))
    plain = [backend.linear(torch.ones(64, 64), None) for _ in range(2)]
    assert why_apart(plain) == "an expert runs on torch linear"
    weights = _weights(SCHEMES[0], 64, HIDDEN)
    biased = [backend.linear(weight, torch.ones(64)) for weight in weights[:2]]
    assert why_apart(biased) == "it has a bias"
    mixed = [
        backend.linear(weights[0], None),
        backend.linear(_weights(SCHEMES[1], 64, 256)[0], None),
    ]
    assert why_apart(mixed) == "experts are packed in different forms"
    assert backend.experts(plain, plain, "silu", 2) is None
    assert all("one expert after another: an expert runs on" in op.obstacle for op in plain)
    assert ReferenceBackend(CPU, torch.float32).experts(plain, plain, "silu", 2) is None


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "gfx942"])
@pytest.mark.parametrize("experts", [8, 128])
def test_tiles_have_the_rows_that_an_expert_has_on_average(arch: str, experts: int) -> None:
    backend = TritonBackend(CPU, torch.float16, sample_target("sm_90"))
    op = backend.linear(_weights(SCHEMES[0], 2 * WIDTH, HIDDEN)[0], None)
    assert isinstance(op, PackedLinear)
    target, shape = sample_target(arch), ExpertsShape(shape_of(op.weight), experts, top_k=8)
    few, many = (select_experts_config(target, shape, tokens) for tokens in (1, 64 * 1024))
    assert few.block_m == (8 if target.is_nvidia else 16)
    assert few.block_m < many.block_m <= 64 and many.splits == 1


def test_workspace_is_large_enough_for_every_bucket() -> None:
    backend = TritonBackend(CPU, torch.float16, sample_target("sm_90"))
    together = _together(backend, _mlps(backend, SCHEMES[0], "silu"))
    assert isinstance(together, PackedExperts) and backend.packed == ()
    assert set(together.configs) == {*BUCKETS, LONG_PROMPT}
    assert all(tiles.splits == 1 for tiles in together.configs[LONG_PROMPT])
    workspace = backend._place.workspace
    before = workspace.partials.data_ptr(), workspace.locks.data_ptr()
    for tokens in (1, 9):
        chosen = torch.arange(2 * tokens).view(tokens, 2) % EXPERTS
        together(make_input(tokens, HIDDEN, torch.float16), torch.ones(tokens, 2), chosen)
    assert (workspace.partials.data_ptr(), workspace.locks.data_ptr()) == before
    assert not workspace.locks.any()


def test_experts_share_columns_and_add_them_in_order() -> None:
    backend = TritonBackend(CPU, torch.float16, sample_target("sm_90"))
    weights = _weights(SCHEMES[1], 64, 256)
    ops = [backend.linear(weight, None) for weight in weights]
    packed = stack([op.weight for op in ops if isinstance(op, PackedLinear)])
    chosen = torch.tensor([[1, 4], [1, 0], [4, 1]])
    tiles, workspace = Tiles(8, 64, 2, 3, splits=2), Workspace.on(CPU)
    routed = Routed(*route(chosen, EXPERTS, 8), slots_per_row=2, scales=torch.arange(1.0, 7.0))
    workspace.reserve(64, 8 * routed.blocks.shape[1], tiles)
    workspace.partials.fill_(torch.nan)
    x, out = make_input(3, 256, torch.float16), torch.full((6, 64), torch.nan)
    weight_gemm(x, packed[0], out, tiles, workspace, routed=routed, asm=True)
    for slot, expert in enumerate(chosen.flatten().tolist()):
        dense = weights[expert].dequantize().double()
        exact = (slot + 1) * (dense @ x[slot // 2].double())
        assert relative_error(out[slot], exact) < 1e-6
    assert not workspace.locks.any()


def test_a_whole_mixture_computes_what_the_reference_does(
    model_factory: Callable[..., Path], tmp_path: Path
) -> None:
    source = model_factory(dtype=torch.float16, **FAMILY_VARIANTS["mixtral"])
    options = QuantizeOptions(method="rtn", group_size=32, samples=2, seq_len=32, device="cpu")
    quantize_model(source, tmp_path / "q", options)
    ours, theirs = (
        load_model(
            tmp_path / "q",
            ModelOptions(device="cpu", backend=backend, dtype="fp16", self_check=False),
        ).decoder
        for backend in ("triton", "reference")
    )
    mixtures = [layer.mlp for layer in ours.layers]
    assert all(isinstance(m, MixtureOfExperts) and m.together for m in mixtures)
    kernels = {op.kernel for name, op in ours.linears.items() if "experts." in name}
    assert kernels == {"triton int4 x float16, all experts at once"}
    ids = torch.randint(0, 384, (12,), generator=_seeded(4)).tolist()
    found, expected = run_whole(ours, ids), run_whole(theirs, ids)
    errors = (found - expected).norm(dim=1) / expected.norm(dim=1)
    assert float(errors.median()) < 0.002, "near ties of a random router may fall either way"
