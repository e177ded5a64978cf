"""What native arithmetic costs on a real model, against float32 reference operations."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import compute_loss
import pytest
from torch import Tensor

from qtool.calibration.data import evaluation_windows, held_out_documents, load_tokenizer
from qtool.formats.model_source import PACKAGED, resolve_model
from qtool.quantize.options import QuantizeOptions
from qtool.quantize.pipeline import quantize_model
from qtool.runtime.kernels.cpu.build import load_native

NAME = "smollm2-135m"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec(PACKAGED[NAME].parts[0][0]) is None,
        reason=f"needs the model: {PACKAGED[NAME].install}",
    ),
    pytest.mark.skipif(load_native().library is None, reason=load_native().reason),
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2 at 4 bits, asymmetric, in groups of 64."""
    out = tmp_path_factory.mktemp("quantized") / "model"
    quantize_model(resolve_model(NAME), out, QuantizeOptions(method="rtn", group_size=64))
    return out


def _windows(checkpoint: Path, count: int, length: int) -> Tensor:
    tokenizer = load_tokenizer(checkpoint)
    text = held_out_documents("builtin").render(tokenizer)
    return evaluation_windows(text, tokenizer, length, count)


def test_int8_arithmetic_and_cache_stay_within_a_hundredth_of_a_nat(checkpoint: Path) -> None:
    found = compute_loss.losses(checkpoint, _windows(checkpoint, 2, 512))
    kl = {name: quality.kl or 0 for name, quality in found.items()}
    assert 1e-4 < kl["int8"] < 0.01 and 1e-4 < kl["int8, INT8 cache"] < 0.01, kl
    assert kl["bf16"] < 1e-3 and kl["fp32"] < 1e-4 and kl["fp32, float32 cache"] < 1e-6, kl


def test_float32_arithmetic_writes_the_reference_text(checkpoint: Path) -> None:
    name = "fp32, float32 cache"
    prompts = _windows(checkpoint, compute_loss.PROMPTS, compute_loss.PROMPT_TOKENS).tolist()
    forms = {name: compute_loss.FORMS[name]}
    equal = compute_loss.equal_continuations(checkpoint, prompts, forms)
    assert equal[name] == compute_loss.PROMPTS
