"""AWQ inside real decoder blocks: scaling changes nothing, rounding is what the file says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from qtool.calibration.families import find_family
from qtool.calibration.walk import walk_blocks
from qtool.formats.checkpoint import CheckpointReader
from qtool.quantize import awq
from qtool.quantize.block import quantize_block
from qtool.quantize.job import Job
from qtool.quantize.methods import METHODS
from qtool.quantize.plan import plan_schemes
from qtool.quantize.schemes import IntegerWeights, SchemesAsked

AWQ = METHODS["awq"].recipe

SHAPES = {
    "mha": {"kv_heads": 4},
    "gqa": {"kv_heads": 2},
    "mqa with biases": {"kv_heads": 1, "bias": True},
    "qwen2": {"model_type": "qwen2", "kv_heads": 2},
    "mistral": {"model_type": "mistral", "kv_heads": 2, "head_dim": 32},
}


@pytest.fixture(autouse=True)
def _quiet() -> None:
    transformers_logging.disable_progress_bar()


@pytest.fixture
def ids() -> Tensor:
    return torch.randint(4, 384, (6, 24), generator=torch.Generator().manual_seed(0))


def _job(folder: Path, ids: Tensor, dtype: torch.dtype = torch.float32) -> Job:
    reader = CheckpointReader(folder)
    family = find_family(reader.config)
    asked = SchemesAsked(default=IntegerWeights(4))
    schemes = plan_schemes(reader, reader.config, family, asked)
    return Job(reader, family, schemes, dtype, torch.device("cpu"), ids)


def _logits_after(folder: Path, ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Logits of the model as it is, and with the weights AWQ leaves in its blocks."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    job = _job(folder, ids, dtype)
    with torch.no_grad():
        before = model(ids).logits
        for block in walk_blocks(job.reader, job.family, ids, job.device):
            quantize_block(block, job, AWQ)
            model.get_submodule(block.prefix).load_state_dict(block.module.state_dict())
        return before, model(ids).logits


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("ratio", [0.5, 0.95])
def test_scaling_without_rounding_leaves_the_logits_as_they_were(
    shape: str,
    ratio: float,
    model_factory: Callable[..., Path],
    ids: Tensor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def take(mean_abs: Tensor, _: object) -> awq.ScaleChoice:
        return awq.ScaleChoice(ratio, awq.smoothing_scales(mean_abs, ratio), 0.0, 0.0)

    monkeypatch.setattr(awq, "search_scales", take)
    monkeypatch.setattr("qtool.formats.tensor.QuantizedTensor.dequantize", _exact_weights)
    monkeypatch.setattr("qtool.quantize.block.quantize_rtn", _keep_exact)
    before, after = _logits_after(model_factory(**SHAPES[shape]), ids, torch.float32)
    torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-5)
    assert not torch.equal(after, before), "some scale was folded"


class _Exact:
    """Stands for a quantized tensor with infinitely many bits."""

    def __init__(self, weight: Tensor, scheme: object, dtype: torch.dtype) -> None:
        self.weight, self.scheme, self.scales = weight, scheme, torch.ones(1, dtype=dtype)
        self.shape = tuple(weight.shape)

    def dequantize(self) -> Tensor:
        return self.weight


def _keep_exact(weight: Tensor, scheme: object, dtype: torch.dtype, *_: object) -> _Exact:
    return _Exact(weight, scheme, dtype)


def _exact_weights(tensor: object) -> Tensor:
    raise AssertionError("nothing is rounded in this test")


@pytest.mark.parametrize("shape", SHAPES)
def test_the_block_is_left_with_exactly_the_weights_it_hands_out(
    shape: str, model_factory: Callable[..., Path], ids: Tensor
) -> None:
    job = _job(model_factory(**SHAPES[shape]), ids, torch.bfloat16)
    with torch.no_grad():
        for block in walk_blocks(job.reader, job.family, ids, job.device):
            done = quantize_block(block, job, AWQ)
            held = {f"{block.prefix}.{n}": t for n, t in block.module.state_dict().items()}
            for name, quantized in done.weights.items():
                assert torch.equal(held.pop(f"{name}.weight"), quantized.dequantize())
            assert held.keys() == done.changed.keys()
            for name, tensor in held.items():
                assert done.changed[name].dtype == torch.bfloat16
                assert torch.equal(tensor, done.changed[name].float())


def test_every_linear_has_a_record_of_what_it_saw(tiny_model_folder: Path, ids: Tensor) -> None:
    job = _job(tiny_model_folder, ids)
    with torch.no_grad():
        block = next(walk_blocks(job.reader, job.family, ids, job.device))
        records = quantize_block(block, job, AWQ).records
    assert [record.name for record in records] == [
        f"model.layers.0.{name}" for name in job.family.linears
    ]
    for record in records:
        assert record.tokens == ids.numel()
        assert record.output_error is not None and 0 < record.output_error < 0.3
        assert record.awq_ratio is not None and 0 <= record.awq_ratio < 1
        assert record.asked == record.used and record.fallback is None


def test_inputs_with_loud_channels_are_smoothed_and_end_with_less_error_than_rounding(
    model_factory: Callable[..., Path], ids: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = model_factory()
    job = _job(folder, ids)
    gains = torch.ones(64)
    gains[::7] = 30

    def block_error(identity_only: bool) -> tuple[float, list[float | None]]:
        with monkeypatch.context() as patch, torch.no_grad():
            if identity_only:
                patch.setattr(awq, "NUM_RATIOS", 1)
            block = next(walk_blocks(job.reader, job.family, ids, job.device))
            block.module.input_layernorm.weight.copy_(gains)
            exact = torch.cat(list(block.run()))
            records = quantize_block(block, job, AWQ).records
            error = (torch.cat(list(block.run())) - exact).square().mean()
            return float(error), [record.awq_ratio for record in records]

    plain, ratios = block_error(identity_only=True)
    assert set(ratios) == {0.0}
    smoothed, ratios = block_error(identity_only=False)
    assert ratios[0] == ratios[1] == ratios[2] > 0
    assert smoothed < plain


def test_a_bias_too_large_for_the_stored_dtype_is_an_error_that_names_it(
    model_factory: Callable[..., Path], ids: Tensor
) -> None:
    from qtool.errors import QuantizationError

    job = replace(_job(model_factory(bias=True), ids), dtype=torch.float16)
    with torch.no_grad():
        block = next(walk_blocks(job.reader, job.family, ids, job.device))
        block.module.mlp.down_proj.bias[0] = 1e6
        with pytest.raises(QuantizationError, match=r"mlp\.down_proj\.bias reaches 1e\+06"):
            quantize_block(block, job, AWQ)
