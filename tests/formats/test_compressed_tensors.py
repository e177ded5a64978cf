"""pack-quantized, held against the compressed-tensors package itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from qtool.errors import CheckpointError
from qtool.formats import affine
from qtool.formats import compressed_tensors as ct
from qtool.formats.kv_scales import static_scheme
from qtool.formats.scheme import WeightScheme, fp8_scheme, w8a8_scheme, weight_scheme
from qtool.formats.tensor import QuantizedTensor

SCHEMES = [
    weight_scheme(4, False, 32),
    weight_scheme(4, True, 32),
    weight_scheme(4, False, None),
    weight_scheme(8, True, 64),
    weight_scheme(8, True, None),
]


def _make_tensor(
    scheme: WeightScheme, rows: int = 24, columns: int = 128, seed: int = 0
) -> QuantizedTensor:
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    scales, zeros = affine.choose_grid(weight, scheme, torch.bfloat16)
    return QuantizedTensor(affine.quantize(weight, scales, zeros, scheme), scales, zeros, scheme)


def _assert_same(a: QuantizedTensor, b: QuantizedTensor) -> None:
    assert torch.equal(a.codes, b.codes)
    assert torch.equal(a.scales, b.scales)
    assert torch.equal(a.zeros, b.zeros)
    assert a.scheme == b.scheme


@pytest.mark.parametrize("scheme", SCHEMES, ids=WeightScheme.describe)
@pytest.mark.parametrize("rows", [1, 24, 37])
def test_unpack_inverts_pack(scheme: WeightScheme, rows: int) -> None:
    tensor = _make_tensor(scheme, rows)
    _assert_same(ct.unpack(ct.pack(tensor), scheme), tensor)


@pytest.mark.parametrize("scheme", SCHEMES, ids=WeightScheme.describe)
def test_the_reference_package_decodes_the_same_weights(scheme: WeightScheme) -> None:
    from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32

    tensor = _make_tensor(scheme)
    packed = ct.pack(tensor)
    codes = unpack_from_int32(packed["weight_packed"], scheme.bits, torch.Size(tensor.shape))
    zeros = torch.zeros_like(tensor.zeros, dtype=torch.int8)
    if not scheme.symmetric:
        grid = torch.Size(tensor.zeros.shape)
        zeros = unpack_from_int32(packed["weight_zero_point"], scheme.bits, grid, packed_dim=0)
    groups = codes.view(tensor.shape[0], zeros.shape[1], -1).float() - zeros.unsqueeze(-1).float()
    weight = (groups * packed["weight_scale"].float().unsqueeze(-1)).view(tensor.shape)
    assert torch.equal(weight, tensor.dequantize())


def test_the_config_is_accepted_by_the_reference_package() -> None:
    from compressed_tensors.quantization import QuantizationConfig

    schemes = {"model.layers.0.mlp.up_proj": SCHEMES[0], "model.layers.0.mlp.down_proj": SCHEMES[3]}
    parsed = QuantizationConfig.model_validate(ct.quantization_config(schemes, ["lm_head"]))
    weights = [group.weights for group in parsed.config_groups.values()]
    assert [(w.num_bits, w.symmetric, w.group_size) for w in weights] == [
        (4, False, 32),
        (8, True, 64),
    ]


def test_the_config_says_which_module_has_which_scheme() -> None:
    schemes = {"a.q_proj": SCHEMES[0], "a.up_proj": SCHEMES[3], "b.q_proj": SCHEMES[0]}
    parsed = ct.parse_config(ct.quantization_config(schemes, ["lm_head", "b.up_proj"]))
    assert {name: parsed.scheme_for(name) for name in schemes} == schemes
    assert parsed.scheme_for("lm_head") is None
    assert parsed.scheme_for("b.up_proj") is None


def test_one_scheme_targets_all_linears_but_the_ignored() -> None:
    parsed = ct.parse_config(ct.quantization_config({"a": SCHEMES[0]}, ["re:.*gate$"]))
    assert parsed.scheme_for("anything.q_proj") == SCHEMES[0]
    assert parsed.scheme_for("x.gate") is None


def test_a_config_of_the_cache_alone_quantizes_no_linear() -> None:
    from compressed_tensors.quantization import QuantizationConfig

    block = ct.quantization_config({}, []) | {"kv_cache_scheme": static_scheme(per_head=False)}
    assert (block["format"], block["config_groups"]) == ("dense", {})
    theirs = QuantizationConfig.model_validate(block).model_dump(mode="json")
    for found in (block, theirs):
        parsed = ct.parse_config(found)
        assert parsed.groups == () and parsed.scheme_for("model.layers.0.mlp.up_proj") is None


def _config(**changes: Any) -> dict[str, Any]:
    return ct.quantization_config({"a": SCHEMES[0]}, []) | changes


def _group(**weights: Any) -> dict[str, Any]:
    group = _config()["config_groups"]["group_0"]
    return {"group_0": group | {"weights": group["weights"] | weights}}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (_config(quant_method="awq"), "this version reads compressed-tensors"),
        (_config(format="nvfp4-pack-quantized"), "nvfp4-pack-quantized"),
        (_config(config_groups={}), "no config_groups and no kv_cache_scheme"),
        (_config(config_groups=_group(type="float")), "float weights of 4 bits"),
        (_config(config_groups=_group(num_bits=3)), "bits=3"),
        (_config(sparsity_config={"format": "sparse-24-bitmask"}), "has a sparsity_config"),
        (_config(transform_config={"config_groups": {"u": {}}}), "has a transform_config"),
    ],
)
def test_what_cannot_be_run_is_refused_by_name(config: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        ct.parse_config(config)


def test_damaged_tensors_are_refused_by_name() -> None:
    packed = ct.pack(_make_tensor(SCHEMES[0]))
    for name in packed:
        with pytest.raises(CheckpointError, match=f"{name} missing"):
            ct.unpack({key: value for key, value in packed.items() if key != name}, SCHEMES[0])
    short = packed | {"weight_packed": packed["weight_packed"][:, 1:]}
    with pytest.raises(CheckpointError, match="128 codes of 4 bits take 16"):
        ct.unpack(short, SCHEMES[0])
    other_grid = packed | {"weight_scale": packed["weight_scale"][:, 1:]}
    with pytest.raises(CheckpointError, match=r"needs \(24, 4\)"):
        ct.unpack(other_grid, SCHEMES[0])


PLAIN_SCHEMES = [
    w8a8_scheme(),
    w8a8_scheme(static=True),
    fp8_scheme("tensor"),
    fp8_scheme("channel"),
    fp8_scheme("block"),
    fp8_scheme("channel", weight_only=True),
]


def _make_plain(scheme: WeightScheme, rows: int = 150, columns: int = 200) -> QuantizedTensor:
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows))
    weight[0] *= 50
    weight[1] = 0
    scales, zeros = affine.choose_grid(weight, scheme, torch.bfloat16)
    inputs = torch.tensor([0.25]) if scheme.has_input_scale else None
    codes = affine.quantize(weight, scales, zeros, scheme)
    return QuantizedTensor(codes, scales, zeros, scheme, inputs)


@pytest.mark.parametrize("scheme", PLAIN_SCHEMES, ids=WeightScheme.describe)
@pytest.mark.parametrize(("rows", "columns"), [(1, 40), (256, 128), (150, 200)])
def test_plain_codes_are_stored_as_the_format_says_and_read_back(
    scheme: WeightScheme, rows: int, columns: int
) -> None:
    tensor = _make_plain(scheme, max(rows, 2), columns)
    packed = ct.pack(tensor)
    grid = {
        "tensor": (1,),
        "channel": (tensor.shape[0], 1),
        "block": (-(-tensor.shape[0] // 128), -(-columns // 128)),
    }[scheme.strategy]
    assert packed["weight"].dtype == (torch.int8 if scheme.type == "int" else torch.float8_e4m3fn)
    assert tuple(packed["weight_scale"].shape) == grid
    assert ("input_scale" in packed) == scheme.has_input_scale
    back = ct.unpack(packed, scheme)
    _assert_same_bytes(back, tensor)


def _assert_same_bytes(a: QuantizedTensor, b: QuantizedTensor) -> None:
    assert torch.equal(a.codes.view(torch.uint8), b.codes.view(torch.uint8))
    assert torch.equal(a.scales, b.scales) and torch.equal(a.zeros, b.zeros)
    assert (a.input_scale is None) == (b.input_scale is None)
    assert a.input_scale is None or torch.equal(a.input_scale, b.input_scale)


@pytest.mark.parametrize("scheme", PLAIN_SCHEMES, ids=WeightScheme.describe)
def test_the_reference_package_decompresses_the_same_bits(scheme: WeightScheme) -> None:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    tensor = _make_plain(scheme)
    config = ct.quantization_config({"a": scheme}, [])
    parsed = QuantizationConfig.model_validate(config)
    compressor = BaseCompressor.load_from_registry(config["format"])
    packed = {
        name: part.float() if "scale" in name else part for name, part in ct.pack(tensor).items()
    }
    theirs = compressor.decompress(packed, parsed.config_groups["group_0"])["weight"]
    assert torch.equal(theirs.float(), tensor.dequantize())


@pytest.mark.parametrize("scheme", PLAIN_SCHEMES, ids=WeightScheme.describe)
def test_the_config_of_rounded_inputs_survives_and_suits_the_reference_package(
    scheme: WeightScheme,
) -> None:
    from compressed_tensors.quantization import QuantizationConfig

    config = ct.quantization_config({"a": scheme}, ["lm_head"])
    assert config["format"] == ("int-quantized" if scheme.type == "int" else "float-quantized")
    assert ct.parse_config(config).scheme_for("a") == scheme
    group = QuantizationConfig.model_validate(config).config_groups["group_0"]
    if scheme.activations is None:
        assert group.input_activations is None
    else:
        assert group.input_activations.dynamic == scheme.activations.dynamic
        assert group.input_activations.strategy == scheme.activations.strategy
    if scheme.strategy == "block":
        assert list(group.weights.block_structure) == [128, 128]
        assert group.input_activations.group_size == 128


def test_schemes_of_several_layouts_name_theirs_in_each_group() -> None:
    schemes = {"a": SCHEMES[0], "b": w8a8_scheme(), "c": fp8_scheme()}
    config = ct.quantization_config(schemes, [])
    assert config["format"] == "mixed-precision"
    layouts = [group["format"] for group in config["config_groups"].values()]
    assert layouts == ["pack-quantized", "int-quantized", "float-quantized"]
    parsed = ct.parse_config(config)
    assert {name: parsed.scheme_for(name) for name in schemes} == schemes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_bits": 4}, "num_bits 4; we run 8 only"),
        ({"symmetric": False}, "symmetric False"),
        ({"strategy": "group"}, "FP8 only"),
        ({"dynamic": "local"}, "dynamic local"),
        ({"type": "float"}, "one type"),
    ],
)
def test_inputs_that_cannot_be_run_are_refused_by_name(
    changes: dict[str, Any], message: str
) -> None:
    config = ct.quantization_config({"a": w8a8_scheme()}, [])
    config["config_groups"]["group_0"]["input_activations"] |= changes
    with pytest.raises(CheckpointError, match=message):
        ct.parse_config(config)


def test_a_layout_that_does_not_belong_to_the_scheme_is_refused() -> None:
    config = ct.quantization_config({"a": fp8_scheme()}, []) | {"format": "pack-quantized"}
    with pytest.raises(CheckpointError, match="read from float-quantized only"):
        ct.parse_config(config)


def test_codes_of_another_dtype_are_refused() -> None:
    packed = ct.pack(_make_plain(fp8_scheme()))
    with pytest.raises(CheckpointError, match=r"weight is torch\.float16"):
        ct.unpack(packed | {"weight": packed["weight"].half()}, fp8_scheme())
    with pytest.raises(CheckpointError, match="input_scale missing"):
        ct.unpack(packed, fp8_scheme("tensor"))
