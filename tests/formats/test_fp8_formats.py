"""FP8 in the forms of DeepSeek and transformers, FBGEMM and ModelOpt."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from qtool.errors import CheckpointError
from qtool.formats import fbgemm_fp8, fp8, modelopt
from qtool.formats.activations import round_input
from qtool.formats.linears import ReadableFormat
from qtool.formats.reader import TensorEntry
from qtool.formats.scheme import (
    ActivationScheme,
    WeightScheme,
    fp8_scheme,
    w8a8_scheme,
    weight_scheme,
)
from qtool.formats.tensor import QuantizedTensor

MODULE = "model.layers.0.mlp.up_proj"
ROWS, COLUMNS = 150, 200


def _codes(rows: int = ROWS, columns: int = COLUMNS) -> Tensor:
    generator = torch.Generator().manual_seed(rows)
    return (64 * torch.randn(rows, columns, generator=generator)).to(torch.float8_e4m3fn)


def _read(
    layout: ReadableFormat, tensors: dict[str, Tensor], block: dict[str, Any]
) -> QuantizedTensor:
    entries = {
        f"{MODULE}.{name}": TensorEntry("model.safetensors", tensor.dtype, tuple(tensor.shape))
        for name, tensor in tensors.items()
    }
    linears = layout.open_linears(block, entries)
    assert linears.is_quantized(MODULE)
    return linears.read(MODULE, lambda name: tensors[name.rpartition(".")[2]])


def _block_tensors() -> dict[str, Tensor]:
    scales = torch.rand(2, 2, generator=torch.Generator().manual_seed(1)) + 0.5
    return {"weight": _codes(), "weight_scale_inv": scales}


BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}


def test_blocks_are_multiplied_by_their_inverse_scale_and_written_back_byte_for_byte() -> None:
    packed = _block_tensors()
    tensor = _read(fp8, packed, BLOCKS)
    whole = packed["weight_scale_inv"].repeat_interleave(128, 0).repeat_interleave(128, 1)
    assert torch.equal(tensor.dequantize(), packed["weight"].float() * whole[:ROWS, :COLUMNS])
    assert tensor.scheme == fp8_scheme("block")
    again = fp8.pack(tensor)
    assert torch.equal(again["weight"].view(torch.uint8), packed["weight"].view(torch.uint8))
    assert torch.equal(again["weight_scale_inv"], packed["weight_scale_inv"])
    config = fp8.quantization_config({MODULE: tensor.scheme}, ["lm_head"])
    assert fp8.parse_scheme(config) == tensor.scheme
    assert config["modules_to_not_convert"] == ["lm_head"]


@pytest.mark.parametrize(
    ("names", "way", "strategy"),
    [
        (("weight_scale_inv",), "dynamic", "token"),
        (("weight_scale",), "dynamic", "token"),
        (("weight_scale_inv", "activation_scale"), "static", "tensor"),
        (("weight_scale", "input_scale"), "static", "tensor"),
    ],
)
def test_without_blocks_there_is_one_scale_under_the_names_of_both_writers(
    names: tuple[str, ...], way: str, strategy: str
) -> None:
    scales = {name: torch.tensor(0.25) for name in names}
    block = {"weight_block_size": None, "activation_scheme": way}
    tensor = _read(fp8, {"weight": _codes()} | scales, block)
    assert tensor.scheme.activations == ActivationScheme("float", strategy)
    assert torch.equal(tensor.dequantize(), _codes().float() * 0.25)
    assert (tensor.input_scale is not None) == (way == "static")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weight_block_size": [64, 64]}, r"blocks of \[64, 64\]"),
        ({"activation_scheme": "static"}, "with static inputs"),
        ({"activation_scheme": "none"}, "it is dynamic or static"),
        ({"fmt": "e5m2"}, "fmt 'e5m2'"),
    ],
)
def test_other_blocks_and_inputs_are_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        _read(fp8, _block_tensors(), BLOCKS | changes)


def test_codes_without_their_scale_are_never_taken_for_a_plain_weight() -> None:
    for layout, block in ((fp8, BLOCKS), (fbgemm_fp8, {}), (modelopt, {"quant_algo": "FP8"})):
        with pytest.raises(CheckpointError, match=f"{MODULE}: .*weight_scale.* missing"):
            _read(layout, {"weight": _codes()}, block)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("weight", lambda t: t.half(), "weight is torch.float16"),
        ("weight", lambda t: t.flatten(), "in two dimensions"),
        ("weight_scale_inv", lambda t: t[:1], r"needs \(2, 2\)"),
        ("weight_scale_inv", lambda t: t.int(), "scales are floating"),
        ("weight_scale_inv", lambda t: t * torch.nan, "not finite"),
    ],
)
def test_damaged_tensors_are_refused_by_name(name: str, change: Any, message: str) -> None:
    packed = _block_tensors()
    with pytest.raises(CheckpointError, match=f"{MODULE}: .*{message}"):
        _read(fp8, packed | {name: change(packed[name])}, BLOCKS)


def test_two_scales_under_two_names_are_refused() -> None:
    packed = _block_tensors()
    with pytest.raises(CheckpointError, match="weight_scale_inv and weight_scale: one of them"):
        _read(fp8, packed | {"weight_scale": packed["weight_scale_inv"]}, BLOCKS)


@pytest.mark.parametrize("shape", [(ROWS, 1), (ROWS,)])
def test_fbgemm_has_a_scale_a_row_and_bounds_the_scales_of_inputs(shape: tuple[int, ...]) -> None:
    scales = (torch.rand(ROWS, generator=torch.Generator().manual_seed(2)) + 0.5).view(shape)
    block = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}
    tensor = _read(fbgemm_fp8, {"weight": _codes(), "weight_scale": scales}, block)
    assert torch.equal(tensor.dequantize(), _codes().float() * scales.view(-1, 1))
    inputs = tensor.scheme.activations
    assert inputs == ActivationScheme("float", "token", bound=1200.0)
    x = torch.tensor([[3000.0, 600.0, -5.0]])
    step = 1200.0 / 448
    expected = (x / step).clamp(-448, 448).to(torch.float8_e4m3fn).float() * step
    assert torch.equal(round_input(x, inputs), expected)
    assert float(round_input(x, inputs).max()) == 1200.0


def test_modelopt_has_one_scale_each_and_says_so_in_either_form() -> None:
    packed = {
        "weight": _codes(),
        "weight_scale": torch.tensor(0.5),
        "input_scale": torch.tensor(0.125),
    }
    for block in ({"quant_algo": "FP8"}, {"quantization": {"quant_algo": "FP8"}}):
        tensor = _read(modelopt, packed, block)
        assert tensor.scheme == fp8_scheme("tensor")
        assert torch.equal(tensor.dequantize(), _codes().float() * 0.5)
        assert tensor.input_scale is not None and tensor.input_scale.tolist() == [0.125]
    with pytest.raises(CheckpointError, match="quant_algo 'NVFP4'"):
        _read(modelopt, packed, {"quant_algo": "NVFP4"})
    del packed["input_scale"]
    with pytest.raises(CheckpointError, match="input_scale missing"):
        _read(modelopt, packed, {"quant_algo": "FP8"})


@pytest.mark.parametrize(
    "scheme",
    [
        fp8_scheme("channel"),
        fp8_scheme("tensor"),
        fp8_scheme("block", weight_only=True),
        w8a8_scheme(),
        weight_scheme(4, True, 8),
        WeightScheme(8, True, "tensor", None, "float", ActivationScheme("float", "token")),
    ],
    ids=WeightScheme.describe,
)
def test_blocks_with_inputs_in_groups_are_all_that_is_written(scheme: WeightScheme) -> None:
    assert fp8.obstacle(fp8_scheme("block"), (64, 64)) is None
    found = fp8.obstacle(scheme, (64, 64))
    assert found is not None and scheme.describe() in found


def test_matrices_that_are_no_whole_blocks_come_with_a_warning() -> None:
    scheme = fp8_scheme("block")
    assert fp8.warnings([(scheme, (64, 128)), (scheme, (256, 384)), (scheme, (100, 30))]) == ()
    (warning,) = fp8.warnings([(scheme, (192, 576)), (scheme, (192, 576)), (scheme, (128, 130))])
    assert "matrices of 128 x 130, 192 x 576 are no whole number" in warning
