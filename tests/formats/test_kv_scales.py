"""Scales of the cache under every name that writers give them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from qtool.errors import CheckpointError
from qtool.formats.kv_scales import KvScales, kv_cache_scheme, kv_scale_names, read_kv_scales
from qtool.formats.reader import CheckpointReader

ATTENTION = "model.layers.3.self_attn"
ONE, TWO = torch.tensor([0.5]), torch.tensor([0.25])


def _read(folder: Path, tensors: dict[str, Tensor]) -> dict[str, KvScales]:
    (folder / "config.json").write_text("{}")
    named = {f"{ATTENTION}.{name}": tensor for name, tensor in tensors.items()}
    weights = {f"{ATTENTION}.k_proj.weight_scale": torch.ones(1)}
    save_file(named | weights, folder / "model.safetensors")
    with CheckpointReader(folder) as reader:
        assert set(kv_scale_names(reader.names())) == set(named)
        return read_kv_scales(reader)


@pytest.mark.parametrize(
    "names",
    [
        ("k_scale", "v_scale"),
        ("k_proj.k_scale", "v_proj.v_scale"),
        ("qkv_proj.k_scale", "qkv_proj.v_scale"),
        ("attn.k_scale", "attn.v_scale"),
    ],
)
@pytest.mark.parametrize("shape", [(1,), ()])
def test_all_names_mean_the_same(
    names: tuple[str, str], shape: tuple[int, ...], tmp_path: Path
) -> None:
    tensors = {name: value.reshape(shape) for name, value in zip(names, (ONE, TWO), strict=True)}
    scales = _read(tmp_path, tensors)
    assert list(scales) == [ATTENTION]
    assert torch.equal(scales[ATTENTION].key, ONE) and torch.equal(scales[ATTENTION].value, TWO)
    assert list(scales[ATTENTION].tensors()) == ["k_scale", "v_scale"]


def test_one_scale_for_both_heads_and_queries_and_zero_points(tmp_path: Path) -> None:
    scales = _read(tmp_path, {"kv_scale": ONE})[ATTENTION]
    assert torch.equal(scales.key, ONE) and torch.equal(scales.value, ONE)
    by_head = torch.rand(4, 1, 1) + 1
    zero = torch.zeros(4, 1, 1)
    tensors = {
        "k_scale": by_head,
        "v_scale": by_head.clone(),
        "q_scale": ONE,
        "k_zero_point": zero,
    }
    (tmp_path / "heads").mkdir()
    heads = _read(tmp_path / "heads", tensors)
    assert heads[ATTENTION].per_head and heads[ATTENTION].query is not None
    scheme = kv_cache_scheme(heads)
    assert scheme is not None and scheme["strategy"] == "attn_head"
    plain = kv_cache_scheme({"a": scales})
    assert plain is not None and plain["strategy"] == "tensor"
    assert kv_cache_scheme({}) is None
    with pytest.raises(CheckpointError, match="one kind"):
        kv_cache_scheme({"a": scales} | heads)


def test_the_scheme_is_one_the_reference_package_accepts() -> None:
    from compressed_tensors.quantization import QuantizationArgs

    scheme = kv_cache_scheme({"a": KvScales(ONE, TWO)})
    assert scheme is not None
    args = QuantizationArgs.model_validate(scheme)
    assert (args.num_bits, args.type, args.dynamic) == (8, "float", False)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"k_scale": ONE}, f"{ATTENTION} has scales of the cache without v_scale"),
        ({"k_scale": ONE, "k_proj.k_scale": TWO, "v_scale": ONE}, "second scale of k"),
        ({"k_scale": -ONE, "v_scale": ONE}, "scales are positive"),
        ({"k_scale": ONE * torch.nan, "v_scale": ONE}, "scales are positive"),
        ({"k_scale": torch.ones(1, dtype=torch.int8), "v_scale": ONE}, "torch.int8"),
        ({"k_scale": torch.ones(3, 2), "v_scale": ONE}, r"of shape \[3, 2\]"),
        ({"kv_scale": ONE, "k_zero_point": ONE}, "k_zero_point is not zero"),
    ],
)
def test_what_is_no_scale_of_a_cache_is_refused(
    tensors: dict[str, Tensor], message: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=message):
        _read(tmp_path, {name: value.clone() for name, value in tensors.items()})
