"""The back end's choices, and whole tiny decoders through it, in the interpreter."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from qtool.errors import UsageError
from qtool.formats.scheme import (
    ActivationScheme,
    WeightScheme,
    fp8_scheme,
    w8a8_scheme,
    weight_scheme,
)
from qtool.quantize.options import QuantizeOptions
from qtool.quantize.pipeline import quantize_model
from qtool.runtime.kernels import select_backend
from qtool.runtime.kernels.reference import ReferenceBackend
from qtool.runtime.loaded_model import load_model
from qtool.runtime.model import Decoder
from qtool.runtime.options import ModelOptions
from qtool.runtime.scheduler import Chunk
from support.batches import batch_of, make_cache, make_sequence, run_whole
from support.gemm import make_input, make_weight, relative_error

pytest.importorskip("triton")
from qtool.runtime.kernels.triton import linear as linears
from qtool.runtime.kernels.triton.backend import TritonBackend
from qtool.runtime.kernels.triton.target import sample_target

CPU = torch.device("cpu")
# Rounding inputs is the reference's to the bit, and so are weights; sums differ in their order
# and results are rounded once.
LAYER_BOUND = {torch.float16: 4e-4, torch.bfloat16: 3e-3}


def _backend(arch: str, dtype: torch.dtype) -> TritonBackend:
    return TritonBackend(CPU, dtype, sample_target(arch))


LAYERS = (
    weight_scheme(4, False, 64),
    weight_scheme(8, True, None),
    w8a8_scheme(),
    w8a8_scheme(static=True),
    fp8_scheme("channel"),
    fp8_scheme("tensor"),
    fp8_scheme("block"),
    fp8_scheme(weight_only=True),
)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "gfx942"])
@pytest.mark.parametrize("dtype", LAYER_BOUND, ids=str)
@pytest.mark.parametrize("scheme", LAYERS, ids=WeightScheme.describe)
def test_a_layer_is_the_references(scheme: WeightScheme, dtype: torch.dtype, arch: str) -> None:
    weight = make_weight(scheme, 70, 256, input_scale=0.02 if scheme.has_input_scale else None)
    bias = make_input(1, 70, torch.float32)[0]
    ours = _backend(arch, dtype).linear(weight, bias)
    theirs = ReferenceBackend(CPU, torch.float32).linear(weight, bias)
    x = make_input(5, 256, dtype)
    out = ours(x)
    assert out.dtype == dtype
    assert relative_error(out, theirs(x.float()).double()) < LAYER_BOUND[dtype]


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize("scheme", LAYERS, ids=WeightScheme.describe)
def test_a_gate_and_its_up_projection_are_gated_in_the_products_end(
    scheme: WeightScheme, arch: str
) -> None:
    weight = make_weight(scheme, 160, 256, input_scale=0.02 if scheme.has_input_scale else None)
    bias = make_input(1, 160, torch.float32)[0]
    ours = _backend(arch, torch.float16).gate_up(weight, bias, "silu")
    reference = ReferenceBackend(CPU, torch.float32)
    theirs = reference.gate_up(weight, bias, "silu")
    x = make_input(5, 256, torch.float16)
    expected = reference.silu_mul(theirs(x.float()))
    assert ours.gates == (scheme.strategy != "block")
    if not ours.gates:
        return
    assert relative_error(ours(x), expected.double()) < 1e-3
    assert isinstance(ours, linears.PackedLinear)
    if scheme.type == "int" and scheme.activations is None:
        ours.configs[8] = None
        assert relative_error(ours(x), expected.double()) < 2e-3


def test_other_activations_and_odd_widths_are_not_gated() -> None:
    backend = _backend("sm_90", torch.float16)
    assert not backend.gate_up(make_weight(LAYERS[0], 160, 128), None, "gelu_tanh").gates
    assert not backend.gate_up(make_weight(LAYERS[0], 72, 128), None, "silu").gates


def test_long_prompts_dequantize_and_multiply_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linears, "LONG_PROMPT", 1025)
    for scheme in (LAYERS[0], LAYERS[4]):
        layer = _backend("sm_80", torch.float16).linear(make_weight(scheme, 64, 128), None)
        assert isinstance(layer, linears.PackedLinear) and layer.configs[1025] is None
        x = make_input(3, 128, torch.float16)
        in_tiles = layer(x)
        layer.configs[8] = None
        torch.testing.assert_close(layer(x), in_tiles, rtol=5e-3, atol=5e-3)


def test_quantized_weights_stay_packed_and_what_cannot_says_why() -> None:
    backend = _backend("sm_80", torch.float16)
    packed = backend.linear(make_weight(LAYERS[0], 256, 512), None)
    assert packed.kernel == "triton int4 x float16"
    assert packed.num_bytes < 0.6 * 256 * 512
    odd = backend.linear(make_weight(weight_scheme(4, False, 48), 64, 96), None)
    assert odd.kernel == "torch linear, held dense: groups of 48 are not made of 32s"
    blocks = make_weight(fp8_scheme("block"), 128, 128)
    for arch in ("sm_80", "sm_89"):
        kernel = _backend(arch, torch.float16).linear(blocks, None).kernel
        assert kernel == "triton FP8 x FP8, inputs per group"
    wide = _backend("sm_90", torch.float32).linear(make_weight(LAYERS[0], 64, 128), None)
    assert wide.kernel.endswith("held dense: computing in torch.float32")


def test_memory_for_splits_is_reserved_at_load_and_stays() -> None:
    backend = _backend("sm_90", torch.float16)
    layer = backend.linear(make_weight(weight_scheme(4, False, 32), 64, 1024), None)
    workspace = backend._place.workspace
    assert workspace.partials.numel() > 0
    before = workspace.partials.data_ptr(), workspace.locks.data_ptr()
    for tokens in (1, 20):
        layer(make_input(tokens, 1024, torch.float16))
    assert (workspace.partials.data_ptr(), workspace.locks.data_ptr()) == before


class _Recorder:
    """In a kernel's place: remembers what would be compiled, computes nothing."""

    def __init__(self) -> None:
        self.forms: set[tuple[Any, ...]] = set()

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, **constants: Any) -> None:
            # Tensors count by dtype and alignment; M is not specialized on, other integers are.
            kinds = [
                (a.dtype, a.data_ptr() % 16 == 0) if isinstance(a, Tensor) else a for a in args
            ]
            kinds[-3] = "M"
            self.forms.add((*kinds, *sorted((k, str(v)) for k, v in constants.items())))

        return launch


