"""AutoAWQ's GEMM format against a packer in plain Python."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from qtool.errors import CheckpointError
from qtool.formats import awq
from qtool.formats.reader import TensorEntry
from qtool.formats.scheme import WeightScheme, fp8_scheme, w8a8_scheme, weight_scheme
from qtool.formats.tensor import QuantizedTensor
from support.foreign import awq_tensors, random_grid, with_zero

MODULE = "model.layers.0.mlp.up_proj"


def _read(tensors: dict[str, Tensor], **block: Any) -> QuantizedTensor:
    entries = {
        f"{MODULE}.{name}": TensorEntry("model.safetensors", tensor.dtype, tuple(tensor.shape))
        for name, tensor in tensors.items()
    }
    linears = awq.open_linears({"quant_method": "awq", "bits": 4, **block}, entries)
    assert linears.modules() == [MODULE] * ("qweight" in tensors)
    return linears.read(MODULE, lambda name: tensors[name.rpartition(".")[2]])


@given(
    groups=st.integers(1, 3),
    group=st.sampled_from([1, 3, 8, 32]),
    words=st.integers(1, 3),
    seed=st.integers(0, 1000),
)
def test_what_plain_python_packs_is_read_and_written_back_byte_for_byte(
    groups: int, group: int, words: int, seed: int
) -> None:
    grid = random_grid(4, groups * group, 8 * words, group, seed)
    packed = awq_tensors(grid)
    tensor = _read(packed, group_size=group)
    assert torch.equal(tensor.dequantize(), grid.weight())
    again = awq.pack(tensor)
    assert again.keys() == packed.keys()
    for name, expected in packed.items():
        assert again[name].dtype == expected.dtype and torch.equal(again[name], expected), name


@pytest.mark.parametrize("zero", [0, 8, 15])
def test_every_zero_is_taken_as_it_stands(zero: int) -> None:
    grid = with_zero(random_grid(4, 32, 16, 16), zero)
    tensor = _read(awq_tensors(grid), group_size=16)
    assert bool((tensor.zeros == zero).all())
    assert torch.equal(tensor.dequantize(), grid.weight())


def test_one_group_a_row_and_old_names_of_keys() -> None:
    grid = random_grid(4, 24, 8, 24)
    assert _read(awq_tensors(grid), group_size=-1).scheme == weight_scheme(4, False, None)
    native = {"w_bit": 4, "q_group_size": 12, "version": "GEMM"}
    grid = random_grid(4, 24, 8, 12)
    assert torch.equal(_read(awq_tensors(grid), **native).dequantize(), grid.weight())


def test_a_symmetric_grid_is_written_with_zeros_of_8() -> None:
    scheme = weight_scheme(4, True, 8)
    codes = torch.randint(0, 16, (8, 16), dtype=torch.uint8)
    tensor = QuantizedTensor(
        codes, torch.ones(8, 2), torch.full((8, 2), 8, dtype=torch.uint8), scheme
    )
    assert awq.pack(tensor)["qzeros"].unique().tolist() == [0x88888888 - 2**32]
    config = awq.quantization_config({"a": scheme}, ["lm_head"])
    assert config["zero_point"] is True
    assert (config["bits"], config["group_size"], config["version"]) == (4, 8, "gemm")
    assert config["modules_to_not_convert"] == ["lm_head"]


def test_a_file_without_zeros_is_symmetric_and_zeros_may_not_contradict_it() -> None:
    grid = with_zero(random_grid(4, 16, 8, 8), 8)
    packed = awq_tensors(grid)
    tensor = _read(packed, group_size=8, zero_point=False)
    assert tensor.scheme.symmetric and torch.equal(tensor.dequantize(), grid.weight())
    without = {name: part for name, part in packed.items() if name != "qzeros"}
    assert torch.equal(_read(without, group_size=8, zero_point=False).dequantize(), grid.weight())
    other = awq_tensors(with_zero(grid, 7))
    with pytest.raises(CheckpointError, match=f"{MODULE}: zeros from 7 to 7 with zero_point false"):
        _read(other, group_size=8, zero_point=False)


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ({"version": "gemv"}, "version 'gemv'"),
        ({"bits": 8}, "8 bits"),
        ({"w_bit": 3}, "3 bits"),
        ({"group_size": "128"}, "group_size is '128'"),
        ({"group_size": 0}, "group_size is 0"),
        ({"group_size": 5}, "group_size=5 does not divide"),
    ],
)
def test_variants_that_cannot_be_read_are_refused_by_name(
    block: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        _read(awq_tensors(random_grid(4, 16, 8, 8)), **block)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("qweight", lambda t: t.to(torch.int64), "qweight is torch.int64"),
        ("qweight", lambda t: t.flatten(), r"qweight is torch.int32 of shape \[16\]"),
        ("qzeros", lambda t: t[:1], r"needs \(8, 2\)"),
        ("qzeros", lambda t: t.float(), "qzeros is torch.float32"),
        ("scales", lambda t: t[:, :4], r"needs \(8, 2\)"),
        ("scales", lambda t: t.to(torch.int32), "scales are floating"),
        ("scales", lambda t: t.unsqueeze(0), "two dimensions at most"),
        ("scales", lambda t: t * torch.inf, "not finite"),
    ],
)
def test_damaged_tensors_are_refused_by_name(name: str, change: Any, message: str) -> None:
    packed = awq_tensors(random_grid(4, 16, 8, 8))
    with pytest.raises(CheckpointError, match=f"{MODULE}: .*{message}"):
        _read(packed | {name: change(packed[name])}, group_size=8)


@pytest.mark.parametrize("name", ["qzeros", "scales"])
def test_missing_tensors_are_named(name: str) -> None:
    packed = awq_tensors(random_grid(4, 16, 8, 8))
    del packed[name]
    with pytest.raises(CheckpointError, match=f"{name} missing for a AWQ weight"):
        _read(packed, group_size=8)


@pytest.mark.parametrize(
    ("scheme", "shape", "message"),
    [
        (weight_scheme(8, True, 8), (8, 8), "W8 sym g8: AWQ holds weights of 4 bits alone"),
        (w8a8_scheme(), (8, 8), "AWQ holds weights of 4 bits"),
        (fp8_scheme(), (8, 8), "AWQ holds weights of 4 bits"),
        (WeightScheme(4, True, "tensor", None), (8, 8), "a scale a group or a row"),
        (weight_scheme(4, True, 8), (12, 8), "12 out features: AWQ packs them by 8"),
        (weight_scheme(4, True, 8), (16, 8), None),
        (weight_scheme(4, False, None), (16, 9), None),
    ],
)
def test_what_the_format_does_not_hold_is_said(
    scheme: WeightScheme, shape: tuple[int, int], message: str | None
) -> None:
    found = awq.obstacle(scheme, shape)
    assert found is None if message is None else found is not None and message in found
