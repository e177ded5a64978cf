"""Every rule has a checkpoint that breaks it and nothing else; whole ones pass for all loaders."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from qtool.formats.validation.finding import TARGETS, Finding
from qtool.formats.validation.validate import OPENING, RULES, is_valid, validate
from support.drafts import GROUP, LAYOUTS, Draft, linear_names, make_draft
from support.validation_cases import CASES, DOWN, Case, K, Q, V, make_index, make_plain, put


def _found(folder: Path, draft: Draft) -> tuple[Finding, ...]:
    return validate(draft.write(folder))


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.rule} {case.layout}")
def test_an_edit_breaks_one_rule(case: Case, tmp_path: Path) -> None:
    usual = {finding.check for finding in _found(tmp_path / "good", make_draft(case.layout))}
    draft = make_draft(case.layout)
    case.edit(draft)
    folder = draft.write(tmp_path / "bad")
    case.spoil(folder)
    found = [finding for finding in validate(folder) if finding.check not in usual - {case.rule}]
    assert {finding.check for finding in found} - case.along == {case.rule}, found
    broken = [finding for finding in found if finding.check == case.rule]
    assert {(finding.level, finding.targets) for finding in broken} == {(case.level, case.targets)}
    for target in TARGETS:
        hit = case.rule in {finding.check for finding in validate(folder, [target])}
        assert hit == (target in case.targets), target


def test_every_rule_is_broken_by_some_case() -> None:
    assert {rule.__name__.replace("_", "-") for rule in RULES} == {case.rule for case in CASES}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_whole_checkpoint_passes(layout: str, tmp_path: Path) -> None:
    found = _found(tmp_path, make_draft(layout))
    # transformers has no loader for ModelOpt, and wants the zero points unpacked; vLLM wants to be
    # asked for FBGEMM; 256 columns in blocks of 128 go over two devices and not four.
    known = {
        "modelopt": "place-of-config",
        "pack-quantized asym": "schemes",
        "fp8": "tensor-parallel",
        "fbgemm_fp8": "deprecated-method",
    }
    assert {finding.check for finding in found} <= {known.get(layout)}
    assert is_valid(found) == (layout != "modelopt")
    assert is_valid(validate(tmp_path, ["vllm", "qtool"]))


def test_findings_of_all_layers_are_one(tmp_path: Path) -> None:
    draft = make_draft("pack-quantized")
    for layer in range(2):
        del draft.tensors[f"model.layers.{layer}.mlp.up_proj.weight_scale"]
    (finding,) = _found(tmp_path, draft)
    assert (finding.where, finding.places) == ("model.layers.*.mlp.up_proj", 2)


def test_a_linear_in_one_layer_keeps_its_name(tmp_path: Path) -> None:
    draft = make_draft("pack-quantized")
    del draft.tensors[f"{DOWN}.weight_scale"]
    (finding,) = _found(tmp_path, draft)
    assert (finding.where, finding.places) == (DOWN, 1)


def test_cache_scales_of_modelopt_hang_on_projections(tmp_path: Path) -> None:
    draft = make_draft("modelopt")
    draft.block["quantization"]["kv_cache_quant_algo"] = "FP8"
    for layer in range(2):
        for letter in "kv":
            name = f"model.layers.{layer}.self_attn.{letter}_proj.{letter}_scale"
            draft.tensors[name] = torch.tensor(0.5)
    assert not validate(draft.write(tmp_path), ["vllm", "qtool"])


def test_the_missing_v_of_shared_keys_and_values_is_ignored_by_name(tmp_path: Path) -> None:
    draft = make_draft("pack-quantized")
    for name in (Q, K):
        make_plain(draft, name)
        draft.block["ignore"].append(name)
    for name in [name for name in draft.tensors if name.startswith(f"{V}.")]:
        del draft.tensors[name]
    found = validate(draft.write(tmp_path), ["vllm"])
    assert [finding.check for finding in found] == ["fused-ignore"]
    draft.block["ignore"].append(V)
    found = validate(draft.write(tmp_path), ["vllm"])
    assert [finding.check for finding in found] == ["patterns"], "a hint, not an error"


def test_two_bit_gptq_is_for_qtool_and_transformers(tmp_path: Path) -> None:
    draft = make_draft("gptq")
    draft.block["bits"] = 2
    for name in linear_names():
        n, k = draft.tensors[f"{name}.scales"].shape[1], draft.tensors[f"{name}.g_idx"].numel()
        draft.tensors[f"{name}.qweight"] = torch.zeros(k // 16, n, dtype=torch.int32)
        zeros = torch.full((k // GROUP, n // 16), 0x55555555, dtype=torch.int32)
        draft.tensors[f"{name}.qzeros"] = zeros
    found = _found(tmp_path, draft)
    assert [(finding.check, finding.targets) for finding in found] == [("schemes", ("vllm",))]


def test_eight_bits_with_zero_points_are_slow_in_vllm(tmp_path: Path) -> None:
    draft = make_draft("pack-quantized asym")
    draft.weights["num_bits"] = 8
    for name in linear_names():
        n, k = draft.tensors[f"{name}.weight_shape"].tolist()
        draft.tensors[f"{name}.weight_packed"] = torch.zeros(n, k // 4, dtype=torch.int32)
        zeros = torch.zeros(n // 4, k // GROUP, dtype=torch.int32)
        draft.tensors[f"{name}.weight_zero_point"] = zeros
    (finding,) = validate(draft.write(tmp_path), ["vllm"])
    assert (finding.level, finding.check) == ("warning", "schemes")


JUNK = (None, 0, -1, True, 1.5, "x", [], {}, [1], [[1]], {"a": 1}, ["re:("], [{}], 10**9)


def _paths(value: object, prefix: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value)  # type: ignore[arg-type]
    found = [(*prefix, key) for key, _ in items]
    for key in [path[-1] for path in found]:
        child = value[key]  # type: ignore[index]
        if isinstance(child, dict | list):
            found += _paths(child, (*prefix, key))
    return found


@pytest.mark.parametrize("layout", ["pack-quantized asym", "gptq", "awq", "fp8", "modelopt"])
def test_a_config_of_wrong_types_is_a_finding_and_no_crash(layout: str, tmp_path: Path) -> None:
    draft = make_draft(layout)
    folder = draft.write(tmp_path)
    for index, path in enumerate(_paths(draft.config)):
        for junk in JUNK[index % 3 :: 3]:
            config = json.loads(json.dumps(draft.config))
            place = config
            for key in path[:-1]:
                place = place[key]
            place[path[-1]] = junk
            put(folder, "config.json", json.dumps(config))
            validate(folder)


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda data: data[:-8], "truncated"),
        (lambda data: struct.pack("<Q", 2**60) + data[8:], "truncated"),
        (lambda data: data[:9] + b"\xff" * 20 + data[29:], "damaged"),
        (lambda data: b"", "truncated"),
    ],
    ids=["short", "header beyond the file", "no JSON", "empty"],
)
def test_a_hostile_header_is_a_finding(
    spoil: Callable[[bytes], bytes], says: str, tmp_path: Path
) -> None:
    path = make_draft("awq").write(tmp_path) / "model.safetensors"
    path.write_bytes(spoil(path.read_bytes()))
    (finding,) = validate(tmp_path)
    assert (finding.check, finding.level, finding.targets) == (OPENING, "error", TARGETS)
    assert says in str(finding)


def test_what_only_the_library_refuses_is_a_finding(tmp_path: Path) -> None:
    """Two names for one place in the file: the sizes agree."""
    path = make_draft("plain").write(tmp_path) / "model.safetensors"
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    header["model.twin.weight"] = header["model.norm.weight"]
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])
    (finding,) = validate(tmp_path)
    assert finding.check == OPENING
    assert "library refuses" in str(finding)


def test_a_tensor_in_the_wrong_shard_is_a_finding(tmp_path: Path) -> None:
    folder = make_draft("awq").write(tmp_path)
    make_index(folder, metadata={})
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.ghost.weight"] = "model-00001-of-00001.safetensors"
    path.write_text(json.dumps(index))
    (finding,) = validate(folder)
    assert finding.check == OPENING
    assert "model.ghost.weight" in str(finding)
