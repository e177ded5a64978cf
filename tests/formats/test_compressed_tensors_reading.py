"""What other writers of compressed-tensors put into a checkpoint and qtool does not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from qtool.errors import CheckpointError
from qtool.formats import affine
from qtool.formats import compressed_tensors as ct
from qtool.formats.linears import StoredLinears
from qtool.formats.reader import TensorEntry
from qtool.formats.scheme import WeightScheme, fp8_scheme, w8a8_scheme, weight_scheme
from qtool.formats.tensor import QuantizedTensor

MODULE = "model.layers.0.mlp.up_proj"


def _make(scheme: WeightScheme, rows: int = 24, columns: int = 64) -> QuantizedTensor:
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows))
    scales, zeros = affine.choose_grid(weight, scheme, torch.bfloat16)
    return QuantizedTensor(affine.quantize(weight, scales, zeros, scheme), scales, zeros, scheme)


def _open(
    tensors: Mapping[str, Tensor], block: dict[str, Any], module: str = MODULE
) -> StoredLinears:
    entries = {
        f"{module}.{name}": TensorEntry("model.safetensors", tensor.dtype, tuple(tensor.shape))
        for name, tensor in tensors.items()
    }
    return ct.open_linears(block, entries)


def _read(tensors: Mapping[str, Tensor], block: dict[str, Any]) -> QuantizedTensor:
    linears = _open(tensors, block)
    return linears.read(MODULE, lambda name: tensors[name.rpartition(".")[2]])


def _reference(name: str, tensors: dict[str, Tensor], block: dict[str, Any]) -> Tensor:
    """What the compressed-tensors package makes of it, in float32."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    scheme = QuantizationConfig.model_validate(block).config_groups["group_0"]
    wide = {key: part.float() if "scale" in key else part for key, part in tensors.items()}
    weight = BaseCompressor.load_from_registry(name).decompress(wide, scheme)["weight"]
    assert isinstance(weight, Tensor)
    return weight.float()


NAIVE = [
    weight_scheme(4, True, 16),
    weight_scheme(4, False, 16),
    weight_scheme(8, False, None),
    weight_scheme(8, True, 32),
    WeightScheme(4, True, "tensor", None),
    w8a8_scheme(),
    fp8_scheme("block"),
    fp8_scheme("channel"),
]


@pytest.mark.parametrize("scheme", NAIVE, ids=WeightScheme.describe)
def test_naive_codes_of_any_width_are_what_the_reference_package_decodes(
    scheme: WeightScheme,
) -> None:
    tensor = _make(scheme)
    half = scheme.levels // 2
    packed = {"weight": tensor.codes, "weight_scale": tensor.scales}
    if scheme.type == "int":
        packed["weight"] = (tensor.codes.short() - half).to(torch.int8)
    if not scheme.symmetric:
        packed["weight_zero_point"] = (tensor.zeros.short() - half).to(torch.int8)
    block = ct.quantization_config({MODULE: scheme}, []) | {"format": "naive-quantized"}
    found = _read(packed, block)
    assert found.scheme == scheme
    assert torch.equal(found.dequantize(), tensor.dequantize())
    assert torch.equal(found.dequantize(), _reference("naive-quantized", packed, block))


def test_8_bit_codes_with_zero_points_are_unpacked_as_the_reference_package_does() -> None:
    tensor = _make(weight_scheme(8, False, 16))
    packed, block = ct.pack(tensor), ct.quantization_config({MODULE: tensor.scheme}, [])
    assert torch.equal(_read(packed, block).dequantize(), tensor.dequantize())
    assert torch.equal(_reference("pack-quantized", packed, block), tensor.dequantize())


def test_codes_beyond_their_bits_are_refused() -> None:
    scheme = weight_scheme(4, True, 16)
    block = ct.quantization_config({MODULE: scheme}, []) | {"format": "naive-quantized"}
    codes = torch.full((24, 64), 8, dtype=torch.int8)
    with pytest.raises(CheckpointError, match=r"codes beyond -8 \.\. 7 for W4 sym g16"):
        _read({"weight": codes, "weight_scale": torch.ones(24, 4)}, block)


