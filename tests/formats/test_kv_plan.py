"""The plan of the cache beside the weights: what is read is what was written, or it is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from qtool.commands.cli_options import KV_CACHE_CHOICES
from qtool.errors import CheckpointError
from qtool.formats.kv_plan import (
    CHOICES,
    KV_PLAN_PATH,
    LAYER_SCHEMES,
    KVPlan,
    declared_plan,
    read_kv_plan,
)
from qtool.formats.writer import dump_json
from qtool.runtime.kv_schemes import SCHEMES

MIXED = KVPlan(
    "auto", ("int4", "wide", "int4"), 8.3, 512, {"budget": 0.005, "kl": 0.004}, {"kl": 0.0043}
)
SMOOTHED = KVPlan(
    "auto",
    ("int8", "int4", "k8v4"),
    key_exponents=(((0, 1, 8, 0), (2, 0, 0, 0)), None, ((0,) * 4, (3,) * 4)),
)
FP8_CONFIG = {
    "quantization_config": {
        "quant_method": "compressed-tensors",
        "kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": False},
    }
}


def _write(folder: Path, plan: KVPlan, **changes: Any) -> None:
    dump_json(folder / KV_PLAN_PATH, plan.to_dict() | changes)


def test_names_are_those_of_the_runtime_and_of_the_command_line() -> None:
    assert tuple(SCHEMES) == LAYER_SCHEMES
    assert CHOICES == KV_CACHE_CHOICES and set(CHOICES) < {*SCHEMES, "auto"}


@pytest.mark.parametrize("plan", [MIXED, KVPlan.uniform("int8", 4), SMOOTHED])
def test_what_is_written_is_read(plan: KVPlan, tmp_path: Path) -> None:
    assert read_kv_plan(tmp_path) is None
    _write(tmp_path, plan)
    assert read_kv_plan(tmp_path) == plan


def test_a_head_is_a_word_of_digits_and_layers_with_any_are_counted(tmp_path: Path) -> None:
    _write(tmp_path, SMOOTHED)
    written = json.loads((tmp_path / KV_PLAN_PATH).read_text())["key_exponents"]
    assert written == [["0180", "2000"], None, ["0000", "3333"]]
    assert SMOOTHED.num_smoothed == 2 and MIXED.num_smoothed == 0


def test_a_plan_of_before_there_were_exponents_is_read(tmp_path: Path) -> None:
    values = MIXED.to_dict()
    del values["key_exponents"]
    dump_json(tmp_path / KV_PLAN_PATH, values)
    assert read_kv_plan(tmp_path) == MIXED


def test_exponents_for_keys_of_another_shape_are_refused() -> None:
    SMOOTHED.check_heads(2, 4)
    MIXED.check_heads(7, 7)
    for shape in ((4, 2), (2, 8), (1, 4)):
        with pytest.raises(CheckpointError, match=r"layer 0 are \(2, 4\) by KV heads and channels"):
            SMOOTHED.check_heads(*shape)


def test_people_read_schemes_by_number_of_layers() -> None:
    assert MIXED.describe() == "auto: 2 int4, 1 wide" and not MIXED.is_uniform
    assert KVPlan.uniform("k8v4", 2).describe() == "k8v4"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 2}, "version is 2; this version of qtool reads 1"),
        ({"layers": ["int4", "int3"]}, "layers has 'int3'; a layer has one of wide, fp8"),
        ({"layers": ["int4", None]}, "layers has None"),
        ({"layers": []}, "layers is empty"),
        ({"layers": "int4"}, "layers is 'int4'; it is a list"),
        ({"name": None}, "name is None"),
        ({"bits": -1}, "is -1; each is a positive number"),
        ({"bytes_per_token": "many"}, "is 'many'"),
        ({"measured": 3}, "is 3; each is an object or null"),
        ({"key_exponents": "0123"}, "key_exponents is '0123'; it is a list, a layer an entry"),
        ({"key_exponents": [["01"]]}, "has 1 entries for 3 layers"),
        ({"key_exponents": ["01", None, None]}, "of layer 0 is 01; it is a list of strings"),
        ({"key_exponents": [None, [[0, 1]], None]}, "of layer 1 is .*; it is a list of strings"),
        ({"key_exponents": [None, ["0.5"], None]}, "of layer 1 is .*; it is a list of strings"),
        ({"key_exponents": [None, ["-1"], None]}, "of layer 1 is .*; it is a list of strings"),
        ({"key_exponents": [None, None, ["09"]]}, "of layer 2 has 9; an exponent is 0 to 8"),
        ({"key_exponents": [["01", "012"], None, None]}, r"has heads of \[2, 3\] channels"),
        ({"key_exponents": [[], None, None]}, r"has heads of \[\] channels"),
    ],
)
def test_a_damaged_plan_is_refused_with_its_place_and_a_remedy(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    _write(tmp_path, MIXED, **changes)
    with pytest.raises(CheckpointError, match=message) as error:
        read_kv_plan(tmp_path)
    assert KV_PLAN_PATH in str(error.value) and "or delete the file" in str(error.value)


def test_a_plan_for_another_model_is_refused(tmp_path: Path) -> None:
    _write(tmp_path, MIXED)
    assert declared_plan(tmp_path, {}, 3) == MIXED
    with pytest.raises(CheckpointError, match="is for 3 layers, and the model has 4"):
        declared_plan(tmp_path, {}, 4)


def test_promised_scales_are_a_plan_and_the_file_comes_first(tmp_path: Path) -> None:
    plan = declared_plan(tmp_path, FP8_CONFIG, 2)
    assert plan is not None and plan.layers == ("fp8", "fp8") and plan.source == "kv_cache_scheme"
    dynamic = json.loads(json.dumps(FP8_CONFIG).replace("false", "true"))
    assert declared_plan(tmp_path, dynamic, 2) is None
    assert declared_plan(tmp_path, {}, 2) is None
    _write(tmp_path, KVPlan.uniform("int8", 2))
    plan = declared_plan(tmp_path, FP8_CONFIG, 2)
    assert plan is not None and plan.layers == ("int8", "int8") and plan.source == KV_PLAN_PATH
