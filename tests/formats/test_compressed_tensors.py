"""pack-quantized, held against the compressed-tensors package itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from qtool.errors import CheckpointError
from qtool.formats import affine
from qtool.formats import compressed_tensors as ct
from qtool.formats.scheme import WeightScheme, weight_scheme
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
        (_config(config_groups={}), "no config_groups"),
        (_config(config_groups=_group(type="float")), "float weights of 4 bits"),
        (_config(config_groups=_group(num_bits=3)), "bits=3"),
        (_config(config_groups=_group(actorder="group")), "actorder group"),
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
