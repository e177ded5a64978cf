"""Our decoder against transformers', in float32: prompt, chunks, decode, every back end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from qtool.errors import CheckpointError, ModelError
from qtool.runtime.loaded_model import load_model
from qtool.runtime.model import Decoder
from qtool.runtime.options import ModelOptions
from support.batches import run_chunked, run_whole
from support.variants import LLAMA3, VARIANTS, ref_logits, relative_error, token_ids


def _load(folder: Path, backend: str = "reference", dtype: str = "fp32") -> Decoder:
    options = ModelOptions(device="cpu", dtype=dtype, backend=backend)
    return load_model(folder, options).decoder


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_transformers(
    model_factory: Callable[..., Path], variant: str, backend: str
) -> None:
    folder = model_factory(**VARIANTS[variant])
    ids = token_ids(90)
    expected = ref_logits(folder, ids)
    decoder = _load(folder, backend)
    assert relative_error(run_whole(decoder, ids), expected) < 1e-4
    assert relative_error(run_chunked(decoder, ids, [33, 20, 1]), expected) < 1e-4


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_bfloat16_differs_by_its_rounding_only(tiny_model_folder: Path, backend: str) -> None:
    ids = token_ids(40)
    expected = ref_logits(tiny_model_folder, ids)
    decoder = _load(tiny_model_folder, backend, dtype="bf16")
    # bfloat16 has 8 bits; a few roundings a layer, two layers.
    assert relative_error(run_whole(decoder, ids), expected) < 0.02


def test_old_spelling_of_rotary_settings_means_the_same(
    model_factory: Callable[..., Path], tmp_path: Path
) -> None:
    from qtool.runtime.config import parse_decoder_config

    new = {"rope_parameters": LLAMA3}
    old = {
        "rope_theta": 500_000.0,
        "rope_scaling": {key: value for key, value in LLAMA3.items() if key != "rope_theta"},
    }
    older = old | {"rope_scaling": old["rope_scaling"] | {"type": "llama3"}}  # type: ignore[operator]
    base = {
        "model_type": "llama",
        "vocab_size": 8,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "max_position_embeddings": 64,
    }
    assert parse_decoder_config(base | new) == parse_decoder_config(base | old)
    assert parse_decoder_config(base | new) == parse_decoder_config(base | older)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mamba"}, "'mamba' is not supported; supported are llama"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"rope_parameters": {"rope_type": "proportional"}}, "'proportional' is not supported"),
        ({"partial_rotary_factor": 0.1}, "partial_rotary_factor 0.1"),
        ({"vocab_size": ...}, "no 'vocab_size'"),
    ],
)
def test_what_the_decoder_does_not_have_is_refused_by_name(
    tiny_model_folder: Path, changes: dict[str, Any], message: str
) -> None:
    from qtool.formats.checkpoint import read_json
    from qtool.runtime.config import parse_decoder_config

    config = read_json(tiny_model_folder / "config.json") | changes
    with pytest.raises(ModelError, match=message):
        parse_decoder_config({key: value for key, value in config.items() if value is not ...})


class TestMismatch:
    """Config and weights that do not belong together."""

    def _copy(
        self, source: Path, out: Path, edit: Callable[[dict[str, torch.Tensor]], None]
    ) -> Path:
        from qtool.formats.checkpoint import CheckpointReader, CheckpointWriter

        with CheckpointReader(source) as reader, CheckpointWriter(out) as writer:
            tensors = {name: reader.get(name).clone() for name in reader.names()}
            edit(tensors)
            for name, tensor in tensors.items():
                writer.add(name, tensor)
            return writer.finish(reader.config)

    def test_a_missing_tensor_is_named(self, tiny_model_folder: Path, tmp_path: Path) -> None:
        name = "model.layers.1.mlp.up_proj.weight"
        folder = self._copy(tiny_model_folder, tmp_path / "m", lambda tensors: tensors.pop(name))
        with pytest.raises(CheckpointError, match=name):
            _load(folder)

    def test_an_extra_tensor_is_named(self, tiny_model_folder: Path, tmp_path: Path) -> None:
        extra = {"model.layers.1.mlp.side.weight": torch.zeros(2)}
        folder = self._copy(tiny_model_folder, tmp_path / "m", lambda t: t.update(extra))
        with pytest.raises(CheckpointError, match=r"belong to no part .*side\.weight"):
            _load(folder)

    def test_a_wrong_shape_is_named(self, tiny_model_folder: Path, tmp_path: Path) -> None:
        wrong = {"model.norm.weight": torch.zeros(3)}
        folder = self._copy(tiny_model_folder, tmp_path / "m", lambda t: t.update(wrong))
        with pytest.raises(CheckpointError, match=r"model\.norm.* shape \(3,\).* \(64,\)"):
            _load(folder)
