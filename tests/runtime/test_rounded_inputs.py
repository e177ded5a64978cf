"""W8A8 and FP8 folders: the input really is rounded, as transformers rounds it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from qtool.formats.checkpoint import CheckpointReader
from qtool.formats.scheme import WeightScheme, fp8_scheme, w8a8_scheme
from qtool.quantize.options import QuantizeOptions
from qtool.quantize.pipeline import quantize_model
from qtool.quantize.rtn import quantize_rtn
from qtool.runtime.kernels.reference import ReferenceBackend
from qtool.runtime.loaded_model import load_model
from qtool.runtime.options import ModelOptions
from support.batches import run_whole

# Ties between two INT8 codes fall either way in two float32 programs; each moves its row a step.
CASES: dict[str, tuple[dict[str, Any], float]] = {
    "W8A8 channel, dynamic": ({"method": "smoothquant"}, 0.02),
    "W8A8 channel, static": ({"method": "smoothquant", "activations": "static"}, 0.02),
    "FP8 channel, dynamic": ({"method": "fp8"}, 0.02),
    "FP8 tensor, static": ({"method": "fp8", "granularity": "tensor"}, 0.02),
    "FP8 block, dynamic": ({"method": "fp8", "granularity": "block"}, 0.02),
    "FP8 weight-only channel": ({"method": "fp8", "weight_only": True}, 1e-4),
}


@pytest.fixture(scope="module")
def source(model_factory: Callable[..., Path]) -> Path:
    # Rows that the reference package's groups of 128 divide.
    return model_factory(hidden_size=128, intermediate_size=256)


def _quantized(source: Path, out: Path, **options: Any) -> Path:
    quantize_model(source, out, QuantizeOptions(samples=4, seq_len=64, device="cpu", **options))
    return out


def _ids() -> list[int]:
    return torch.randint(0, 384, (60,), generator=torch.Generator().manual_seed(4)).tolist()


def _relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_transformers_computes_the_same_logits(
    case: str, backend: str, source: Path, tmp_path: Path
) -> None:
    transformers_logging.set_verbosity_error()  # it reports input scales it then uses
    options, bound = CASES[case]
    folder = _quantized(source, tmp_path / "q", **options)
    loaded = load_model(folder, ModelOptions(device="cpu", backend=backend))
    assert loaded.quantization == case
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        expected = model(torch.tensor([_ids()])).logits[0]
    assert _relative(run_whole(loaded.decoder, _ids()), expected) < bound


@pytest.mark.parametrize("case", [case for case in CASES if "weight-only" not in case])
def test_rounding_the_inputs_shows_in_the_logits_and_in_the_load_plan(
    case: str, source: Path, tmp_path: Path
) -> None:
    folder = _quantized(source, tmp_path / "q", **CASES[case][0])
    exact = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    with torch.inference_mode():
        expected = exact(torch.tensor([_ids()])).logits[0]
    decoder = load_model(folder, ModelOptions(device="cpu", backend="reference")).decoder
    assert 0.005 < _relative(run_whole(decoder, _ids()), expected) < 0.4
    kernels = {op.kernel for name, op in decoder.linears.items() if name != "lm_head"}
    kind = "FP8" if "FP8" in case else "INT8"
    way = {"tensor, static": "static", "channel, static": "static"}.get(case.split(" ", 1)[1])
    way = way or ("per group" if "block" in case else "per token")
    assert kernels == {f"torch float32, row tiles, {kind} inputs {way}"}


@pytest.mark.parametrize(
    "scheme",
    [
        w8a8_scheme(),
        w8a8_scheme(static=True),
        fp8_scheme("tensor"),
        fp8_scheme(),
        fp8_scheme("block"),
    ],
    ids=WeightScheme.describe,
)
def test_the_product_is_that_of_codes_and_scales_in_float64(scheme: WeightScheme) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, x = torch.randn(70, 200, generator=generator), torch.randn(19, 200, generator=generator)
    bias = torch.randn(70, generator=generator)
    inputs = torch.tensor([0.02]) if scheme.has_input_scale else None
    tensor = quantize_rtn(weight, scheme, torch.float32, None, inputs)
    operation = ReferenceBackend(torch.device("cpu"), torch.float32).linear(tensor, bias)
    rounded = _ref_round(x, scheme, inputs)
    expected = rounded @ tensor.dequantize().double().T + bias.double()
    torch.testing.assert_close(operation(x).double(), expected, rtol=1e-5, atol=1e-5)
    assert operation(x.bfloat16()).dtype == torch.bfloat16
    # A row in any company has the same bits.
    assert torch.equal(operation(x)[7:8], operation(x[7:8]))


def _ref_round(x: Tensor, scheme: WeightScheme, static: Tensor | None) -> Tensor:
    assert scheme.activations is not None
    width = 128 if scheme.activations.strategy == "group" else x.shape[1]
    out = torch.empty(x.shape, dtype=torch.float64)
    for start in range(0, x.shape[1], width):
        part = x[:, start : start + width]
        is_int = scheme.activations.type == "int"
        scale = part.abs().amax(1, keepdim=True) / (127.5 if is_int else 448)
        scale = scale if static is None else static
        steps = part / scale
        if is_int:
            codes = steps.round().clamp(-128, 127)
        else:
            codes = steps.clamp(-448, 448).to(torch.float8_e4m3fn)
        out[:, start : start + width] = codes.double() * scale.double()
    return out


def test_other_input_scales_or_ragged_blocks_run_side_by_side(tmp_path: Path) -> None:
    from qtool.runtime.kernels.backend import SideBySide
    from support.models import make_model

    # 96 query and 32 key rows: blocks of 128 do not stack.
    source = make_model(tmp_path / "m", hidden_size=96, heads=6, kv_heads=2, intermediate_size=96)
    for granularity in ("tensor", "block"):
        out = _quantized(source, tmp_path / granularity, method="fp8", granularity=granularity)
        decoder = load_model(out, ModelOptions(device="cpu", backend="reference")).decoder
        assert isinstance(decoder.layers[0].attention.qkv, SideBySide)
        assert run_whole(decoder, _ids()).isfinite().all()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("tie", [True, False])
def test_a_quantized_head_is_untied_and_the_embedding_stays(
    bits: int, tie: bool, model_factory: Callable[..., Path], tmp_path: Path
) -> None:
    source = model_factory(tie=tie)
    out = _quantized(source, tmp_path / "q", method="rtn", lm_head=bits)
    with CheckpointReader(source) as before, CheckpointReader(out) as after:
        assert after.config["tie_word_embeddings"] is False
        assert "lm_head" not in after.config["quantization_config"]["ignore"]
        embedding = "model.embed_tokens.weight"
        assert torch.equal(before.get(embedding), after.get(embedding))
        assert "lm_head.weight" not in after and "lm_head.weight_packed" in after
    loaded = load_model(out, ModelOptions(device="cpu", backend="reference"))
    assert loaded.schemes["lm_head"].bits == bits
    plain = load_model(
        _quantized(source, tmp_path / "plain", method="rtn"),
        ModelOptions(device="cpu", backend="reference"),
    )
    error = _relative(run_whole(loaded.decoder, _ids()), run_whole(plain.decoder, _ids()))
    assert 0 < error < (0.2 if bits == 4 else 0.01)


def test_linears_of_one_model_may_differ_and_transformers_agrees(
    source: Path, tmp_path: Path
) -> None:
    layers = ("down_proj=w8a8", "o_proj=fp8", "layers.1.mlp=w8-row")
    folder = _quantized(source, tmp_path / "q", method="rtn", symmetric=True, layers=layers)
    with CheckpointReader(folder) as reader:
        assert reader.config["quantization_config"]["format"] == "mixed-precision"
    loaded = load_model(folder, ModelOptions(device="cpu", backend="reference"))
    found = {name: scheme.describe() for name, scheme in loaded.schemes.items()}
    assert found["model.layers.0.self_attn.q_proj"] == "W4 sym g128"
    assert found["model.layers.0.self_attn.o_proj"] == "FP8 channel, dynamic"
    assert found["model.layers.0.mlp.down_proj"] == "W8A8 channel, dynamic"
    assert found["model.layers.1.mlp.down_proj"] == "W8 sym channel"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        expected = model(torch.tensor([_ids()])).logits[0]
    assert _relative(run_whole(loaded.decoder, _ids()), expected) < 0.02
