"""Files written tensor by tensor, held against the format's own library."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from qtool.formats.reader import read_header
from qtool.formats.safetensors_file import (
    TensorSource,
    tensor_bytes,
    tensor_digest,
    write_safetensors,
)


def _tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "é.bf16": torch.randn(3, 5, generator=generator).bfloat16(),
        "fp8": torch.randn(7, generator=generator).to(torch.float8_e4m3fn),
        "shape": torch.tensor([3, 5]),
        "scalar": torch.tensor(2.5),
        "words": torch.arange(6, dtype=torch.int32).reshape(2, 3),
        "bytes": torch.arange(3, dtype=torch.uint8),
        "empty": torch.zeros(0, 4),
        "transposed": torch.randn(4, 3, generator=generator).t(),
    }


def _source(tensor: Tensor) -> TensorSource:
    return TensorSource(tensor.dtype, tuple(tensor.shape), lambda: tensor)


def test_the_library_reads_every_tensor_back_to_the_bit(tmp_path: Path) -> None:
    tensors = _tensors()
    digests = write_safetensors(tmp_path / "f", {n: _source(t) for n, t in tensors.items()})
    found = load_file(tmp_path / "f")
    assert found.keys() == tensors.keys() == read_header(tmp_path / "f").keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape
        assert bytes(tensor_bytes(found[name])) == bytes(tensor_bytes(tensor))
        assert digests[name] == tensor_digest(found[name])


def test_the_bytes_are_those_of_the_library(tmp_path: Path) -> None:
    tensors = {name: tensor.contiguous() for name, tensor in _tensors().items()}
    # The library orders types of one width in a way of its own.
    del tensors["words"], tensors["bytes"]
    write_safetensors(tmp_path / "ours", {n: _source(t) for n, t in tensors.items()})
    save_file(tensors, tmp_path / "theirs", metadata={"format": "pt"})
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_only_one_tensor_is_in_memory_at_a_time(tmp_path: Path) -> None:
    alive = 0

    class Counted:
        def __init__(self) -> None:
            nonlocal alive
            alive += 1
            assert alive == 1

        def __del__(self) -> None:
            nonlocal alive
            alive -= 1

    def read() -> Tensor:
        tensor = torch.zeros(8)
        tensor.counted = Counted()  # type: ignore[attr-defined]
        return tensor

    sources = {str(index): TensorSource(torch.float32, (8,), read) for index in range(4)}
    write_safetensors(tmp_path / "f", sources)
    assert alive == 0


def test_a_tensor_of_another_shape_than_promised_stops_the_writer(tmp_path: Path) -> None:
    source = TensorSource(torch.float32, (2,), lambda: torch.zeros(3))
    with pytest.raises(AssertionError, match="w"):
        write_safetensors(tmp_path / "f", {"w": source})
