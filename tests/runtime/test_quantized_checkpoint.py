"""A folder quantized by qtool: our runtime and transformers compute the same from it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

from qtool.errors import CheckpointError, EngineError
from qtool.formats.checkpoint import dump_json, read_json
from qtool.quantize.options import QuantizeOptions
from qtool.quantize.pipeline import quantize_model
from qtool.runtime.loaded_model import load_model
from qtool.runtime.options import ModelOptions
from qtool.runtime.startup import check_quantization
from support.batches import run_whole

CASES: dict[str, dict[str, Any]] = {
    "awq W4 asym g32": {"method": "awq", "group_size": 32},
    "rtn W4 asym g32": {"method": "rtn", "group_size": 32},
    "rtn W4 sym row": {"method": "rtn", "group_size": "row", "symmetric": True},
    "rtn W8 sym g32": {"method": "rtn", "bits": 8, "group_size": 32},
    "rtn W8 sym row": {"method": "rtn", "bits": 8, "group_size": "row"},
    "gptq W8 asym g32": {"method": "gptq", "bits": 8, "symmetric": False, "group_size": 32},
    "rtn W8 asym row": {"method": "rtn", "bits": 8, "symmetric": False, "group_size": "row"},
}


@pytest.fixture(scope="module")
def quantized(
    model_factory: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, torch.dtype], Path]:
    made: dict[tuple[str, torch.dtype], Path] = {}

    def make(case: str, dtype: torch.dtype) -> Path:
        if (case, dtype) not in made:
            source = model_factory(dtype=dtype)
            out = tmp_path_factory.mktemp("quantized") / "model"
            options = QuantizeOptions(samples=4, seq_len=64, device="cpu", **CASES[case])
            quantize_model(source, out, options)
            made[case, dtype] = out
        return made[case, dtype]

    return make


def _token_ids() -> list[int]:
    return torch.randint(0, 384, (60,), generator=torch.Generator().manual_seed(4)).tolist()


def _transformers_logits(folder: Path, dtype: torch.dtype, symmetric: bool) -> torch.Tensor:
    """As a user loads it; asymmetric zero points need ``dequantize`` (see docs/formats.md)."""
    settings = (
        {} if symmetric else {"quantization_config": CompressedTensorsConfig(dequantize=True)}
    )
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **settings)
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([_token_ids()])).logits[0].float()
    return logits


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`:UserWarning")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    ("dtype", "backend", "bound"),
    [
        (torch.float32, "reference", 1e-4),
        (torch.float32, "cpu", 1e-4),
        # Both round to 8 bits, in different places.
        (torch.bfloat16, "reference", 0.03),
        (torch.bfloat16, "cpu", 0.03),
    ],
)
def test_transformers_computes_the_same_logits(
    quantized: Callable[[str, torch.dtype], Path],
    case: str,
    dtype: torch.dtype,
    backend: str,
    bound: float,
) -> None:
    folder = quantized(case, dtype)
    expected = _transformers_logits(folder, dtype, symmetric=" sym " in case)
    loaded = load_model(folder, ModelOptions(device="cpu", backend=backend))
    assert loaded.decoder.dtype == dtype
    assert set(loaded.schemes) and loaded.quantization.startswith(case.split()[1])
    actual = run_whole(loaded.decoder, _token_ids())
    assert float((actual - expected).norm() / expected.norm()) < bound


def test_strict_refuses_weights_held_dense(
    quantized: Callable[[str, torch.dtype], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QTOOL_NATIVE", "0")
    folder = quantized("rtn W4 asym g32", torch.float32)
    switched_off, dense = load_model(folder, ModelOptions(device="cpu")).notes
    assert "QTOOL_NATIVE=0" in switched_off and "held dense" in dense
    with pytest.raises(EngineError, match="--strict: .*held dense"):
        load_model(folder, ModelOptions(device="cpu", strict=True))


def test_the_name_of_the_quantization_is_checked(
    quantized: Callable[[str, torch.dtype], Path],
) -> None:
    folder = quantized("awq W4 asym g32", torch.float32)
    check_quantization("awq", folder)
    check_quantization("compressed-tensors", folder)
    with pytest.raises(Exception, match="'gptq', but the checkpoint is awq / compressed-tensors"):
        check_quantization("gptq", folder)


def test_projections_of_one_input_must_be_quantized_alike(
    quantized: Callable[[str, torch.dtype], Path], tmp_path: Path
) -> None:
    source = quantized("rtn W4 asym g32", torch.float32)
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").symlink_to(source / "model.safetensors")
    config = read_json(source / "config.json")
    config["quantization_config"]["ignore"].append("model.layers.0.self_attn.k_proj")
    dump_json(folder / "config.json", config)
    with pytest.raises(CheckpointError, match=r"no tensor model\.layers\.0\.self_attn\.k_proj"):
        load_model(folder, ModelOptions(device="cpu"))
