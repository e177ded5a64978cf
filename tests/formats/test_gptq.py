"""GPTQ's format, both versions, against a packer in plain Python."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from qtool.errors import CheckpointError
from qtool.formats import gptq
from qtool.formats.linears import StoredLinears
from qtool.formats.reader import TensorEntry
from qtool.formats.scheme import WeightScheme, fp8_scheme, w8a8_scheme, weight_scheme
from qtool.formats.tensor import QuantizedTensor
from support.foreign import gptq_tensors, random_grid, with_zero

MODULE = "model.layers.0.mlp.up_proj"
LABELS = {1: "gptq", 2: "gptq_v2"}


def _open(tensors: dict[str, Tensor], **block: Any) -> StoredLinears:
    entries = {
        f"{MODULE}.{name}": TensorEntry("model.safetensors", tensor.dtype, tuple(tensor.shape))
        for name, tensor in tensors.items()
    }
    return gptq.open_linears({"quant_method": "gptq", "bits": 4, "sym": False, **block}, entries)


def _read(
    tensors: dict[str, Tensor], *, version: int = 2, **block: Any
) -> tuple[QuantizedTensor, tuple[str, ...]]:
    """The weight and the notes."""
    linears = _open(tensors, checkpoint_format=LABELS[version], **block)
    return linears.read(MODULE, lambda name: tensors[name.rpartition(".")[2]]), linears.notes()


@given(
    bits=st.sampled_from([2, 4, 8]),
    groups=st.integers(1, 3),
    words=st.integers(1, 2),
    seed=st.integers(0, 1000),
    version=st.sampled_from([1, 2]),
    symmetric=st.booleans(),
    act_order=st.booleans(),
)
def test_what_plain_python_packs_dequantizes_to_its_weights(
    bits: int,
    groups: int,
    words: int,
    seed: int,
    version: int,
    symmetric: bool,
    act_order: bool,
) -> None:
    grid = random_grid(
        bits, 16 * groups, 16 * words, 16, seed, symmetric=symmetric, act_order=act_order
    )
    tensor, notes = _read(
        gptq_tensors(grid, version), version=version, bits=bits, group_size=16, sym=symmetric
    )
    assert torch.equal(tensor.dequantize(), grid.weight())
    assert tensor.scheme == weight_scheme(max(bits, 4), symmetric, 16)
    assert (tensor.order is not None) == any("act-order" in note for note in notes)


@given(
    bits=st.sampled_from([4, 8]),
    groups=st.integers(1, 3),
    group=st.sampled_from([8, 16, 40]),
    words=st.integers(1, 3),
    seed=st.integers(0, 1000),
    symmetric=st.booleans(),
)
def test_reading_and_writing_gives_the_same_bytes(
    bits: int, groups: int, group: int, words: int, seed: int, symmetric: bool
) -> None:
    version = 1 if symmetric else 2
    grid = random_grid(bits, groups * group, 8 * words, group, seed, symmetric=symmetric)
    packed = gptq_tensors(grid, version)
    block = {"bits": bits, "group_size": group, "sym": symmetric}
    tensor, _ = _read(packed, version=version, **block)
    again = gptq.pack(tensor)
    assert again.keys() == packed.keys()
    for name, expected in packed.items():
        assert again[name].dtype == expected.dtype and torch.equal(again[name], expected), name
    config = gptq.quantization_config({MODULE: tensor.scheme}, ["lm_head"])
    assert config["checkpoint_format"] == LABELS[version]
    assert {name: config[name] for name in block} == block


@pytest.mark.parametrize("zero", [0, 1, 8, 15])
@pytest.mark.parametrize("version", [1, 2])
def test_every_zero_of_an_asymmetric_file_is_read_as_meant(zero: int, version: int) -> None:
    grid = with_zero(random_grid(4, 16, 16, 8), zero)
    tensor, notes = _read(gptq_tensors(grid, version), version=version, group_size=8)
    assert torch.equal(tensor.dequantize(), grid.weight())
    assert bool(notes) == (zero == 0 and version == 1)
    assert not notes or "has no zero of 0 and stores it as 15" in notes[0]


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("version", [1, 2])
def test_a_symmetric_file_with_the_wrong_label_is_read_right_and_reported(
    bits: int, version: int
) -> None:
    grid = random_grid(bits, 16, 16, 8, symmetric=True)
    block = {"bits": bits, "group_size": 8, "sym": True}
    tensor, notes = _read(gptq_tensors(grid, version), version=3 - version, **block)
    assert torch.equal(tensor.dequantize(), grid.weight())
    assert f"the config says {LABELS[3 - version]}, but zeros are stored as in" in notes[0]
    assert MODULE in notes[0]
    _, silent = _read(gptq_tensors(grid, version), version=version, **block)
    assert silent == ()


def test_a_symmetric_file_whose_zeros_vary_is_refused() -> None:
    grid = random_grid(4, 16, 16, 8)
    with pytest.raises(CheckpointError, match=f"{MODULE}: zeros from .* sym: true"):
        _read(gptq_tensors(grid, 2), group_size=8, sym=True)
    with pytest.raises(CheckpointError, match="zeros from 6 to 6"):
        _read(gptq_tensors(with_zero(grid, 6), 2), group_size=8, sym=True)


def test_two_bits_are_widened_to_four_around_the_same_middle() -> None:
    grid = random_grid(2, 16, 16, 16, symmetric=True)
    block = {"bits": 2, "group_size": -1, "sym": True}
    tensor, _ = _read(gptq_tensors(grid, 1), version=1, **block)
    assert tensor.scheme == weight_scheme(4, True, None)
    assert tensor.codes.unique().tolist() == [6, 7, 8, 9]


class TestActOrder:
    def test_columns_are_sorted_by_group_and_come_back(self) -> None:
        grid = random_grid(4, 32, 16, 8, seed=3, act_order=True)
        tensor, _ = _read(gptq_tensors(grid, 2), group_size=8)
        assert tensor.order is not None
        assert [grid.group_of[k] for k in tensor.order.tolist()] == sorted(grid.group_of)
        x = torch.randn(3, 32, generator=torch.Generator().manual_seed(0))
        straight = x @ grid.weight().T
        reordered = x[:, tensor.order] @ tensor.in_code_order().dequantize().T
        torch.testing.assert_close(reordered, straight)

    def test_a_missing_map_is_refused_where_it_decides(self) -> None:
        packed = gptq_tensors(random_grid(4, 32, 16, 8), 2)
        del packed["g_idx"]
        assert _read(packed, group_size=8)[0].order is None
        with pytest.raises(CheckpointError, match="g_idx missing for a GPTQ weight with desc_act"):
            _read(packed, group_size=8, desc_act=True)
        whole_rows = gptq_tensors(random_grid(4, 32, 16, 32), 2)
        del whole_rows["g_idx"]
        assert _read(whole_rows, group_size=-1, desc_act=True)[0].order is None

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda g: g[:-1], "one integer for each of 32"),
            (lambda g: g.float(), "torch.float32"),
            (lambda g: g - 1, "groups -1 to 2; the scales have 4"),
            (lambda g: g + 2**30, "the scales have 4"),
            (lambda g: torch.zeros_like(g), "puts 0 to 32 features into a group"),
        ],
    )
    def test_a_map_that_is_none_is_refused(self, change: Any, message: str) -> None:
        packed = gptq_tensors(random_grid(4, 32, 16, 8), 2)
        with pytest.raises(CheckpointError, match=message):
            _read(packed | {"g_idx": change(packed["g_idx"])}, group_size=8)


def test_rules_give_single_linears_their_own_settings() -> None:
    grid = random_grid(8, 16, 16, 16)
    rules = {"-:.*down": {}, r"+:model\.layers\.0\..*up": {"bits": 8, "group_size": -1}}
    tensor, _ = _read(gptq_tensors(grid, 2), group_size=8, dynamic=rules)
    assert tensor.scheme == WeightScheme(8, False, "channel", None)
    assert torch.equal(tensor.dequantize(), grid.weight())


def test_kept_linears_are_named_by_rules() -> None:
    config = gptq.quantization_config({"a.b": weight_scheme(4, True, 8)}, ["lm_head", "a.c"])
    assert config["dynamic"] == {r"-:^a\.c$": {}}
    assert config["lm_head"] is False
    assert "dynamic" not in gptq.quantization_config({"a": weight_scheme(4, True, 8)}, ["lm_head"])


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ({"bits": 3}, "3 bits: this version reads GPTQ of 2, 4, 8"),
        ({"bits": "4"}, "4 bits"),
        ({"checkpoint_format": "marlin"}, "format 'marlin'"),
        ({"pack_dtype": "int16"}, "packed in int16"),
        ({"group_size": 7}, "group_size=7 does not divide"),
        ({"group_size": 2.5}, "group_size is 2.5"),
        ({"dynamic": {"+:(": {}}}, "no regular expression"),
        ({"dynamic": {"+:a": 3}}, "maps patterns to settings"),
    ],
)
def test_variants_that_cannot_be_read_are_refused_by_name(
    block: dict[str, Any], message: str
) -> None:
    packed = gptq_tensors(random_grid(4, 16, 16, 8), 1)
    with pytest.raises(CheckpointError, match=message):
        linears = _open(packed, **{"group_size": 8, **block})
        linears.read(MODULE, lambda name: packed[name.rpartition(".")[2]])


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("qweight", lambda t: t.to(torch.uint8), "qweight is torch.uint8"),
        ("qweight", lambda t: t[:, :8], "1 codes|codes of 4 bits take|needs"),
        ("qzeros", lambda t: t[:, :1], "16 codes of 4 bits take 2"),
        ("qzeros", lambda t: t[:0], r"of shape \[0, 2\]"),
        ("scales", lambda t: t[:, :4], r"needs \(16, 2\)"),
        ("scales", lambda t: t.to(torch.int32), "scales are floating"),
    ],
)
def test_damaged_tensors_are_refused_by_name(name: str, change: Any, message: str) -> None:
    packed = gptq_tensors(random_grid(4, 16, 16, 8), 2)
    with pytest.raises(CheckpointError, match=f"{MODULE}: .*({message})"):
        _read(packed | {name: change(packed[name])}, group_size=8)


@pytest.mark.parametrize("name", ["qzeros", "scales"])
def test_missing_tensors_are_named(name: str) -> None:
    packed = gptq_tensors(random_grid(4, 16, 16, 8), 2)
    del packed[name]
    with pytest.raises(CheckpointError, match=f"{name} missing for a GPTQ weight"):
        _read(packed, group_size=8)


@pytest.mark.parametrize(
    ("scheme", "shape", "message"),
    [
        (w8a8_scheme(), (8, 8), "integer weights alone"),
        (fp8_scheme(), (8, 8), "integer weights alone"),
        (WeightScheme(4, True, "tensor", None), (8, 8), "a scale a group or a row"),
        (weight_scheme(4, True, 4), (12, 8), "shape 12 x 8: GPTQ packs both sides by 8"),
        (weight_scheme(4, True, 4), (8, 12), "shape 8 x 12: GPTQ packs both sides by 8"),
        (weight_scheme(8, True, 4), (12, 12), None),
        (weight_scheme(4, False, None), (16, 8), None),
    ],
)
def test_what_the_format_does_not_hold_is_said(
    scheme: WeightScheme, shape: tuple[int, int], message: str | None
) -> None:
    found = gptq.obstacle(scheme, shape)
    assert found is None if message is None else found is not None and message in found


def test_asymmetric_files_come_with_a_warning_of_who_cannot_load_them() -> None:
    (warning,) = gptq.warnings([(weight_scheme(4, False, 8), (8, 8))])
    assert "vLLM and SGLang's fast kernels take symmetric" in warning
    assert gptq.warnings([(weight_scheme(4, True, 8), (8, 8))]) == ()
