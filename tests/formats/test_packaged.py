"""Models in packages: joined exactly once, exactly right, or not at all."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from qtool.errors import ModelError
from qtool.formats.packaged import PackagedModel, packaged_file

CONTENT = (b"GGUF" + bytes(range(256)) * 10, b"second", b"", b"the end")


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PackagedModel:
    """A model in four installed packages."""
    for index, content in enumerate(CONTENT):
        data = tmp_path / "site" / f"tiny_part{index}" / "data"
        data.mkdir(parents=True)
        (data.parent / "__init__.py").write_text("raise AssertionError('imported')")
        (data / f"tiny.part{index}").write_bytes(content)
    monkeypatch.syspath_prepend(tmp_path / "site")
    return PackagedModel(
        name="tiny",
        install="pip install tiny",
        parts=tuple((f"tiny_part{index}", f"data/tiny.part{index}") for index in range(4)),
        joined="tiny.gguf",
        sha256=hashlib.sha256(b"".join(CONTENT)).hexdigest(),
    )


def test_parts_are_joined_once_without_importing_the_packages(
    model: PackagedModel, tmp_path: Path
) -> None:
    first = packaged_file(model, tmp_path / "cache")
    assert first.read_bytes() == b"".join(CONTENT)
    stat = first.stat()
    second = packaged_file(model, tmp_path / "cache")
    assert second == first
    assert (second.stat().st_ino, second.stat().st_mtime_ns) == (stat.st_ino, stat.st_mtime_ns)
    assert list((tmp_path / "cache").iterdir()) == [first]


@pytest.mark.parametrize("damaged", [b"", b"secon", b"Second", b"secondx"])
def test_a_damaged_part_is_refused_and_nothing_is_left(
    damaged: bytes, model: PackagedModel, tmp_path: Path
) -> None:
    (tmp_path / "site" / "tiny_part1" / "data" / "tiny.part1").write_bytes(damaged)
    with pytest.raises(ModelError, match="damaged.* run: pip install tiny --force-reinstall"):
        packaged_file(model, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_missing_part_is_named_with_the_command(model: PackagedModel, tmp_path: Path) -> None:
    (tmp_path / "site" / "tiny_part3" / "data" / "tiny.part3").unlink()
    with pytest.raises(ModelError, match=r"tiny_part3 holds no data/tiny\.part3; run: pip install"):
        packaged_file(model, tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_a_missing_package_is_named_with_the_command(model: PackagedModel, tmp_path: Path) -> None:
    (tmp_path / "site" / "tiny_part2").rename(tmp_path / "site" / "elsewhere")
    with pytest.raises(ModelError, match="package tiny_part2, .*run: pip install tiny$"):
        packaged_file(model, tmp_path / "cache")
