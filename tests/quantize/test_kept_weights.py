"""``--method none``: every tensor of the source as it was, and a word of the cache."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from qtool.calibration.families import find_family
from qtool.calibration.products import rounded_products
from qtool.calibration.walk import Walk
from qtool.errors import QuantizationError, UsageError
from qtool.formats.checkpoint import CheckpointReader
from qtool.formats.kv_plan import KV_PLAN_PATH, KVPlan, read_kv_plan
from qtool.quantize import assemble, blocks
from qtool.quantize.kv_cache import CacheTask
from qtool.quantize.options import QuantizeOptions
from qtool.quantize.pipeline import Evaluated, Progress, quantize_model
from qtool.quantize.prepare import plan_job, result_bytes

ModelFactory = Callable[..., Path]

SCALES = ("k_scale", "v_scale")


def _options(kv_cache: str, **settings: Any) -> QuantizeOptions:
    # This file is a real text, and much shorter to tokenize than the built-in one.
    values = {"calibration": (__file__,), "samples": 4, "seq_len": 32, "device": "cpu"}
    return QuantizeOptions(**{"method": "none", "kv_cache": kv_cache, **values, **settings})


def _plan(task: CacheTask) -> KVPlan:
    """The same form in all layers."""
    return KVPlan.uniform(task.asked, _json(task.folder / "config.json")["num_hidden_layers"])


def _tensors(folder: Path) -> dict[str, Tensor]:
    return {k: v for path in folder.glob("*.safetensors") for k, v in load_file(path).items()}


def _bits(tensor: Tensor) -> tuple[torch.dtype, torch.Size, bytes]:
    return tensor.dtype, tensor.shape, tensor.contiguous().view(torch.uint8).numpy().tobytes()


def _json(path: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return value


def _bytes(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != "run.json")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def _odd_folder(factory: ModelFactory) -> Path:
    """A tied model in bfloat16 that stores its head, with a norm in float32 and a -0."""
    folder = factory(dtype=torch.bfloat16)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.norm.weight"] = tensors["model.norm.weight"].float() + 2**-20
    tensors["model.layers.0.input_layernorm.weight"] = (
        tensors["model.layers.0.input_layernorm.weight"].float() + 2**-20
    )
    tensors["model.layers.1.mlp.up_proj.weight"][0, 0] = -0.0
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


SOURCES: dict[str, Callable[[ModelFactory], Path]] = {
    "tied": lambda factory: factory(dtype=torch.float16),
    "untied, sharded, with biases": lambda factory: factory(
        tie=False, bias=True, dtype=torch.bfloat16, max_shard_size="60KB"
    ),
    "tied, with a head, in two dtypes": _odd_folder,
    "a mixture of experts": lambda factory: factory(
        model_type="qwen2_moe", num_experts=4, moe_intermediate_size=32, decoder_sparse_step=1
    ),
}


@pytest.mark.parametrize("kv_cache", ["fp8", "int8", "int4"])
@pytest.mark.parametrize("source", SOURCES)
def test_every_tensor_has_the_name_the_dtype_and_the_bytes_of_the_source(
    source: str, kv_cache: str, model_factory: ModelFactory, tmp_path: Path
) -> None:
    folder = SOURCES[source](model_factory)
    report = quantize_model(folder, tmp_path / "q", _options(kv_cache), planner=_plan)
    ours, theirs = _tensors(tmp_path / "q"), _tensors(folder)
    added = {name for name in ours if name.endswith(SCALES)}
    assert len(added) == (4 if kv_cache == "fp8" else 0)
    assert ours.keys() - added == theirs.keys()
    assert {n: _bits(t) for n, t in theirs.items()} == {n: _bits(ours[n]) for n in theirs}
    assert report.verified_tensors == len(ours) and report.modules == ()


@pytest.mark.parametrize("kv_cache", ["int8", "k8v4", "auto"])
def test_a_plan_that_needs_factors_for_keys_is_refused_where_nobody_makes_them(
    kv_cache: str, tiny_model_folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=f"kv_cache='{kv_cache}': needs a planner"):
        quantize_model(tiny_model_folder, tmp_path / "q", _options(kv_cache, seq_len=256))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kv_cache", ["int4", "int8", "k8v4"])
def test_a_plan_leaves_the_config_of_a_plain_model(
    kv_cache: str, model_factory: ModelFactory, tmp_path: Path
) -> None:
    folder = model_factory(dtype=torch.bfloat16)
    config = _json(folder / "config.json") | {"_name_or_path": "/somewhere/else"}
    (folder / "config.json").write_text(json.dumps(config))
    quantize_model(folder, tmp_path / "q", _options(kv_cache), planner=_plan)
    del config["_name_or_path"]
    assert _json(tmp_path / "q" / "config.json") == config
    plan = read_kv_plan(tmp_path / "q")
    assert plan is not None and plan.layers == (kv_cache,) * 2


def test_scales_are_declared_by_a_block_without_groups(
    tiny_model_folder: Path, tmp_path: Path
) -> None:
    """As the reference package writes a model of which only the cache is quantized."""
    from compressed_tensors.quantization import QuantizationConfig

    quantize_model(tiny_model_folder, tmp_path / "q", _options("fp8"))
    config = _json(tmp_path / "q" / "config.json")
    block = config.pop("quantization_config")
    assert config == _json(tiny_model_folder / "config.json")
    assert (block["format"], block["config_groups"], block["ignore"]) == ("dense", {}, [])
    assert block["quantization_status"] == "compressed"
    scheme = QuantizationConfig.model_validate(block).kv_cache_scheme
    assert scheme is not None and (scheme.num_bits, scheme.type) == (8, "float")
    assert (scheme.strategy, scheme.symmetric, scheme.dynamic) == ("tensor", True, False)
    assert not (tmp_path / "q" / KV_PLAN_PATH).exists()


def test_scales_are_those_of_the_weights_as_they_are(
    model_factory: ModelFactory, tmp_path: Path
) -> None:
    """The arithmetic of every method's scales, on the walk of a model nobody has rounded."""
    folder, options = model_factory(layers=3, dtype=torch.bfloat16), _options("fp8")
    ids: list[Tensor] = []
    open_walk = blocks.Walk

    def noting(*arguments: Any, **settings: Any) -> Walk:
        ids.append(settings["ids"])
        return open_walk(*arguments, **settings)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "Walk", noting)
        quantize_model(folder, tmp_path / "q", options)
    tensors = _tensors(tmp_path / "q")
    with CheckpointReader(folder) as reader, torch.no_grad(), rounded_products():
        family = find_family(reader.config)
        walk = Walk(reader, family, torch.device("cpu"), ids=ids[0], watch_cache=True)
        for index in range(3):
            walk.advance()
            peaks = walk.cache_peaks
            assert peaks is not None
            for name, peak in zip(SCALES, (peaks.key, peaks.value), strict=True):
                expected = torch.tensor([peak / 448]).to(torch.bfloat16)
                assert torch.equal(tensors[f"model.layers.{index}.self_attn.{name}"], expected)


