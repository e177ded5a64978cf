"""Model folders: streamed out whole or not at all, and read only when everything fits."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from qtool.errors import CheckpointError
from qtool.formats.checkpoint import CheckpointReader, CheckpointWriter, check_target

CONFIG = {"model_type": "llama", "_name_or_path": "/home/somebody/model"}


def _tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {f"layer.{i}.weight": torch.randn(16, 8, generator=generator) for i in range(5)}


def _write(out: Path, *, overwrite: bool = False, shard_bytes: int = 1024) -> Path:
    """Five tensors of 512 bytes: two a shard."""
    with CheckpointWriter(out, overwrite=overwrite, max_shard_bytes=shard_bytes) as writer:
        for name, tensor in _tensors().items():
            writer.add(name, tensor)
        return writer.finish(CONFIG)


def _edit_index(folder: Path, edit: Callable[[dict[str, str]], None]) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    edit(index["weight_map"])
    path.write_text(json.dumps(index))


def test_shards_read_back_equal_and_load_with_safetensors(tmp_path: Path) -> None:
    folder = _write(tmp_path / "out")
    shards = sorted(path.name for path in folder.glob("*.safetensors"))
    assert shards == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    with CheckpointReader(folder) as reader:
        assert reader.names() == sorted(_tensors())
        for name, tensor in _tensors().items():
            assert torch.equal(reader.get(name), tensor)
            assert reader.shape(name) == (16, 8)
            assert reader.dtype(name) == torch.float32
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 5 * 512
    assert set(load_file(folder / shards[0])) == {"layer.0.weight", "layer.1.weight"}


def test_a_small_model_is_one_file_without_an_index(tmp_path: Path) -> None:
    folder = _write(tmp_path / "out", shard_bytes=10**6)
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]


def test_no_path_of_the_machine_is_written(tmp_path: Path) -> None:
    folder = _write(tmp_path / "out")
    for path in folder.iterdir():
        assert b"somebody" not in path.read_bytes()
        assert str(tmp_path).encode() not in path.read_bytes()


def test_side_files_are_copied_byte_for_byte(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    contents = {
        "tokenizer.json": b'{"a": 1}',
        "chat_template.jinja": b"{{ x }}",
        "generation_config.json": b'{"eos_token_id":[1, 2]}',
    }
    for name, content in (contents | {"pytorch_model.bin": b"x", "notes.log": b"y"}).items():
        (source / name).write_bytes(content)
    with CheckpointWriter(tmp_path / "out") as writer:
        writer.add("w", torch.zeros(1))
        writer.copy_side_files(source)
        folder = writer.finish(CONFIG)
    copied = {p.name: p.read_bytes() for p in folder.iterdir() if p.name in contents}
    assert copied == contents
    assert not (folder / "pytorch_model.bin").exists()
    assert not (folder / "notes.log").exists()


def test_an_interrupted_run_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), CheckpointWriter(tmp_path / "out") as writer:
        writer.add("w", torch.zeros(4))
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_overwriting_leaves_no_stale_shard(tmp_path: Path) -> None:
    folder = _write(tmp_path / "out")
    with CheckpointWriter(folder, overwrite=True) as writer:
        writer.add("only", torch.zeros(1))
        writer.finish(CONFIG)
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert list(tmp_path.iterdir()) == [folder]


def test_a_failed_overwrite_keeps_the_old_model(tmp_path: Path) -> None:
    folder = _write(tmp_path / "out")
    with pytest.raises(ZeroDivisionError), CheckpointWriter(folder, overwrite=True) as writer:
        writer.add("only", torch.zeros(1))
        raise ZeroDivisionError
    with CheckpointReader(folder) as reader:
        assert reader.names() == sorted(_tensors())


def test_a_name_written_twice_is_refused(tmp_path: Path) -> None:
    with (
        pytest.raises(CheckpointError, match="w is written twice"),
        CheckpointWriter(tmp_path / "out", max_shard_bytes=1) as writer,
    ):
        writer.add("w", torch.zeros(4))
        writer.add("v", torch.zeros(4))
        writer.add("w", torch.zeros(4))


class TestTargets:
    def test_an_existing_folder_needs_overwrite(self, tmp_path: Path) -> None:
        with pytest.raises(CheckpointError, match="exists; .*--overwrite"):
            check_target(tmp_path, None, overwrite=False)

    def test_the_source_is_never_the_target(self, tmp_path: Path) -> None:
        source = _write(tmp_path / "deep" / "model")
        link = tmp_path / "link"
        link.symlink_to(source)
        for out in (source, source / ".." / "model", source.parent, link):
            with pytest.raises(CheckpointError, match="is or holds the source model"):
                check_target(out, source, overwrite=True)

    def test_a_file_is_no_target(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("x")
        with pytest.raises(CheckpointError, match="is a file or a link"):
            check_target(tmp_path / "file", None, overwrite=True)
        with pytest.raises(CheckpointError, match="not a writable folder"):
            check_target(tmp_path / "file" / "out", None, overwrite=True)

    def test_overwrite_deletes_models_only(self, tmp_path: Path) -> None:
        (tmp_path / "photos").mkdir()
        (tmp_path / "photos" / "cat.jpg").write_text("x")
        with pytest.raises(CheckpointError, match="it is no model"):
            check_target(tmp_path / "photos", None, overwrite=True)


class TestDamage:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        return _write(tmp_path / "model")

    def test_a_missing_shard(self, folder: Path) -> None:
        (folder / "model-00002-of-00003.safetensors").unlink()
        with pytest.raises(CheckpointError, match="model-00002-of-00003.safetensors is missing"):
            CheckpointReader(folder)

    def test_a_truncated_shard(self, folder: Path) -> None:
        shard = folder / "model-00002-of-00003.safetensors"
        shard.write_bytes(shard.read_bytes()[:-100])
        with pytest.raises(CheckpointError, match="model-00002.* truncated"):
            CheckpointReader(folder)

    def test_an_empty_shard(self, folder: Path) -> None:
        (folder / "model-00001-of-00003.safetensors").write_bytes(b"")
        with pytest.raises(CheckpointError, match="model-00001.* 0 bytes cannot hold"):
            CheckpointReader(folder)

    def test_a_header_longer_than_the_file(self, folder: Path) -> None:
        shard = folder / "model-00001-of-00003.safetensors"
        shard.write_bytes(struct.pack("<Q", 2**40) + b"{}")
        with pytest.raises(CheckpointError, match="cannot hold a header of 1099511627776"):
            CheckpointReader(folder)

    def test_a_tensor_missing_from_its_shard(self, folder: Path) -> None:
        _edit_index(folder, lambda names: names.update(ghost="model-00001-of-00003.safetensors"))
        with pytest.raises(CheckpointError, match="tensor ghost is not in model-00001"):
            CheckpointReader(folder)

    def test_a_tensor_missing_from_the_index(self, folder: Path) -> None:
        _edit_index(folder, lambda names: names.pop("layer.0.weight"))
        with pytest.raises(CheckpointError, match="layer.0.weight lies unlisted in"):
            CheckpointReader(folder)

    def test_an_index_that_leaves_the_folder(self, folder: Path) -> None:
        _edit_index(folder, lambda names: names.update(x="../other/model.safetensors"))
        with pytest.raises(CheckpointError, match="never a path"):
            CheckpointReader(folder)

    def test_shards_of_another_export_without_an_index(self, folder: Path) -> None:
        (folder / "model.safetensors.index.json").unlink()
        with pytest.raises(CheckpointError, match="found model-00001"):
            CheckpointReader(folder)

    def test_pickle_files_are_refused_by_name(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text("{}")
        (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04")
        with pytest.raises(CheckpointError, match=r"pickle files \(pytorch_model.bin\)"):
            CheckpointReader(tmp_path)

    @pytest.mark.parametrize("text", ["", "[1]", "{"])
    def test_a_config_that_is_no_json_object(self, folder: Path, text: str) -> None:
        (folder / "config.json").write_text(text)
        with pytest.raises(CheckpointError, match=r"config\.json"):
            CheckpointReader(folder)

    def test_offsets_that_contradict_the_shape(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text("{}")
        save_file({"w": torch.zeros(4)}, tmp_path / "model.safetensors")
        raw = (tmp_path / "model.safetensors").read_bytes()
        (tmp_path / "model.safetensors").write_bytes(raw.replace(b'"shape":[4]', b'"shape":[5]'))
        with pytest.raises(CheckpointError, match="damaged safetensors header"):
            CheckpointReader(tmp_path)

    def test_an_unknown_tensor_is_named(self, folder: Path) -> None:
        with (
            CheckpointReader(folder) as reader,
            pytest.raises(CheckpointError, match="no tensor q"),
        ):
            reader.get("q")


DEEP = b"[" * 200_000


def test_json_nested_without_end_is_an_error_like_any_other(tmp_path: Path) -> None:
    folder = _write(tmp_path / "m", shard_bytes=10**6)
    (folder / "config.json").write_bytes(DEEP)
    with pytest.raises(CheckpointError, match=r"config\.json cannot be read as JSON"):
        CheckpointReader(folder)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(DEEP)) + DEEP)
    with pytest.raises(CheckpointError, match="damaged safetensors header"):
        CheckpointReader(folder)
