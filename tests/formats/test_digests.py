"""One flipped byte has a name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from qtool.errors import CheckpointError
from qtool.formats import digests
from qtool.formats.digests import DIGESTS_PATH, changed_tensors, digests_json, read_digests
from qtool.formats.reader import CheckpointReader
from qtool.formats.safetensors_file import tensor_digest
from qtool.formats.validation.validate import validate
from support.drafts import make_draft


def _checkpoint(folder: Path) -> tuple[Path, dict[str, str]]:
    make_draft("pack-quantized").write(folder)
    with CheckpointReader(folder) as reader:
        written = {name: tensor_digest(reader.get(name)) for name in reader.names()}
    (folder / "qtool").mkdir()
    (folder / DIGESTS_PATH).write_text(json.dumps(digests_json(written)))
    return folder, written


def _flip_last_byte(folder: Path) -> str:
    """Damage the tensor that lies last in the file; returns its name."""
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    del header["__metadata__"]
    data[-1] ^= 1
    path.write_bytes(data)
    return max(header, key=lambda name: header[name]["data_offsets"][1])


@pytest.mark.parametrize("mapped_bytes", [1, digests.MAPPED_BYTES])
def test_a_flipped_bit_is_found_with_its_tensor(
    mapped_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digests, "MAPPED_BYTES", mapped_bytes)
    folder, written = _checkpoint(tmp_path)
    assert read_digests(folder) == written and validate(folder) == ()
    name = _flip_last_byte(folder)
    with CheckpointReader(folder) as reader:
        assert list(changed_tensors(reader, written)) == [name]
    (finding,) = validate(folder)
    assert (finding.level, finding.check, finding.where) == ("error", "digests", name)
    assert "other bytes" in finding.value and "copy the checkpoint again" in finding.remedy


def test_tensors_that_came_or_went_are_named(tmp_path: Path) -> None:
    folder, written = _checkpoint(tmp_path)
    lost = written | {"model.lost.weight": "0" * 64}
    new = lost.pop("model.norm.weight")
    assert new
    (folder / DIGESTS_PATH).write_text(json.dumps(digests_json(lost)))
    found = {finding.where: finding.value for finding in validate(folder)}
    assert found == {"model.lost.weight": "is missing", "model.norm.weight": "was not there"}


def test_a_later_kind_of_file_is_no_obstacle_and_a_damaged_one_is_an_error(tmp_path: Path) -> None:
    folder, _ = _checkpoint(tmp_path)
    (folder / DIGESTS_PATH).write_text(json.dumps({"version": 99}))
    assert read_digests(folder) is None and validate(folder) == ()
    for text in (json.dumps({"version": 1}), "{"):
        (folder / DIGESTS_PATH).write_text(text)
        with pytest.raises(CheckpointError):
            read_digests(folder)
        assert [finding.check for finding in validate(folder)] == ["digests"]