def test_no_text_passes_the_blocks_where_nothing_of_it_is_asked(
    tiny_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(*_: Any, **__: Any) -> Any:
        raise AssertionError("nobody asked for this")

    monkeypatch.setattr(blocks, "Walk", forbidden)
    options = _options("int4", eval_text=__file__, eval_windows=1)
    report = quantize_model(tiny_model_folder, tmp_path / "q", options, evaluator=forbidden)
    assert report.evaluation is None and report.calibration is None


def test_held_out_text_is_kept_for_the_cache_and_goes_through_no_block(
    tiny_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The original's logits are the result's: what would be compared is known."""
    seen: list[tuple[bool, bool]] = []
    open_walk = blocks.Walk

    def noting(*arguments: Any, **settings: Any) -> Walk:
        seen.append((settings["ids"] is not None, settings["held_out"] is not None))
        return open_walk(*arguments, **settings)

    monkeypatch.setattr(blocks, "Walk", noting)
    told: list[int] = []

    def plan(task: Any) -> Any:
        told.append(len(task.held_out.ids))
        return read_plan

    from qtool.formats.kv_plan import KVPlan

    read_plan = KVPlan.uniform("fp8", 2)
    options = _options("fp8", eval_text=__file__, eval_windows=2)
    quantize_model(
        tiny_model_folder,
        tmp_path / "q",
        options,
        evaluator=lambda *_: Evaluated("e", {}),
        planner=plan,
    )
    assert seen == [(True, False)] and told == [2]


def test_the_work_folder_holds_scales_and_no_weights(
    model_factory: ModelFactory, tmp_path: Path
) -> None:
    source = model_factory(layers=4)
    _stopped(source, tmp_path / "q", 3, "fp8")
    found = {}
    for path in (tmp_path / "q.work").glob("block-*.safetensors"):
        found |= load_file(path)
    names = {f"model.layers.{i}.self_attn.{name}" for i in range(3) for name in SCALES}
    assert found.keys() == names


def _stopped(source: Path, out: Path, count: int, kv_cache: str) -> None:
    def stop(step: Progress) -> None:
        if step.phase == "quantize" and step.done == count:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize_model(source, out, _options(kv_cache), stop, planner=_plan)


@pytest.mark.parametrize("kv_cache", ["fp8", "int8", "int4"])
@pytest.mark.parametrize("count", [2, 4])
def test_a_run_that_was_stopped_gives_the_bytes_of_one_that_was_not(
    count: int, kv_cache: str, model_factory: ModelFactory, tmp_path: Path
) -> None:
    source = model_factory(layers=4)
    quantize_model(source, tmp_path / "whole", _options(kv_cache), planner=_plan)
    _stopped(source, tmp_path / "q", count, kv_cache)
    steps: list[Progress] = []
    quantize_model(source, tmp_path / "q", _options(kv_cache), steps.append, planner=_plan)
    counted = [(s.done, s.detail) for s in steps if s.phase == "quantize"]
    assert counted[0] == (count, "done before")
    assert [detail for _, detail in counted[1:]] == [
        f"model.layers.{index}: weights as they are" for index in range(count, 4)
    ]
    assert _bytes(tmp_path / "q") == _bytes(tmp_path / "whole")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["q", "whole"]


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "model.layers.1.mlp.up_proj.weight"])
def test_a_weight_that_is_not_finite_is_named_and_nothing_is_left(
    name: str, model_factory: ModelFactory, tmp_path: Path
) -> None:
    folder = model_factory()
    tensors = load_file(folder / "model.safetensors")
    tensors[name][3, 5] = float("nan")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(QuantizationError, match=f"{name} holds NaN.*repair it"):
        quantize_model(folder, tmp_path / "q", _options("int4"))
    assert list(tmp_path.iterdir()) == []


def test_one_tensor_is_in_memory_at_a_time(
    model_factory: ModelFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = model_factory(layers=4, max_shard_size="100KB")
    read, alive = assemble._read_kept, list[weakref.ref[Tensor]]()
    most: list[int] = []

    def watched(*arguments: Any) -> Tensor:
        tensor = read(*arguments)
        alive.append(weakref.ref(tensor))
        most.append(sum(t.nbytes for ref in alive if (t := ref()) is not None))
        return tensor

    monkeypatch.setattr(assemble, "_read_kept", watched)
    quantize_model(source, tmp_path / "q", _options("int4"))
    largest = max(tensor.nbytes for tensor in _tensors(source).values())
    # Checked before work, and written: each reads every tensor.
    assert len(most) == 2 * len(_tensors(source))
    assert max(most) <= 2 * largest


def test_the_disk_it_takes_is_known_before(model_factory: ModelFactory, tmp_path: Path) -> None:
    source = _odd_folder(model_factory)
    with CheckpointReader(source) as reader:
        forecast = result_bytes(plan_job(reader, _options("int4")))
    report = quantize_model(source, tmp_path / "q", _options("int4"))
    assert forecast == report.total_bytes
    assert report.bits_per_weight == report.bits_per_parameter


def test_figures_of_a_plain_model_are_those_of_its_dtype(
    model_factory: ModelFactory, tmp_path: Path
) -> None:
    folder = model_factory(dtype=torch.bfloat16, tie=False)
    quantize_model(folder, tmp_path / "q", _options("int4"))
    report = _json(tmp_path / "q/qtool/report.json")
    assert report["bits_per_weight"] == report["bits_per_parameter"] == 16.0
    assert (report["dtype"], report["format"], report["scheme"]) == (
        "bfloat16",
        "safetensors",
        None,
    )