def _zeros_rounded(
    x: Tensor, scheme: ActivationScheme, columns: int, **_: Any
) -> linears.RoundedRows:
    """What rounding zeros gives, without the interpreter."""
    kind = torch.int8 if scheme.type == "int" else torch.float8_e4m3fn
    return linears.RoundedRows(
        torch.zeros(len(x), columns, dtype=torch.uint8).view(kind), torch.ones(len(x))
    )


@pytest.mark.parametrize("scheme", [LAYERS[0], LAYERS[2], LAYERS[5]], ids=WeightScheme.describe)
def test_nothing_is_compiled_after_warm_up(
    scheme: WeightScheme, monkeypatch: pytest.MonkeyPatch
) -> None:
    from qtool.runtime.kernels.triton import byte_gemm, weight_gemm

    recorder = _Recorder()
    monkeypatch.setattr(weight_gemm, "weight_gemm_kernel", recorder)
    monkeypatch.setattr(byte_gemm, "byte_gemm_kernel", recorder)
    monkeypatch.setattr(linears, "round_input", _zeros_rounded)
    backend = _backend("sm_90", torch.float16)
    scale = 0.02 if scheme.has_input_scale else None
    layer = backend.linear(make_weight(scheme, 128, 1024, input_scale=scale), None)
    assert isinstance(layer, linears.PackedLinear)
    tokens = list(layer.warm_up_tokens())
    for count in tokens:
        layer(torch.zeros(min(count, 1024), 1024, dtype=torch.float16))
    compiled = set(recorder.forms)
    for count in (1, 2, 7, 8, 9, 15, 16, 17, 31, 33, 48, 64, 65, 100, 129, 500, 777, 1024):
        layer(torch.zeros(count, 1024, dtype=torch.float16))
    assert recorder.forms == compiled


def test_the_back_end_needs_a_gpu_or_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    from qtool.runtime.kernels.triton import launch

    chosen = select_backend("triton", CPU, torch.float16)
    assert isinstance(chosen.backend, TritonBackend) and not chosen.notes
    monkeypatch.setattr(launch, "is_interpreted", lambda: False)
    with pytest.raises(UsageError, match="backend triton on device cpu: it needs a GPU"):
        select_backend("triton", CPU, torch.float16)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(UsageError, match="triton is not installed"):
        select_backend("triton", CPU, torch.float16)


# Weights alone are exact in both; where inputs are rounded, a sum's last bit may move a code.
DECODERS: dict[str, tuple[dict[str, Any], float]] = {
    "W4 asym g32": ({"method": "rtn", "group_size": 32}, 0.004),
    "W8 sym row": ({"method": "rtn", "bits": 8, "group_size": "row"}, 0.004),
    "W8A8": ({"method": "rtn", "layers": ("re:.*=w8a8",), "symmetric": True}, 0.04),
    "FP8": ({"method": "fp8"}, 0.08),
}


@pytest.fixture(scope="module")
def source(model_factory: Callable[..., Path]) -> Iterator[Path]:
    yield model_factory(dtype=torch.float16)


def _greedy(decoder: Decoder, prompt: list[int], count: int) -> list[int]:
    """Tokens chosen one after another, over the cache."""
    sequence, cache = make_sequence(prompt, 1), make_cache(decoder)
    sequence.block_table = [1, 3, 5, 7]
    logits = decoder.forward(batch_of(Chunk(sequence, 0, len(prompt))), cache)
    tokens = [int(logits[-1].argmax())]
    while len(tokens) < count:
        sequence.append(tokens[-1])
        step = batch_of(Chunk(sequence, len(prompt) + len(tokens) - 1, 1))
        tokens.append(int(decoder.forward(step, cache)[-1].argmax()))
    return tokens


@pytest.mark.parametrize("case", DECODERS)
def test_a_whole_decoder_computes_what_the_reference_does(
    case: str, source: Path, tmp_path: Path
) -> None:
    options, bound = DECODERS[case]
    quantize_model(
        source, tmp_path / "q", QuantizeOptions(samples=2, seq_len=32, device="cpu", **options)
    )
    ids = torch.randint(0, 384, (16,), generator=torch.Generator().manual_seed(4)).tolist()
    ours, theirs = (
        load_model(
            tmp_path / "q",
            ModelOptions(device="cpu", backend=backend, dtype="fp16", self_check=False),
        ).decoder
        for backend in ("triton", "reference")
    )
    packed = [op for op in ours.linears.values() if isinstance(op, linears.PackedLinear)]
    assert len(packed) == 8, "q, k, v; o; gate, up; down of two layers"
    found, expected = run_whole(ours, ids), run_whole(theirs, ids)
    assert relative_error(found, expected.double()) < bound
    agreeing = (found.argmax(-1) == expected.argmax(-1)).float().mean()
    assert agreeing >= 0.85
    if case != "FP8":  # its rounded inputs decide near ties of random weights either way
        assert _greedy(ours, ids[:6], 4) == _greedy(theirs, ids[:6], 4)
