"""The offline flow from folder to folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from qtool.errors import CalibrationError, CheckpointError, ModelError, QtoolError, UsageError
from qtool.errors import QuantizationError as QError
from qtool.formats.checkpoint import CheckpointReader
from qtool.formats.compressed_tensors import parse_config, unpack
from qtool.quantize.options import QuantizeOptions
from qtool.quantize.pipeline import Progress, quantize_model

ModelFactory = Callable[..., Path]


def _options(method: str = "awq", **settings: Any) -> QuantizeOptions:
    # This file is a real text, and much shorter to tokenize than the built-in one.
    values = {"calibration": (__file__,), "samples": 4, "seq_len": 32, "device": "cpu"}
    return QuantizeOptions(**{"method": method, **values, **settings})


def _dequantized(folder: Path) -> dict[str, Tensor]:
    """Plain float32 weights of a result, read through the exchange format alone."""
    with CheckpointReader(folder) as reader:
        config = parse_config(reader.config["quantization_config"])
        weights: dict[str, Tensor] = {}
        for name in reader.names():
            module, _, local = name.rpartition(".")
            if local == "weight_packed":
                scheme = config.scheme_for(module)
                assert scheme is not None
                prefix = f"{module}.weight_"
                parts = {
                    other.rpartition(".")[2]: reader.get(other)
                    for other in reader.names()
                    if other.startswith(prefix)
                }
                weights[f"{module}.weight"] = unpack(parts, scheme).dequantize()
            elif not local.startswith("weight_"):
                weights[name] = reader.get(name).float()
    return weights


@pytest.mark.parametrize("method", ["rtn", "awq"])
@pytest.mark.parametrize("bits", [4, 8])
def test_the_result_is_a_compressed_tensors_folder_near_the_original(
    method: str, bits: int, tiny_model_folder: Path, tmp_path: Path
) -> None:
    report = quantize_model(tiny_model_folder, tmp_path / "q", _options(method, bits=bits))
    found = _dequantized(tmp_path / "q")
    source = load_file(tiny_model_folder / "model.safetensors")
    assert found.keys() == source.keys()
    assert len(report.modules) == 14
    if method == "rtn":
        for name, weight in source.items():
            error = (found[name] - weight).norm() / weight.norm()
            assert error < (0.12 if bits == 4 else 0.01), name


@pytest.mark.parametrize("symmetric", [True, False])
def test_rtn_rounds_every_linear_and_touches_nothing_else(
    symmetric: bool, tiny_model_folder: Path, tmp_path: Path
) -> None:
    options = _options("rtn", group_size=32, symmetric=symmetric)
    quantize_model(tiny_model_folder, tmp_path / "q", options)
    found = _dequantized(tmp_path / "q")
    for name, weight in load_file(tiny_model_folder / "model.safetensors").items():
        assert torch.equal(found[name], weight) == (not name.endswith("proj.weight")), name


@pytest.mark.parametrize("shape", [{}, {"bias": True, "kv_heads": 1, "tie": False}])
def test_awq_gives_logits_closer_to_the_original_than_rtn(
    shape: dict[str, Any], model_factory: ModelFactory, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    folder = model_factory(**shape)
    tensors = load_file(folder / "model.safetensors")
    for name in tensors:
        if name.endswith("layernorm.weight"):
            tensors[name][::7] *= 20
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    model = AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.randint(4, 384, (4, 32), generator=torch.Generator().manual_seed(1))
    errors = {}
    with torch.no_grad():
        exact = model(ids).logits
        for method in ("rtn", "awq"):
            quantize_model(folder, tmp_path / method, _options(method, samples=16))
            model.load_state_dict(_dequantized(tmp_path / method), strict=False)
            errors[method] = float((model(ids).logits - exact).square().mean())
    assert errors["awq"] < 0.95 * errors["rtn"]


def test_the_same_seed_gives_the_same_bytes(tiny_model_folder: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        quantize_model(tiny_model_folder, tmp_path / name, _options(seed=5))
    files = sorted(p.relative_to(tmp_path / "a") for p in (tmp_path / "a").rglob("*.*"))
    assert {str(path) for path in files} >= {
        "model.safetensors",
        "config.json",
        "qtool/report.json",
    }
    # Time and memory are the run's, not the result's.
    for path in (path for path in files if path.name != "run.json"):
        assert (tmp_path / "a" / path).read_bytes() == (tmp_path / "b" / path).read_bytes(), path


def test_side_files_are_copied_and_no_path_is_written(
    model_factory: ModelFactory, tmp_path: Path
) -> None:
    folder = model_factory()
    config = json.loads((folder / "config.json").read_text())
    config["_name_or_path"] = str(folder)
    (folder / "config.json").write_text(json.dumps(config))
    words = tmp_path / "words.txt"
    words.write_text("some words that are there to calibrate\n" * 60)
    quantize_model(folder, tmp_path / "q", _options(calibration=(str(words),)))
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (folder / name).read_bytes() == (tmp_path / "q" / name).read_bytes()
    for path in (tmp_path / "q").rglob("*.json"):
        assert str(tmp_path) not in path.read_text() and str(folder) not in path.read_text()
    report = json.loads((tmp_path / "q" / "qtool" / "report.json").read_text())
    assert report["calibration"]["sources"][0]["source"] == "words.txt"


@pytest.mark.parametrize("tie", [True, False])
def test_a_head_is_written_exactly_when_it_is_no_copy_of_the_embedding(
    tie: bool, model_factory: ModelFactory, tmp_path: Path
) -> None:
    folder = model_factory(tie=tie)
    if tie:  # some exporters write the copy all the same
        tensors = load_file(folder / "model.safetensors")
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    quantize_model(folder, tmp_path / "q", _options("rtn"))
    with CheckpointReader(tmp_path / "q") as reader:
        assert ("lm_head.weight" in reader) == (not tie)
        assert reader.config["tie_word_embeddings"] is tie
        assert reader.config["quantization_config"]["ignore"] == ["lm_head"]


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_everything_floating_is_stored_in_the_dtype_asked_for(
    name: str, dtype: torch.dtype, tiny_model_folder: Path, tmp_path: Path
) -> None:
    quantize_model(tiny_model_folder, tmp_path / "q", _options(dtype=name))
    with CheckpointReader(tmp_path / "q") as reader:
        dtypes = {reader.dtype(tensor) for tensor in reader.names()}
        assert dtypes == {dtype, torch.int32, torch.int64}
        assert reader.config["dtype"] == str(dtype).removeprefix("torch.")


def test_a_sharded_source_gives_the_same_result_as_a_single_file(
    model_factory: ModelFactory, tmp_path: Path
) -> None:
    one, many = model_factory(), model_factory(max_shard_size="100KB")
    assert len(list(many.glob("*.safetensors"))) > 1
    for folder, out in ((one, "one"), (many, "many")):
        quantize_model(folder, tmp_path / out, _options())
    first, second = _dequantized(tmp_path / "one"), _dequantized(tmp_path / "many")
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_progress_counts_up_to_the_number_of_blocks(
    tiny_model_folder: Path, tmp_path: Path
) -> None:
    steps: list[Progress] = []
    quantize_model(tiny_model_folder, tmp_path / "q", _options(), steps.append)
    assert [(s.done, s.total) for s in steps if s.phase == "quantize"] == [(1, 2), (2, 2)]
    assert steps[0].phase == "calibration"


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"group_size": 48}, QError, "48 does not divide"),
        ({"calibration": ("/nowhere.txt",)}, CalibrationError, "does not exist"),
        ({"samples": 10**6}, CalibrationError, "tokens"),
        ({"bits": 3}, UsageError, "portable widths are 4 and 8"),
    ],
)
def test_what_cannot_work_is_refused_before_work_and_leaves_nothing(
    settings: dict[str, Any],
    error: type[QtoolError],
    message: str,
    tiny_model_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_work(*_: object) -> None:
        raise AssertionError("work began")

    monkeypatch.setattr("qtool.quantize.pipeline.quantize_blocks", no_work)
    with pytest.raises(error, match=message):
        quantize_model(tiny_model_folder, tmp_path / "q", _options(**settings))
    assert list(tmp_path.iterdir()) == []


def test_the_source_is_never_the_output_by_whatever_name(
    model_factory: ModelFactory, tmp_path: Path
) -> None:
    folder = model_factory()
    before = (folder / "model.safetensors").read_bytes()
    (tmp_path / "link").symlink_to(folder)
    for out in (folder, folder / ".." / folder.name, tmp_path / "link", folder.parent):
        with pytest.raises(CheckpointError):
            quantize_model(folder, out, _options("rtn", overwrite=True))
    assert (folder / "model.safetensors").read_bytes() == before


def test_an_existing_output_is_replaced_only_on_request(
    tiny_model_folder: Path, tmp_path: Path
) -> None:
    quantize_model(tiny_model_folder, tmp_path / "q", _options("rtn"))
    with pytest.raises(CheckpointError, match="overwrite"):
        quantize_model(tiny_model_folder, tmp_path / "q", _options("rtn"))
    quantize_model(tiny_model_folder, tmp_path / "q", _options("rtn", bits=8, overwrite=True))
    with CheckpointReader(tmp_path / "q") as reader:
        group = reader.config["quantization_config"]["config_groups"]["group_0"]
        assert group["weights"]["num_bits"] == 8


def test_a_quantized_source_and_an_unknown_family_are_refused(
    model_factory: ModelFactory, tmp_path: Path
) -> None:
    folder = model_factory()
    quantize_model(folder, tmp_path / "q", _options("rtn"))
    with pytest.raises(QError, match="already quantized"):
        quantize_model(tmp_path / "q", tmp_path / "again", _options("rtn"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "mamba"}))
    with pytest.raises(ModelError, match="mamba.*supported are .*llama"):
        quantize_model(folder, tmp_path / "again", _options("rtn"))
    assert not (tmp_path / "again").exists()


@pytest.mark.parametrize("method", ["rtn", "awq"])
@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "model.layers.1.mlp.up_proj.weight"])
def test_a_weight_that_is_not_finite_is_named_and_nothing_is_left(
    method: str, name: str, model_factory: ModelFactory, tmp_path: Path
) -> None:
    folder = model_factory()
    tensors = load_file(folder / "model.safetensors")
    tensors[name][3, 5] = float("inf")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(QError, match=name.replace(".", r"\.")):
        quantize_model(folder, tmp_path / "q", _options(method))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("method", ["rtn", "gptq", "awq"])
def test_a_scale_beyond_float16_is_named_before_it_spoils_anything(
    method: str, model_factory: ModelFactory, tmp_path: Path
) -> None:
    folder = model_factory()
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.mlp.gate_proj.weight"][3, 5] = 2e6
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    rule = r"layers\.0\.mlp\.gate_proj: .* a scale is beyond torch\.float16; .*--dtype bf16"
    with pytest.raises(QError, match=rule):
        quantize_model(folder, tmp_path / "q", _options(method, dtype="fp16"))
    assert list(tmp_path.iterdir()) == []
    quantize_model(folder, tmp_path / "q", _options(method, dtype="bf16"))
    assert all(weight.isfinite().all() for weight in _dequantized(tmp_path / "q").values())


def test_what_is_not_finite_is_not_said_to_be_too_large(
    model_factory: ModelFactory, tmp_path: Path
) -> None:
    folder = model_factory()
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][3, 5] = float("nan")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(QError, match="embed_tokens.weight holds 1 values that are NaN"):
        quantize_model(folder, tmp_path / "q", _options("rtn"))


def test_blocks_that_the_config_does_not_count_are_refused_and_not_lost(
    model_factory: ModelFactory, tmp_path: Path
) -> None:
    folder = model_factory()
    tensors = load_file(folder / "model.safetensors")
    ahead = {n.replace("layers.1.", "layers.2."): t.clone() for n, t in tensors.items()}
    save_file(tensors | ahead, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(QError, match=r"model\.layers\.2\..* and 8 more tensors .* of the 2 blocks"):
        quantize_model(folder, tmp_path / "q", _options("rtn"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(
    ("method", "group_size"),
    [
        *(("rtn", size) for size in (32, 64, 128, "row")),
        *(("rtn+clip", 64), ("gptq", 32), ("awq", 128), ("awq+gptq", "row")),
    ],
)
def test_every_grid_of_weights_goes_through_every_method_and_the_files(
    method: str,
    group_size: int | str,
    symmetric: bool,
    bits: int,
    model_factory: ModelFactory,
    tmp_path: Path,
) -> None:
    folder = model_factory(layers=1, hidden_size=128)
    asked = {"bits": bits, "symmetric": symmetric, "group_size": group_size}
    options = _options(method, **asked, eval_windows=0, strict=True)
    report = quantize_model(folder, tmp_path / "q", options)
    span = "channel" if group_size == "row" else f"g{group_size}"
    words = f"W{bits} {'sym' if symmetric else 'asym'} {span} {method}"
    assert {record.used for record in report.modules} == {words}
    source, found = load_file(folder / "model.safetensors"), _dequantized(tmp_path / "q")
    for name in (record.name for record in report.modules):
        if method in ("rtn", "rtn+clip"):  # others rewrite what they round
            original = source[f"{name}.weight"]
            error = float((found[f"{name}.weight"] - original).norm() / original.norm())
            assert error < (0.15 if bits == 4 else 0.01), name


def test_a_stop_in_the_middle_leaves_the_finished_blocks_and_nothing_like_a_model(
    tiny_model_folder: Path, tmp_path: Path
) -> None:
    def stop(step: Progress) -> None:
        if step.phase == "quantize":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize_model(tiny_model_folder, tmp_path / "q", _options("rtn"), stop)
    assert [path.name for path in tmp_path.iterdir()] == ["q.work"]
    names = {path.name for path in (tmp_path / "q.work").iterdir()}
    assert names == {"run.json", "block-00000.json", "block-00000.safetensors"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"method": "magic"}, "gptq, awq"),
        ({"dtype": "int3"}, "bf16"),
        ({"device": "abacus"}, "cpu"),
        ({"samples": 0}, "at least one"),
        ({"seq_len": 1}, "at least two"),
    ],
)
def test_an_option_with_a_useless_value_is_refused_with_the_useful_ones(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        QuantizeOptions(**settings)


def test_a_group_of_zeros_survives_the_whole_trip_as_zeros(
    model_factory: ModelFactory, tmp_path: Path
) -> None:
    folder = model_factory()
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.weight"
    tensors[name][:, :64] = 0
    tensors["model.layers.1.self_attn.q_proj.weight"][5] = 0
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    quantize_model(folder, tmp_path / "q", _options(dtype="fp16"))
    found = _dequantized(tmp_path / "q")
    assert (found[name][:, :64] == 0).all()
    assert all(weight.isfinite().all() for weight in found.values())
