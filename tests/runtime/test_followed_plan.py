"""What a checkpoint declares of its cache is followed, shown, and left only aloud."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from qtool import LLM, SamplingParams
from qtool.errors import CheckpointError, EngineError, UsageError
from qtool.formats.kv_plan import KV_PLAN_PATH, KVPlan
from qtool.formats.writer import dump_json
from qtool.runtime.loaded_model import LoadedModel, load_model
from qtool.runtime.options import EngineOptions, ModelOptions
from qtool.runtime.startup import start_engine

MIXED = KVPlan("auto", ("int4", "wide"), 10.25, 164)


@pytest.fixture
def planned(tiny_model_folder: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "planned"
    shutil.copytree(tiny_model_folder, folder)
    return _plan(folder, MIXED)


def _plan(folder: Path, plan: KVPlan) -> Path:
    dump_json(folder / KV_PLAN_PATH, plan.to_dict())
    return folder


def _load(folder: Path, **options: object) -> LoadedModel:
    values = {"device": "cpu", "dtype": "fp32", "backend": "reference", **options}
    return load_model(folder, ModelOptions(**values))  # type: ignore[arg-type]


def test_each_layer_is_stored_as_the_plan_says(planned: Path) -> None:
    loaded = _load(planned, strict=True)
    assert [scheme.name for scheme in loaded.decoder.kv.schemes.layers] == ["int4", "wide"]
    assert loaded.decoder.kv_cache_dtype == "plan (layers: 1 int4, 1 16-bit)"
    assert loaded.kv_reason == "the checkpoint's qtool/kv_plan.json" and loaded.kv_plan == MIXED


def test_a_uniform_plan_is_the_scheme_itself(planned: Path) -> None:
    asked = _load(planned, kv_cache_dtype="int8").decoder
    followed = _load(_plan(planned, KVPlan.uniform("int8", 2)), strict=True).decoder
    assert followed.kv == asked.kv and followed.kv_cache_dtype == asked.kv_cache_dtype


@pytest.mark.parametrize("asked", ["wide", "int8"])
def test_whoever_asks_for_something_else_gets_it_and_is_told(asked: str, planned: Path) -> None:
    """As asked, so ``strict`` has nothing against it."""
    loaded = _load(planned, kv_cache_dtype=asked, strict=True)
    assert {scheme.name for scheme in loaded.decoder.kv.schemes.layers} == {asked}
    assert loaded.kv_reason == f"kv_cache_dtype {asked}"
    notes = " ".join(loaded.notes)
    assert "plan for the cache (auto: 1 int4, 1 wide) is not followed" in notes
    assert ("has not been measured on this model" in notes) == (asked == "int8")


def test_a_form_without_data_of_the_model_is_said_aloud(
    tiny_model_folder: Path, planned: Path
) -> None:
    (note,) = _load(tiny_model_folder, kv_cache_dtype="int4", strict=True).notes
    assert "int4 has not been measured on this model; qtool eval --kv-cache int4" in note
    assert not _load(tiny_model_folder, strict=True).notes
    assert not _load(tiny_model_folder, kv_cache_dtype="wide", strict=True).notes
    uniform = _plan(planned, KVPlan.uniform("int4", 2))
    assert not _load(uniform, kv_cache_dtype="int4", strict=True).notes


def test_fp8_without_scales_is_less_than_asked(tiny_model_folder: Path) -> None:
    with pytest.raises(EngineError, match="not calibrated"):
        _load(tiny_model_folder, kv_cache_dtype="fp8", strict=True)


def test_a_plan_for_another_number_of_layers_is_no_plan_for_this_model(planned: Path) -> None:
    _plan(planned, KVPlan.uniform("int8", 3))
    with pytest.raises(CheckpointError, match="3 layers, and the model has 2.*delete the file"):
        _load(planned)


def test_engine_and_load_plan_follow_it(planned: Path) -> None:
    loading = ModelOptions(device="cpu", dtype="fp32", backend="reference")
    running = start_engine(EngineOptions(model=str(planned), loading=loading, max_num_seqs=2))
    with running.engine:
        info = running.engine.info
    assert info.block_size == 64 and info.kv_tail_bytes > 0
    assert info.kv_cache_reason == "the checkpoint's qtool/kv_plan.json"
    with pytest.raises(UsageError, match="block_size=16: the int4 cache"):
        start_engine(EngineOptions(model=str(planned), loading=loading, block_size=16))


def test_llm_generates_with_it(planned: Path) -> None:
    with LLM(str(planned), device="cpu", dtype="fp32", kv_cache_memory=2**20) as llm:
        assert llm.info.kv_cache_dtype.startswith("plan (layers")
        (output,) = llm.generate(["The model"], SamplingParams(max_tokens=80, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 80