class TestActOrder:
    BLOCK = ct.quantization_config({MODULE: weight_scheme(4, True, 16)}, [])

    def _block(self) -> dict[str, Any]:
        group = self.BLOCK["config_groups"]["group_0"]
        weights = group["weights"] | {"actorder": "group"}
        return self.BLOCK | {"config_groups": {"group_0": group | {"weights": weights}}}

    def test_groups_are_those_of_the_map(self) -> None:
        tensor = _make(weight_scheme(4, True, 16))
        generator = torch.Generator().manual_seed(0)
        g_idx = (torch.randperm(64, generator=generator) // 16).to(torch.int32)
        packed = ct.pack(tensor) | {"weight_g_idx": g_idx}
        linears = _open(packed, self._block())
        found = linears.read(MODULE, lambda name: packed[name.rpartition(".")[2]])
        signed = tensor.codes.float() - 8
        assert torch.equal(found.dequantize(), signed * tensor.scales.float()[:, g_idx.long()])
        assert "act-order" in linears.notes()[0]

    def test_a_config_that_promises_a_map_needs_one(self) -> None:
        packed = ct.pack(_make(weight_scheme(4, True, 16)))
        with pytest.raises(CheckpointError, match=f"{MODULE}: weight_g_idx missing"):
            _read(packed, self._block())


def test_groups_name_modules_by_class_name_or_pattern_and_the_nearest_wins() -> None:
    by_class = ct.quantization_config({"a": weight_scheme(4, True, 16)}, [])
    by_name = ct.quantization_config({"a": w8a8_scheme()}, [])
    groups = {
        "class": by_class["config_groups"]["group_0"],
        "pattern": by_name["config_groups"]["group_0"]
        | {"targets": ["re:.*down_proj$"], "format": "int-quantized"},
        "name": by_name["config_groups"]["group_0"]
        | {"targets": ["model.layers.1.mlp.up_proj"], "format": "naive-quantized"},
    }
    ignore = ["lm_head", "re:.*layers.2.*", "LlamaRMSNorm"]
    config = ct.parse_config(
        by_class | {"format": "pack-quantized", "config_groups": groups, "ignore": ignore}
    )
    found = {
        name: config.group_for(name)
        for name in (
            "model.layers.0.mlp.up_proj",
            "model.layers.0.mlp.down_proj",
            "model.layers.1.mlp.up_proj",
            "model.layers.2.mlp.down_proj",
            "lm_head",
        )
    }
    layouts = {name: group and group.layout for name, group in found.items()}
    assert layouts == {
        "model.layers.0.mlp.up_proj": "pack-quantized",
        "model.layers.0.mlp.down_proj": "int-quantized",
        "model.layers.1.mlp.up_proj": "naive-quantized",
        "model.layers.2.mlp.down_proj": None,
        "lm_head": None,
    }


def test_zero_points_of_a_symmetric_scheme_are_zero() -> None:
    tensor = _make(weight_scheme(4, True, 16))
    block = ct.quantization_config({MODULE: tensor.scheme}, [])
    zeros = torch.zeros(24, 4, dtype=torch.int8)
    packed = ct.pack(tensor)
    found = _read(packed | {"weight_zero_point": zeros}, block)
    assert torch.equal(found.dequantize(), tensor.dequantize())
    with pytest.raises(CheckpointError, match="weight_zero_point is not zero, and W4 sym g16"):
        _read(packed | {"weight_zero_point": zeros + 1}, block)


def test_tensors_of_another_layout_are_no_part_of_a_linear() -> None:
    packed = ct.pack(_make(weight_scheme(4, True, 16)))
    block = ct.quantization_config({MODULE: weight_scheme(4, True, 16)}, [])
    linears = _open(packed | {"weight": torch.zeros(24, 64)}, block)
    assert set(linears.parts(MODULE)) == set(packed)


def test_a_recorded_shape_that_is_not_the_tensors_takes_no_memory() -> None:
    packed = ct.pack(_make(weight_scheme(4, True, 16)))
    block = ct.quantization_config({MODULE: weight_scheme(4, True, 16)}, [])
    for shape in ([2**40, 64], [24, 2**40], [-24, 64], [0, 64], [24]):
        lie = packed | {"weight_shape": torch.tensor(shape)}
        with pytest.raises(CheckpointError, match=MODULE):
            _read(lie, block)


@given(
    bits=st.sampled_from([4, 8]),
    symmetric=st.booleans(),
    rows=st.integers(1, 19),
    groups=st.integers(1, 3),
    group=st.sampled_from([1, 3, 8, 16]),
    seed=st.integers(0, 1000),
)
def test_reading_and_writing_gives_the_same_bytes(
    bits: int, symmetric: bool, rows: int, groups: int, group: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    scheme = weight_scheme(bits, symmetric, group)
    top, grid = 2**bits - 1, (rows, groups)
    codes = torch.randint(0, 2**bits, (rows, group * groups), generator=generator)
    zeros = torch.randint(0, 2**bits, grid, generator=generator)
    zeros[0, 0], zeros[-1, -1] = 0, top
    if symmetric:
        zeros.fill_(2 ** (bits - 1))
    scales = torch.rand(grid, generator=generator).bfloat16()
    tensor = QuantizedTensor(codes.to(torch.uint8), scales, zeros.to(torch.uint8), scheme)
    packed = ct.pack(tensor)
    again = ct.pack(_read(packed, ct.quantization_config({MODULE: scheme}, [])))
    assert packed.keys() == again.keys()
    assert all(torch.equal(packed[name], again[name]) for name in packed)
