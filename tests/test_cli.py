"""What people get wrong at the command line: a clear error, nothing written, nothing lost."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file, save_file

from qtool.cli import main
from qtool.formats import writer

ModelFactory = Callable[..., Path]


@pytest.fixture
def model(model_factory: ModelFactory, tmp_path: Path) -> Path:
    """A model of several shards that a test may damage."""
    return model_factory(tmp_path / "model", max_shard_size="100KB")


def _quantize(model: object, out: object, *options: str) -> Result:
    arguments = ["quantize", str(model), "--out", str(out), "--method", "rtn", "--device", "cpu"]
    arguments += ["--eval-windows", "0"]
    return CliRunner().invoke(main, [*arguments, *options])


def _content(folder: Path) -> dict[str, bytes]:
    """Everything under a folder: files with their bytes, links with their targets.

    Finished blocks of an unfinished run are left out: nothing takes them for a model.
    """
    return {
        str(path.relative_to(folder)): os.readlink(path).encode()
        if path.is_symlink()
        else path.read_bytes()
        if path.is_file()
        else b""
        for path in sorted(folder.rglob("*"))
        if not path.relative_to(folder).parts[0].endswith(".work")
    }


def _assert_error(result: Result, *words: str, exit_code: int = 1) -> None:
    """An error in one message that has every one of ``words``, in this order."""
    assert result.exit_code == exit_code, (result.output, result.exception)
    assert isinstance(result.exception, SystemExit), result.exception
    assert "Traceback" not in result.output
    message = result.stderr[result.stderr.lower().index("error: ") :]
    position = 0
    for word in words:
        assert word in message[position:], (word, message)
        position = message.index(word, position) + len(word)


def _edit_json(path: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    value = json.loads(path.read_text())
    edit(value)
    path.write_text(json.dumps(value))


def _shards(model: Path) -> list[Path]:
    return sorted(model.glob("*.safetensors"))


def _set_value(model: Path, name: str, value: float) -> None:
    for shard in _shards(model):
        tensors = load_file(shard)
        if name in tensors:
            tensors[name].view(-1)[3] = value
            save_file(tensors, shard, metadata={"format": "pt"})


def _unknown_architecture(model: Path) -> None:
    _edit_json(model / "config.json", lambda config: config.update(model_type="mamba"))


def _already_quantized(model: Path) -> None:
    block = {"quant_method": "gptq"}
    _edit_json(model / "config.json", lambda config: config.update(quantization_config=block))


def _no_config(model: Path) -> None:
    (model / "config.json").unlink()


def _damaged_config(model: Path) -> None:
    (model / "config.json").write_text('{"model_type":')


def _missing_shard(model: Path) -> None:
    _shards(model)[1].unlink()


def _shard_not_in_index(model: Path) -> None:
    def forget(index: dict[str, Any]) -> None:
        shard = _shards(model)[1].name
        names = index["weight_map"]
        index["weight_map"] = {name: value for name, value in names.items() if value != shard}

    _edit_json(model / "model.safetensors.index.json", forget)


def _truncated(model: Path) -> None:
    shard = _shards(model)[0]
    shard.write_bytes(shard.read_bytes()[:-1])


def _corrupt(model: Path) -> None:
    _shards(model)[0].write_bytes(b"<html>Not Found</html>" * 100)


def _pickle(model: Path) -> None:
    for path in (*_shards(model), model / "model.safetensors.index.json"):
        path.unlink()
    torch.save({}, model / "pytorch_model.bin")


def _nan(model: Path) -> None:
    _set_value(model, "model.layers.1.mlp.up_proj.weight", float("nan"))


def _infinity(model: Path) -> None:
    _set_value(model, "model.embed_tokens.weight", float("inf"))


DAMAGE = {
    _unknown_architecture: ("model_type='mamba'", "supported are", "llama"),
    _already_quantized: ("already quantized", "gptq", "start from the original"),
    _no_config: ("config.json is missing",),
    _damaged_config: ("config.json cannot be read as JSON",),
    _missing_shard: ("model-00002-of-", "is missing", "index.json names it"),
    _shard_not_in_index: ("model-00002-of-", "is not in", "copy the model again"),
    _truncated: ("model-00001-of-", "truncated", "copy it again"),
    _corrupt: ("model-00001-of-", "not safetensors", "copy it again"),
    _pickle: ("pytorch_model.bin", "can run code", "convert"),
    _nan: ("model.layers.1.mlp.up_proj.weight", "1 values that are NaN", "repair"),
    _infinity: ("model.embed_tokens.weight", "inf", "repair"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_source_is_refused_and_left_as_it_was(
    damage: Callable[[Path], None], model: Path, tmp_path: Path
) -> None:
    damage(model)
    before = _content(tmp_path)
    _assert_error(_quantize(model, tmp_path / "q"), *DAMAGE[damage])
    assert _content(tmp_path) == before


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    _assert_error(_quantize(tmp_path / "nowhere", tmp_path / "q"), "nowhere", "give one of them")
    assert _content(tmp_path) == {}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--group-size", "48"], ("group_size=48", "does not divide", "Sizes that fit", "'row'")),
        (["--lm-head", "8", "--ignore", "lm_head"], ("ignore means lm_head", "leave one")),
        (["--method", "awq", "--calibration", "nowhere.txt"], ("nowhere.txt", "does not exist")),
        (["--method", "awq", "--samples", "0"], ("samples=0", "at least one")),
    ],
)
def test_an_option_that_cannot_be_met_is_refused_before_anything_is_written(
    options: list[str], words: tuple[str, ...], model: Path, tmp_path: Path
) -> None:
    before = _content(tmp_path)
    result = _quantize(model, tmp_path / "q", *options)
    _assert_error(result, *words, exit_code=result.exit_code or 1)
    assert _content(tmp_path) == before


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--bits", "3"], ("--bits", "'3'", "'4', '8'")),
        (["--group-size", "0"], ("'0'", "auto, row")),
        (["--group-size", "many"], ("'many'", "auto, row")),
        (["--method", "magic"], ("--method", "'magic'", "'awq'")),
        (["--samples", "few"], ("--samples", "'few'")),
        (["--colour", "red"], ("--colour",)),
    ],
)
def test_a_value_no_option_takes_is_a_usage_error(
    options: list[str], words: tuple[str, ...], tmp_path: Path
) -> None:
    _assert_error(_quantize(tmp_path, tmp_path / "q", *options), *words, exit_code=2)


def test_calibration_of_a_method_without_any_is_refused(model: Path, tmp_path: Path) -> None:
    result = _quantize(model, tmp_path / "out", "--calibration", "text.txt")
    _assert_error(result, "--calibration", "rtn uses no calibration text", exit_code=2)


def test_samples_longer_than_the_model_reads_are_refused(model: Path, tmp_path: Path) -> None:
    result = _quantize(model, tmp_path / "out", "--method", "awq", "--seq-len", "300")
    _assert_error(result, "seq_len=300", "at most 256 tokens", "shorter samples", exit_code=2)
    assert not (tmp_path / "out").exists()


class TestOutput:
    def test_an_existing_folder_is_kept(self, model: Path, tmp_path: Path) -> None:
        assert _quantize(model, tmp_path / "q").exit_code == 0
        before = _content(tmp_path)
        _assert_error(_quantize(model, tmp_path / "q"), "q exists", "--overwrite")
        assert _content(tmp_path) == before

    @pytest.mark.parametrize("name", ["model", "x/../model", "./model", "link", "link/../model"])
    def test_the_source_is_never_the_output(
        self, name: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "x").mkdir()
        (tmp_path / "link").symlink_to(model)
        monkeypatch.chdir(tmp_path)
        before = _content(tmp_path)
        _assert_error(_quantize("model", name, "--overwrite"), "is or holds the source", "choose")
        assert _content(tmp_path) == before

    def test_the_source_by_a_link_is_never_the_output(self, model: Path, tmp_path: Path) -> None:
        (tmp_path / "link").symlink_to(model)
        before = _content(tmp_path)
        result = _quantize(tmp_path / "link", model, "--overwrite")
        _assert_error(result, "is or holds the source", "choose")
        assert _content(tmp_path) == before

    def test_overwrite_leaves_no_stale_shard(
        self, model: Path, model_factory: ModelFactory, tmp_path: Path
    ) -> None:
        model_factory(tmp_path / "q", max_shard_size="50KB")
        assert _quantize(model, tmp_path / "q", "--overwrite").exit_code == 0
        assert [path.name for path in _shards(tmp_path / "q")] == ["model.safetensors"]
        assert not (tmp_path / "q" / "model.safetensors.index.json").exists()
        assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "q"]

    def test_overwrite_never_deletes_what_is_no_model(self, model: Path, tmp_path: Path) -> None:
        (tmp_path / "photos").mkdir()
        (tmp_path / "photos" / "cat.jpg").write_bytes(b"cat")
        before = _content(tmp_path)
        result = _quantize(model, tmp_path / "photos", "--overwrite")
        _assert_error(result, "photos", "it is no model", "choose another folder")
        assert _content(tmp_path) == before

    @pytest.mark.parametrize("name", ["file", "file/q"])
    def test_a_file_in_the_way(self, name: str, model: Path, tmp_path: Path) -> None:
        (tmp_path / "file").write_bytes(b"text")
        before = _content(tmp_path)
        _assert_error(_quantize(model, tmp_path / name, "--overwrite"), str(tmp_path / name))
        assert _content(tmp_path) == before

    def test_a_folder_that_is_read_only(
        self, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # Tests may run as root, whom no mode stops.
        monkeypatch.setattr(os, "access", lambda *_: False)
        before = _content(tmp_path)
        result = _quantize(model, tmp_path / "q")
        _assert_error(result, "q cannot be created", "not a writable folder", "choose another")
        assert _content(tmp_path) == before

    def test_too_little_disk_is_said_before_the_work(
        self, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def no_work(*_: object) -> None:
            raise AssertionError("work began")

        usage = shutil.disk_usage(tmp_path)._replace(free=50_000)
        monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
        monkeypatch.setattr("qtool.quantize.pipeline.quantize_blocks", no_work)
        before = _content(tmp_path)
        result = _quantize(model, tmp_path / "new" / "q")
        _assert_error(result, "needs about 0.0002", "has 5e-05 GB free", "another disk")
        assert _content(tmp_path) == before

    @pytest.mark.parametrize("options", [["--bits", "8"], ["--group-size", "row"], []])
    def test_the_disk_asked_for_is_what_the_result_and_the_work_folder_take(
        self, options: list[str], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked: list[int] = []
        monkeypatch.setattr(
            "qtool.quantize.pipeline.check_free_space", lambda _, size: asked.append(size)
        )
        assert _quantize(model, tmp_path / "q", *options).exit_code == 0
        tensors = load_file(tmp_path / "q" / "model.safetensors").values()
        # Without text that flows from block to block, the work folder is as large as the result.
        assert asked == [pytest.approx(2 * sum(tensor.nbytes for tensor in tensors), rel=0.01)]

    @pytest.mark.parametrize(
        "function", ["write_safetensors", "dump_json", "shutil.copyfile", "os.rename"]
    )
    @pytest.mark.parametrize("overwrite", [False, True])
    def test_a_disk_that_fills_up_leaves_everything_as_it_was(
        self,
        function: str,
        overwrite: bool,
        model: Path,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        if overwrite:
            assert _quantize(model, tmp_path / "q", "--bits", "8").exit_code == 0

        def fail(*_: object, **__: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        before = _content(tmp_path)
        monkeypatch.setattr(f"qtool.formats.writer.{function}", fail)
        result = _quantize(model, tmp_path / "q", *["--overwrite"] * overwrite)
        monkeypatch.undo()
        _assert_error(result, "cannot be written", "No space left", "as it was", "run again")
        assert _content(tmp_path) == before

    def test_a_real_write_error_is_understood(self, model: Path, tmp_path: Path) -> None:
        before = _content(tmp_path)
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
        try:
            result = _quantize(model, tmp_path / "q")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        _assert_error(result, "cannot be written", "File too large", "as it was", "run again")
        assert _content(tmp_path) == before

    def test_a_replaced_model_comes_back_if_the_new_one_cannot_take_its_place(
        self, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert _quantize(model, tmp_path / "q", "--bits", "8").exit_code == 0
        rename = os.rename

        def fail_at_the_end(source: Path, target: Path) -> None:
            if Path(target) == tmp_path / "q" and ".partial-" in str(source):
                raise OSError(errno.EIO, "Input/output error")
            rename(source, target)

        before = _content(tmp_path)
        monkeypatch.setattr(writer.os, "rename", fail_at_the_end)
        _assert_error(_quantize(model, tmp_path / "q", "--overwrite"), "Input/output error")
        assert _content(tmp_path) == before


class TestGenerate:
    @staticmethod
    def _generate(model: Path, prompt: str, *options: str) -> Result:
        arguments = ["generate", str(model), prompt, "--device", "cpu", "--max-tokens", "4"]
        return CliRunner().invoke(main, [*arguments, *options])

    def test_a_prompt_gives_text(self, tiny_model_folder: Path) -> None:
        result = self._generate(tiny_model_folder, "The fox", "--temperature", "0")
        assert result.exit_code == 0, result.output
        assert "ended by" in result.stderr

    def test_an_empty_prompt(self, tiny_model_folder: Path) -> None:
        result = self._generate(tiny_model_folder, "")
        _assert_error(result, "prompt", "0 tokens", "1 or more", "send some text")

    def test_a_prompt_that_is_too_long(self, tiny_model_folder: Path) -> None:
        result = self._generate(tiny_model_folder, "fox " * 2000)
        _assert_error(result, "prompt", "tokens", "256")

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            (["--temperature", "-1"], ("temperature", "-1")),
            (["--top-p", "0"], ("top_p", "0")),
            (["--max-tokens", "-1"], ("max_tokens", "-1")),
        ],
    )
    def test_a_sampling_value_out_of_range(
        self, options: list[str], words: tuple[str, ...], tiny_model_folder: Path
    ) -> None:
        _assert_error(self._generate(tiny_model_folder, "The fox", *options), *words)


@pytest.mark.parametrize("value", ["2X", "-1", "", "G"])
def test_a_size_that_is_none(value: str) -> None:
    result = CliRunner().invoke(main, ["serve", "model", "--kv-cache-memory", value])
    _assert_error(result, repr(value), "2G", exit_code=2)


def test_serve_takes_its_model_once() -> None:
    result = CliRunner().invoke(main, ["serve", "a", "--model", "b"])
    _assert_error(result, "give MODEL once", exit_code=2)
