"""Linears that are left as they are: in the plan, on disk, in our runtime and in transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

from qtool.errors import QtoolError, QuantizationError, UsageError
from qtool.formats.checkpoint import CheckpointReader
from qtool.quantize.options import QuantizeOptions
from qtool.quantize.pipeline import quantize_model
from qtool.runtime.loaded_model import load_model
from qtool.runtime.options import ModelOptions
from support.batches import run_whole

LAYERS = ("model.layers.0", "model.layers.1")
ATTENTION = [f"self_attn.{name}_proj" for name in "qkvo"]
MLP = [f"mlp.{name}_proj" for name in ("gate", "up", "down")]


def _options(ignore: tuple[str, ...], method: str = "awq", **values: Any) -> QuantizeOptions:
    return QuantizeOptions(
        method=method,
        ignore=ignore,
        calibration=(__file__,),
        samples=4,
        seq_len=32,
        device="cpu",
        **values,
    )


IGNORES = {
    ("layers.0",): [f"{LAYERS[0]}.{name}" for name in ATTENTION + MLP],
    ("down_proj",): [f"{layer}.mlp.down_proj" for layer in LAYERS],
    ("q_proj", "k_proj", "v_proj"): [f"{layer}.{n}" for layer in LAYERS for n in ATTENTION[:3]],
    (r"re:.*layers\.1\.mlp\.", "lm_head"): [f"{LAYERS[1]}.{name}" for name in MLP],
}


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`:UserWarning")
@pytest.mark.parametrize("method", ["awq", "rtn"])
@pytest.mark.parametrize("ignore", IGNORES, ids=" ".join)
def test_ignored_linears_stay_bit_for_bit_and_every_loader_agrees(
    ignore: tuple[str, ...], method: str, model_factory: Callable[..., Path], tmp_path: Path
) -> None:
    source, out = model_factory(dtype=torch.bfloat16), tmp_path / "q"
    report = quantize_model(source, out, _options(ignore, method))
    kept = IGNORES[ignore]
    assert {record.name for record in report.modules}.isdisjoint(kept)
    assert len(report.modules) == 14 - len(kept)
    with CheckpointReader(source) as before, CheckpointReader(out) as after:
        assert after.config["quantization_config"]["ignore"] == sorted(["lm_head", *kept])
        for name in kept:
            assert torch.equal(before.get(f"{name}.weight"), after.get(f"{name}.weight"))

    loaded = load_model(out, ModelOptions(device="cpu", backend="reference", dtype="fp32"))
    assert loaded.schemes.keys() == {record.name for record in report.modules}
    ids = torch.randint(0, 384, (60,), generator=torch.Generator().manual_seed(4)).tolist()
    model = AutoModelForCausalLM.from_pretrained(
        out, dtype=torch.float32, quantization_config=CompressedTensorsConfig(dequantize=True)
    )
    with torch.inference_mode():
        expected = model(torch.tensor([ids])).logits[0]
    actual = run_whole(loaded.decoder, ids)
    assert float((actual - expected).norm() / expected.norm()) < 0.01


def test_ignored_rows_do_not_limit_the_group_size(
    model_factory: Callable[..., Path], tmp_path: Path
) -> None:
    source = model_factory(intermediate_size=100)
    with pytest.raises(QuantizationError, match="rows of 100"):
        quantize_model(source, tmp_path / "q", _options((), "rtn"))
    report = quantize_model(source, tmp_path / "q", _options(("down_proj",), "rtn"))
    assert report.scheme["group_size"] == 64


@pytest.mark.parametrize(
    ("ignore", "error", "message"),
    [
        (("downproj",), QuantizationError, r"'downproj': means none.*near are down_proj"),
        (("layers.2",), QuantizationError, r"'layers\.2': means none.*layers\.1"),
        (("mlp", "re:["), UsageError, r"'re:\[': is no regular expression"),
        (("model",), QuantizationError, "means all 14 linears"),
        (
            ("q_proj",),
            QuantizationError,
            r"0\.self_attn\.q_proj, but not .*k_proj, .*v_proj \(and so in 1 other places\)",
        ),
        (
            ("model.layers.1.mlp.up_proj",),
            QuantizationError,
            r"ignore model\.layers\.1\.mlp\.gate_proj too, or none of them",
        ),
    ],
)
def test_a_pattern_that_cannot_be_met_leaves_nothing(
    ignore: tuple[str, ...],
    error: type[QtoolError],
    message: str,
    tiny_model_folder: Path,
    tmp_path: Path,
) -> None:
    with pytest.raises(error, match=message):
        quantize_model(tiny_model_folder, tmp_path / "q", _options(ignore))
    assert list(tmp_path.iterdir()) == []
