"""A checkpoint in another format is the same model to the bit, or it is not written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from qtool.errors import CheckpointError, UsageError
from qtool.formats import convert
from qtool.formats.affine import choose_grid, quantize
from qtool.formats.checkpoint import CheckpointWriter
from qtool.formats.convert import Conversion, convert_checkpoint
from qtool.formats.dequantized import DequantizedReader
from qtool.formats.kv_scales import read_kv_scales
from qtool.formats.registry import WRITERS
from qtool.formats.scheme import WeightScheme, fp8_scheme, w8a8_scheme, weight_scheme
from qtool.formats.tensor import QuantizedTensor
from support.foreign import awq_tensors, gptq_tensors, random_grid
from support.peers import FIXTURES

# Those that hold each fixture; every other one must say what would be lost.
CAN_BE = {
    "w4-sym-gptq": {"compressed-tensors", "awq", "gptq"},
    "w4-asym-rtn": {"compressed-tensors", "awq", "gptq"},
    "w8-sym-group": {"compressed-tensors", "gptq"},
    "w8a8-int8": {"compressed-tensors"},
    "fp8-dynamic": {"compressed-tensors"},
    "fp8-static-kv": {"compressed-tensors"},
    "gptq-v1-sym": {"compressed-tensors", "awq", "gptq"},
    "gptq-v2-asym": {"compressed-tensors", "awq", "gptq"},
    "gptq-v1-sym-descact": set(),
    "awq-gemm-asym": {"compressed-tensors", "awq", "gptq"},
}
POSSIBLE = [(name, target) for name, targets in CAN_BE.items() for target in sorted(targets)]
IMPOSSIBLE = [
    (name, target)
    for name, targets in CAN_BE.items()
    for target in WRITERS
    if target not in targets
]


def _weights(folder: Path) -> dict[str, Tensor]:
    with DequantizedReader(folder) as reader:
        return {name: reader.get(f"{name}.weight") for name in reader.linears.modules()}


def _plain(folder: Path) -> dict[str, Tensor]:
    with DequantizedReader(folder) as reader:
        taken = {
            full for m in reader.linears.modules() for full in reader.linears.parts(m).values()
        }
        return {name: reader.get(name) for name in reader.names() if name not in taken}


@pytest.mark.parametrize(("name", "target"), POSSIBLE)
def test_weights_are_the_same_to_the_bit_and_everything_else_is_copied(
    name: str, target: str, tmp_path: Path
) -> None:
    source, out = FIXTURES / name, tmp_path / "out"
    done = convert_checkpoint(source, out, target)
    assert (done.format, done.linears) == (target, 14)
    before, after = _weights(source), _weights(out)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[module], after[module]) for module in before)
    plain, copied = _plain(source), _plain(out)
    assert plain.keys() == copied.keys()
    assert all(torch.equal(plain[module], copied[module]) for module in plain)
    config = json.loads((out / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == target
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(
    ("name", "target"), [(n, t) for n, t in POSSIBLE if n.split("-")[0] in (t, "w4", "w8", "fp8")]
)
def test_there_and_back_gives_the_bytes_of_our_own_export(
    name: str, target: str, tmp_path: Path
) -> None:
    """The way over another format leaves no trace."""
    convert_checkpoint(FIXTURES / name, tmp_path / "first", "compressed-tensors")
    convert_checkpoint(tmp_path / "first", tmp_path / "other", target)
    convert_checkpoint(tmp_path / "other", tmp_path / "back", "compressed-tensors")
    for file in ("model.safetensors", "config.json"):
        first, back = (tmp_path / folder / file for folder in ("first", "back"))
        assert first.read_bytes() == back.read_bytes(), file


@pytest.mark.parametrize("name", ["gptq-v1-sym", "gptq-v2-asym", "awq-gemm-asym", "w4-asym-rtn"])
def test_the_same_format_gives_the_same_tensors_byte_for_byte(name: str, tmp_path: Path) -> None:
    target = name.split("-")[0] if name[0] != "w" else "compressed-tensors"
    convert_checkpoint(FIXTURES / name, tmp_path / "out", target)
    before = load_file(FIXTURES / name / "model.safetensors")
    after = load_file(tmp_path / "out" / "model.safetensors")
    assert before.keys() == after.keys()
    for tensor, value in before.items():
        assert value.dtype == after[tensor].dtype and torch.equal(value, after[tensor]), tensor


@pytest.mark.parametrize(("name", "target"), IMPOSSIBLE)
def test_what_would_be_lost_is_said_and_nothing_is_written(
    name: str, target: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError) as caught:
        convert_checkpoint(FIXTURES / name, tmp_path / "out", target)
    message = str(caught.value)
    assert f"cannot be {target} without loss" in message
    assert "(14 linears: model.layers.0.mlp.down_proj, " in message
    if name == "fp8-static-kv":
        assert f"FP8 scales of the cache: {target} has no place for them (2 linears" in message
    assert list(tmp_path.iterdir()) == []


def test_scales_of_the_cache_come_along(tmp_path: Path) -> None:
    convert_checkpoint(FIXTURES / "fp8-static-kv", tmp_path / "out", "compressed-tensors")
    with (
        DequantizedReader(FIXTURES / "fp8-static-kv") as before,
        DequantizedReader(tmp_path / "out") as after,
    ):
        old, new = read_kv_scales(before), read_kv_scales(after)
        assert old.keys() == new.keys()
        for attention, scales in old.items():
            assert torch.equal(scales.key, new[attention].key)
            assert torch.equal(scales.value, new[attention].value)
        assert "model.layers.0.self_attn.k_scale" in after
        block = after.config["quantization_config"]
        assert block["kv_cache_scheme"]["strategy"] == "tensor"


Make = Callable[..., Path]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """A checkpoint of some linears in a format we write."""

    def build(format: str, linears: dict[str, QuantizedTensor], **config: Any) -> Path:
        layout = WRITERS[format]
        with CheckpointWriter(tmp_path / "source", overwrite=True) as writer:
            for module, tensor in linears.items():
                for local, packed in layout.pack(tensor).items():
                    writer.add(f"{module}.{local}", packed)
            writer.add("model.norm.weight", torch.ones(4))
            schemes = {module: tensor.scheme for module, tensor in linears.items()}
            block = layout.quantization_config(schemes, ["lm_head"])
            return writer.finish({"dtype": "bfloat16", "quantization_config": block} | config)

    return build


def _tensor(
    scheme: WeightScheme, shape: tuple[int, int] = (16, 32), dtype: torch.dtype = torch.bfloat16
) -> QuantizedTensor:
    weight = torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))
    scales, zeros = choose_grid(weight, scheme, dtype)
    inputs = torch.tensor([0.5]) if scheme.has_input_scale else None
    return QuantizedTensor(quantize(weight, scales, zeros, scheme), scales, zeros, scheme, inputs)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.integers(1, 3),
    groups=st.integers(1, 3),
    group=st.sampled_from([8, 16, 24]),
    symmetric=st.booleans(),
    seed=st.integers(0, 99),
    route=st.permutations(["awq", "gptq", "compressed-tensors"]),
)
def test_any_route_through_the_formats_ends_where_it_began(
    rows: int,
    groups: int,
    group: int,
    symmetric: bool,
    seed: int,
    route: list[str],
    make: Make,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    shape, grid = (8 * rows, group * groups), (8 * rows, groups)
    codes = torch.randint(0, 16, shape, dtype=torch.uint8, generator=generator)
    zeros = torch.randint(0, 16, grid, dtype=torch.uint8, generator=generator)
    zeros[0, 0], zeros[-1, -1] = 0, 15
    if symmetric:
        zeros.fill_(8)
    scales = (torch.rand(grid, generator=generator) + 0.01).bfloat16()
    scheme = weight_scheme(4, symmetric, group)
    source = make("compressed-tensors", {"a.b": QuantizedTensor(codes, scales, zeros, scheme)})
    folder, base = source, tmp_path_factory.mktemp("route")
    for index, target in enumerate([*route, "compressed-tensors"]):
        convert_checkpoint(folder, base / str(index), target)
        folder = base / str(index)
    for file in ("model.safetensors", "config.json"):
        assert (folder / file).read_bytes() == (source / file).read_bytes()


@pytest.mark.parametrize("shape", [(16, 32), (128, 256), (150, 200)])
def test_fp8_blocks_go_to_weight_scale_inv_and_back(
    shape: tuple[int, int], make: Make, tmp_path: Path
) -> None:
    source = make("compressed-tensors", {"a": _tensor(fp8_scheme("block"), shape)})
    convert_checkpoint(source, tmp_path / "fp8", "fp8")
    stored = load_file(tmp_path / "fp8" / "model.safetensors")
    assert stored["a.weight_scale_inv"].dtype == torch.float32
    convert_checkpoint(tmp_path / "fp8", tmp_path / "back", "compressed-tensors")
    back = (tmp_path / "back" / "model.safetensors").read_bytes()
    assert back == (source / "model.safetensors").read_bytes()


class TestLosses:
    def test_scales_that_float16_would_round_are_named(self, make: Make, tmp_path: Path) -> None:
        tensor = _tensor(weight_scheme(4, True, 16), dtype=torch.float32)
        source = make("compressed-tensors", {"a": tensor}, dtype="float32")
        with pytest.raises(
            CheckpointError, match=r"scales in float32 would be rounded to float16 "
        ):
            convert_checkpoint(source, tmp_path / "out", "awq")

    def test_two_schemes_do_not_fit_one_config(self, make: Make, tmp_path: Path) -> None:
        schemes = {
            "a": weight_scheme(4, True, 16),
            "b": weight_scheme(4, True, 16),
            "c": weight_scheme(4, True, 8),
        }
        source = make("compressed-tensors", {n: _tensor(s) for n, s in schemes.items()})
        with pytest.raises(CheckpointError, match=r"W4 sym g8: .* W4 sym g16 \(1 linears: c\)"):
            convert_checkpoint(source, tmp_path / "out", "gptq")

    def test_rounded_inputs_are_part_of_the_model(self, make: Make, tmp_path: Path) -> None:
        for scheme in (w8a8_scheme(static=True), fp8_scheme("block", weight_only=True)):
            source = make("compressed-tensors", {"a": _tensor(scheme)})
            for target in ("awq", "gptq", "fp8"):
                with pytest.raises(CheckpointError, match="without loss"):
                    convert_checkpoint(source, tmp_path / "out", target)

    def test_a_plain_model_has_nothing_to_convert(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text("{}")
        save_file({"a.weight": torch.zeros(2, 2)}, tmp_path / "model.safetensors")
        with pytest.raises(UsageError, match="is not quantized; qtool quantize --format awq"):
            convert_checkpoint(tmp_path, tmp_path / "out", "awq")


def test_scales_keep_their_bits_where_the_models_dtype_would_round_them(
    make: Make, tmp_path: Path
) -> None:
    tensor = _tensor(weight_scheme(4, True, 16), dtype=torch.float16)
    source = make("awq", {"a": tensor})
    done = convert_checkpoint(source, tmp_path / "out", "compressed-tensors")
    assert (
        load_file(tmp_path / "out" / "model.safetensors")["a.weight_scale"].dtype == torch.float16
    )
    assert any("as bfloat16 would round them" in note for note in done.notes)


def test_a_bound_of_inputs_is_said_to_be_gone(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    block = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}
    (source / "config.json").write_text(json.dumps({"quantization_config": block}))
    codes = torch.randn(8, 8).to(torch.float8_e4m3fn)
    save_file({"a.weight": codes, "a.weight_scale": torch.ones(8, 1)}, source / "model.safetensors")
    done = convert_checkpoint(source, tmp_path / "out", "compressed-tensors")
    assert any("activation_scale_ub" in note for note in done.notes)


@pytest.mark.parametrize("act_order", [False, True])
def test_notes_of_the_source_are_told(act_order: bool, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    grid = random_grid(4, 16, 16, 8, symmetric=True, act_order=act_order)
    block = {"quant_method": "gptq", "bits": 4, "group_size": 8, "sym": True}
    (source / "config.json").write_text(json.dumps({"quantization_config": block}))
    tensors = {f"a.{name}": tensor for name, tensor in gptq_tensors(grid, 2).items()}
    save_file(tensors, source / "model.safetensors")
    if act_order:
        with pytest.raises(CheckpointError, match="act-order: engines raise on the g_idx"):
            convert_checkpoint(source, tmp_path / "out", "gptq")
        return
    done = convert_checkpoint(source, tmp_path / "out", "gptq")
    assert "zeros are stored as in gptq_v2" in done.notes[0]
    assert torch.equal(_weights(tmp_path / "out")["a"], grid.weight())


def _convert_tampered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tamper: str) -> Conversion:
    """Convert with a disk that changes one byte of the new folder's data."""
    finish = CheckpointWriter.finish_tensors

    def damaged(self: CheckpointWriter, config: dict[str, Any]) -> Path:
        folder = finish(self, config)
        path = folder / "model.safetensors"
        raw = bytearray(path.read_bytes())
        raw[len(raw) // 2 if tamper == "data" else -1] ^= 1
        path.write_bytes(raw)
        return folder

    monkeypatch.setattr(CheckpointWriter, "finish_tensors", damaged)
    return convert_checkpoint(FIXTURES / "awq-gemm-asym", tmp_path / "out", "gptq")


@pytest.mark.parametrize("tamper", ["data", "end"])
def test_a_folder_that_does_not_read_back_is_not_published(
    tamper: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(CheckpointError, match="was read back other than it was written"):
        _convert_tampered(tmp_path, monkeypatch, tamper)
    assert list(tmp_path.iterdir()) == []


def test_a_packer_that_is_one_step_off_is_not_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from qtool.formats import gptq

    right = gptq.pack

    def wrong(tensor: QuantizedTensor) -> dict[str, Tensor]:
        packed = right(tensor)
        return packed | {"qzeros": packed["qzeros"] + 1}

    monkeypatch.setattr(gptq, "pack", wrong)
    with pytest.raises(CheckpointError, match="model.layers.0.mlp.down_proj was read back other"):
        convert_checkpoint(FIXTURES / "awq-gemm-asym", tmp_path / "out", "gptq")
    assert list(tmp_path.iterdir()) == []


def test_progress_counts_every_linear_in_each_pass(tmp_path: Path) -> None:
    steps: list[tuple[str, int, int]] = []
    convert_checkpoint(
        FIXTURES / "awq-gemm-asym",
        tmp_path / "out",
        "gptq",
        progress=lambda phase, done, total, _: steps.append((phase, done, total)),
    )
    assert steps == [(p, i, 14) for p in ("check", "write", "verify") for i in range(1, 15)]


def test_our_own_files_come_along_and_an_existing_folder_needs_overwrite(
    make: Make, tmp_path: Path
) -> None:
    source = make("compressed-tensors", {"a": _tensor(weight_scheme(4, True, 16))})
    (source / "qtool").mkdir()
    (source / "qtool" / "report.json").write_text("{}")
    (source / "tokenizer.json").write_text("{}")
    out = tmp_path / "out"
    convert_checkpoint(source, out, "gptq")
    assert (out / "qtool" / "report.json").exists() and (out / "tokenizer.json").exists()
    config = json.loads((out / "config.json").read_text())
    assert json.loads((out / "quantize_config.json").read_text()) == config["quantization_config"]
    with pytest.raises(CheckpointError, match="exists; .*--overwrite"):
        convert_checkpoint(source, out, "awq")
    convert_checkpoint(source, out, "awq", overwrite=True)
    assert not (out / "quantize_config.json").exists()
    with pytest.raises(CheckpointError, match="is or holds the source model"):
        convert_checkpoint(source, source, "awq", overwrite=True)


def test_large_models_are_written_in_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convert, "SHARD_BYTES", 50_000)
    convert_checkpoint(FIXTURES / "awq-gemm-asym", tmp_path / "out", "gptq")
    assert len(list((tmp_path / "out").glob("model-*-of-*.safetensors"))) > 3
    before, after = _weights(FIXTURES / "awq-gemm-asym"), _weights(tmp_path / "out")
    assert all(torch.equal(before[module], after[module]) for module in before)


def test_awq_of_a_grid_from_plain_python_becomes_gptq_version_2(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    grid = random_grid(4, 16, 16, 8)
    block = {"quant_method": "awq", "bits": 4, "group_size": 8}
    (source / "config.json").write_text(json.dumps({"quantization_config": block}))
    tensors = {f"a.{name}": tensor for name, tensor in awq_tensors(grid).items()}
    save_file(tensors, source / "model.safetensors")
    done = convert_checkpoint(source, tmp_path / "out", "gptq")
    stored = load_file(tmp_path / "out" / "model.safetensors")
    for name, expected in gptq_tensors(grid, 2).items():
        assert torch.equal(stored[f"a.{name}"], expected), name
    assert any("vLLM and SGLang's fast kernels take symmetric" in note for note in done.notes)
