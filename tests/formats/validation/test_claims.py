"""What a config says of a linear, against the readers of this package and by hand."""

from __future__ import annotations

import time
from typing import Any

import pytest

from qtool.errors import CheckpointError
from qtool.formats.compressed_tensors import parse_config, quantization_config
from qtool.formats.scheme import WeightScheme, fp8_scheme, w8a8_scheme, weight_scheme
from qtool.formats.validation.claims import claims_of
from support.drafts import linear_names, make_draft

SCHEMES = (
    weight_scheme(4, True, 32),
    weight_scheme(4, False, 64),
    weight_scheme(8, True, None),
    w8a8_scheme(),
    w8a8_scheme(static=True),
    *(fp8_scheme(way) for way in ("tensor", "channel", "block")),
    fp8_scheme(weight_only=True),
)


def _describe(block: dict[str, Any], module: str) -> str | None:
    claim = claims_of(block)(module)
    return None if claim is None else claim.describe()


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.describe())
def test_our_own_configs_are_claims_of_our_schemes(scheme: WeightScheme) -> None:
    block = quantization_config(dict.fromkeys(linear_names(), scheme), ["lm_head"])
    claims = claims_of(block)
    for name in linear_names():
        claim = claims(name)
        assert claim is not None and claim.scheme == scheme
    assert claims("lm_head") is None


def test_mixed_groups_and_patterns_mean_what_the_reader_takes_them_for() -> None:
    names = linear_names()
    block = quantization_config(
        {name: SCHEMES[index % len(SCHEMES)] for index, name in enumerate(names)}, ["lm_head"]
    )
    block["config_groups"]["group_9"] = {**block["config_groups"]["group_0"], "targets": ["Linear"]}
    block["ignore"] += ["re:.*layers.1.mlp", names[0]]
    config, claims = parse_config(block), claims_of(block)
    for name in (*names, "lm_head", "model.layers.7.other", "model.layers.10.mlp.up_proj"):
        claim = claims(name)
        assert (None if claim is None else claim.scheme) == config.scheme_for(name), name


def test_thousands_of_names_are_looked_up() -> None:
    names = [f"model.layers.{n // 256}.mlp.experts.{n % 256}.up_proj" for n in range(20_000)]
    schemes = {name: SCHEMES[index % 2] for index, name in enumerate(names)}
    claims = claims_of(quantization_config(schemes, [f"x.{name}" for name in names]))
    begin = time.perf_counter()
    assert all(claims(name) is not None for name in names)
    assert time.perf_counter() - begin < 5, "by comparison with each it takes minutes"


def test_gptq_overrides_single_modules() -> None:
    block = make_draft("gptq").block
    block["dynamic"] = {
        r"-:.*layers\.0\.mlp.*": {},
        r"+:.*down_proj": {"bits": 8, "group_size": -1},
    }
    assert _describe(block, "model.layers.0.mlp.up_proj") is None
    assert _describe(block, "model.layers.0.mlp.down_proj") is None, "the first that fits holds"
    assert _describe(block, "model.layers.1.mlp.down_proj") == "W8 sym channel"
    assert _describe(block, "model.layers.1.mlp.up_proj") == "W4 sym g32"
    assert _describe(block, "lm_head") is None


def test_gptq_may_list_what_is_quantized() -> None:
    block = make_draft("gptq").block
    block["modules_in_block_to_quantize"] = [["self_attn.q_proj"], ["mlp.up_proj"]]
    assert _describe(block, "model.layers.1.mlp.up_proj") == "W4 sym g32"
    assert _describe(block, "model.layers.1.mlp.gate_up_proj") is None


def test_awq_leaves_out_by_parts_of_names_and_modelopt_by_wildcards() -> None:
    awq = make_draft("awq").block
    awq["modules_to_not_convert"] = ["gate"]
    assert _describe(awq, "model.layers.1.mlp.gate_proj") is None
    assert _describe(awq, "model.layers.1.mlp.up_proj") is not None
    modelopt = make_draft("modelopt").block
    modelopt["quantization"]["exclude_modules"] = ["model.layers.0*", "lm_head"]
    assert _describe(modelopt, "model.layers.0.mlp.up_proj") is None
    assert _describe(modelopt, "model.layers.1.mlp.up_proj") == "FP8 tensor, static"


def test_fp8_leaves_out_by_whole_parts_of_names() -> None:
    block = make_draft("fp8").block
    block["modules_to_not_convert"] = ["model.layers.1", "lm_head"]
    assert _describe(block, "model.layers.1.mlp.up_proj") is None
    assert _describe(block, "model.layers.11.mlp.up_proj") == "FP8 block, dynamic"


def test_old_names_of_awqs_keys_are_known() -> None:
    block = {"quant_method": "awq", "w_bit": 4, "q_group_size": 128, "zero_point": True}
    assert _describe(block, "model.layers.0.mlp.up_proj") == "W4 asym g128"


@pytest.mark.parametrize(
    ("block", "says"),
    [
        ({"quant_method": "hqq"}, "known are compressed-tensors"),
        ({}, "quant_method None"),
        ({"quant_method": "awq", "bits": 4}, "group_size"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "rules are there for FP8"),
        ({"quant_method": "fp8", "weight_block_size": [0, 128]}, "blocks of"),
        ({"quant_method": "gptq", "bits": 99, "group_size": 32, "sym": True}, "99 bits"),
    ],
)
def test_what_cannot_be_understood_is_named(block: dict[str, Any], says: str) -> None:
    with pytest.raises(CheckpointError, match=says):
        claims_of(block)
