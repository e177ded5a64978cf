"""MODEL as a user names it: what each name means, and what is said when it means nothing."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import load_file, save_file
from torch import Tensor

from qtool.errors import ModelError
from qtool.formats import model_source
from qtool.formats.hub import is_hub_id
from qtool.formats.model_source import import_gguf, resolve_model
from qtool.formats.packaged import PACKAGED
from qtool.quantize.options import QuantizeOptions
from qtool.quantize.pipeline import quantize_model
from qtool.runtime.loaded_model import load_model
from qtool.runtime.options import ModelOptions

ModelFactory = Callable[..., Path]
RTN = QuantizeOptions(method="rtn", device="cpu")


def _tensors(folder: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for shard in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(shard)
    return tensors


def _assert_quantizes_and_loads(folder: Path, out: Path) -> dict[str, Tensor]:
    """Quantize through the name a user would give, load the result; returns its tensors."""
    quantize_model(resolve_model(str(folder)), out, RTN)
    loaded = load_model(resolve_model(str(out)), ModelOptions(device="cpu", backend="reference"))
    assert len(loaded.schemes) == 14
    return _tensors(out)


@pytest.fixture(scope="module")
def expected(
    tiny_model_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Tensor]:
    """The quantized tensors of the plain tiny model."""
    return _assert_quantizes_and_loads(tiny_model_folder, tmp_path_factory.mktemp("plain") / "q")


class TestFolders:
    def _assert_same(self, folder: Path, out: Path, expected: dict[str, Tensor]) -> None:
        found = _assert_quantizes_and_loads(folder, out)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)

    def test_shards(
        self, model_factory: ModelFactory, expected: dict[str, Tensor], tmp_path: Path
    ) -> None:
        folder = model_factory(max_shard_size="100KB")
        assert len(list(folder.glob("*.safetensors"))) > 1
        self._assert_same(folder, tmp_path / "q", expected)

    def test_safetensors_without_metadata(
        self, model_factory: ModelFactory, expected: dict[str, Tensor], tmp_path: Path
    ) -> None:
        folder = model_factory()
        save_file(load_file(folder / "model.safetensors"), folder / "model.safetensors")
        self._assert_same(folder, tmp_path / "q", expected)

    def test_a_link_to_a_folder(
        self, tiny_model_folder: Path, expected: dict[str, Tensor], tmp_path: Path
    ) -> None:
        (tmp_path / "link").symlink_to(tiny_model_folder)
        self._assert_same(tmp_path / "link", tmp_path / "q", expected)

    @pytest.mark.parametrize("name", ["with space", "模型", "model.v1.5", "-dash", "[b]", "%s"])
    def test_odd_names(
        self, name: str, model_factory: ModelFactory, expected: dict[str, Tensor], tmp_path: Path
    ) -> None:
        folder = model_factory(tmp_path / name)
        self._assert_same(folder, tmp_path / f"{name}.q", expected)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
    def test_every_dtype_of_weights(
        self, dtype: torch.dtype, model_factory: ModelFactory, tmp_path: Path
    ) -> None:
        found = _assert_quantizes_and_loads(model_factory(dtype=dtype), tmp_path / "q")
        assert {t.dtype for t in found.values() if t.dtype.is_floating_point} == {dtype}

    def test_a_home_folder_is_expanded(
        self, tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("HOME", str(tiny_model_folder.parent))
        assert resolve_model(f"~/{tiny_model_folder.name}") == tiny_model_folder

    def test_a_file_that_is_no_gguf(self, tiny_model_folder: Path) -> None:
        with pytest.raises(ModelError, match="no .gguf; give the model's folder"):
            resolve_model(str(tiny_model_folder / "model.safetensors"))

    def test_a_name_that_means_nothing_lists_what_could(self) -> None:
        with pytest.raises(ModelError, match=r"'/no/where' .*smollm2-135m.*org/name"):
            resolve_model("/no/where")


class TestHub:
    @pytest.fixture
    def cache(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """An empty hub cache; the tests run with HF_HUB_OFFLINE."""
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        return tmp_path / "hub"

    @staticmethod
    def _answer(monkeypatch: pytest.MonkeyPatch, answer: object) -> list[dict[str, Any]]:
        """Let the client return or raise ``answer``; the list collects its arguments."""
        calls: list[dict[str, Any]] = []

        def snapshot_download(repo_id: str, **options: Any) -> object:
            calls.append({"repo_id": repo_id, **options})
            if isinstance(answer, Exception):
                raise answer
            return answer

        monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
        return calls

    @pytest.mark.parametrize(
        ("name", "known"),
        [
            ("org/name", True),
            ("Qwen/Qwen2.5-0.5B", True),
            ("name", False),
            ("a/b/c", False),
            ("./name", False),
            ("../name", False),
            ("~/name", False),
            ("/name", False),
            ("org/", False),
            ("org/na me", False),
            ("模型/名", False),
        ],
    )
    def test_an_id_is_an_organisation_and_a_name(self, name: str, known: bool) -> None:
        assert is_hub_id(name) is known

    def test_only_what_a_model_folder_needs_is_fetched(
        self, tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        calls = self._answer(monkeypatch, str(tiny_model_folder))
        assert resolve_model("org/name") == tiny_model_folder
        (call,) = calls
        assert call.pop("repo_id") == "org/name"
        wanted = {
            "config.json",
            "generation_config.json",
            "tokenizer.json",
            "tokenizer.model",
            "chat_template.jinja",
            "model.safetensors.index.json",
            "model-00001-of-00002.safetensors",
            "LICENSE",
        }
        others = {
            "pytorch_model.bin",
            "consolidated.safetensors",
            "original/model.safetensors",
            "onnx/tokenizer.json",
            "model.gguf",
            "README.md",
        }
        assert set(filter_repo_objects([*wanted, *others], **call)) == wanted

    def test_a_local_folder_wins(
        self, model_factory: ModelFactory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        calls = self._answer(monkeypatch, AssertionError("asked the hub"))
        model_factory(tmp_path / "org" / "name")
        monkeypatch.chdir(tmp_path)
        assert resolve_model("org/name") == Path("org/name")
        assert not calls

    def test_a_snapshot_of_links_in_the_cache_is_used_offline(
        self,
        cache: Path,
        tiny_model_folder: Path,
        expected: dict[str, Tensor],
        tmp_path: Path,
    ) -> None:
        repo = cache / "models--org--name"
        snapshot, blobs = repo / "snapshots" / ("a" * 40), repo / "blobs"
        for folder in (snapshot, blobs, repo / "refs"):
            folder.mkdir(parents=True)
        (repo / "refs" / "main").write_text("a" * 40)
        for index, path in enumerate(sorted(tiny_model_folder.iterdir())):
            (blobs / str(index)).write_bytes(path.read_bytes())
            (snapshot / path.name).symlink_to(os.path.relpath(blobs / str(index), snapshot))
        assert resolve_model("org/name") == snapshot
        found = _assert_quantizes_and_loads(snapshot, tmp_path / "q")
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        assert not any(path.is_symlink() for path in (tmp_path / "q").iterdir())

    def test_offline_without_a_copy_says_how_to_go_on(self, cache: Path) -> None:
        with pytest.raises(ModelError, match="no local folder.*HF_HUB_OFFLINE is set.*give its"):
            resolve_model("org/name")

    def test_without_a_connection(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        self._answer(monkeypatch, LocalEntryNotFoundError("Got: ConnectError\nAn error"))
        with pytest.raises(ModelError, match=r"no connection: Got: ConnectError\).*copy the model"):
            resolve_model("org/name")

    def test_a_gated_model(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._answer(monkeypatch, GatedRepoError.__new__(GatedRepoError))
        with pytest.raises(ModelError, match="org/name is gated: accept its terms"):
            resolve_model("org/name")

    def test_a_model_that_is_not_there(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._answer(monkeypatch, OSError("404 Client Error\nlong text"))
        with pytest.raises(ModelError, match=r"'org/name' .*\(404 Client Error\); check the name"):
            resolve_model("org/name")

    def test_a_model_without_safetensors(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        self._answer(monkeypatch, str(tmp_path))
        with pytest.raises(ModelError, match=r"no \*\.safetensors.*GGUF"):
            resolve_model("org/name")


class TestGguf:
    def test_a_damaged_file_is_named_and_leaves_nothing(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("QTOOL_CACHE", str(tmp_path / "cache"))
        (tmp_path / "x.gguf").write_bytes(b"GGUF no more")
        with pytest.raises(ModelError, match="x.gguf cannot be imported as GGUF"):
            resolve_model(str(tmp_path / "x.gguf"))
        assert list((tmp_path / "cache" / "gguf").iterdir()) == []

    def test_a_full_disk_names_the_cache_and_leaves_nothing(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def convert(_: Path, target: Path) -> None:
            target.mkdir()
            raise OSError(28, "No space left on device")

        monkeypatch.setenv("QTOOL_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(model_source, "_convert_gguf", convert)
        (tmp_path / "x.gguf").write_bytes(b"GGUF")
        with pytest.raises(ModelError, match="cannot be kept in .*No space left.*QTOOL_CACHE"):
            import_gguf(tmp_path / "x.gguf")
        assert list((tmp_path / "cache" / "gguf").iterdir()) == []


@pytest.mark.parametrize("name", ["gemma3-270m", "smollm2-135m"])
def test_a_packaged_model_that_is_missing_says_how_to_install_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ModelError) as caught:
        resolve_model(name)
    assert str(caught.value).endswith(f"run: {PACKAGED[name].install}")


def test_a_family_that_cannot_run_is_refused_by_name(
    model_factory: ModelFactory, tmp_path: Path
) -> None:
    folder = model_factory()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "mamba"}))
    with pytest.raises(ModelError, match=r"mamba.*supported are"):
        load_model(folder, ModelOptions())
    with pytest.raises(ModelError, match=r"mamba.*supported are"):
        quantize_model(folder, tmp_path / "q", RTN)
    assert not (tmp_path / "q").exists()
