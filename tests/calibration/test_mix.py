"""Sources mixed by weight, and the manifest that says what was used."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from qtool.calibration.data import load_tokenizer, token_blocks
from qtool.calibration.documents import Text
from qtool.calibration.mix import Part, SampleRequest, mixed_blocks, read_mix, share_out
from qtool.calibration.sources import Source
from qtool.errors import CalibrationError


def _part(name: str, weight: float = 1.0, words: int = 2000) -> Part:
    text = Text(name, tuple(f"{name} {number} and more.\n\n" for number in range(words)))
    return Part(name, Source(name, weight=weight), text)


def _blocks(folder: Path, *parts: Part, num_samples: int = 8, **more: object):
    return mixed_blocks(parts, folder, num_samples=num_samples, seq_len=16, seed=3, **more)


def test_one_source_gives_exactly_its_own_blocks(tiny_model_folder: Path) -> None:
    part = _part("fox")
    mixed = _blocks(tiny_model_folder, part)
    own = token_blocks(part.documents, load_tokenizer(tiny_model_folder), 16, 8, 3)
    assert torch.equal(mixed.ids, own)


def test_weights_are_shares_of_the_samples_whatever_the_lengths(tiny_model_folder: Path) -> None:
    parts = _part("fox", 3.0, words=300), _part("text", 1.0, words=3000)
    mixed = _blocks(tiny_model_folder, *parts)
    tokenizer = load_tokenizer(tiny_model_folder)
    texts = tokenizer.batch_decode(mixed.ids)
    assert [("fox" in text, "text" in text) for text in texts] == [(True, False)] * 6 + [
        (False, True)
    ] * 2
    assert [(s["weight"], s["samples"], s["tokens"]) for s in mixed.manifest["sources"]] == [
        (3.0, 6, 96),
        (1.0, 2, 32),
    ]


@given(
    weights=st.lists(st.floats(0.1, 10), min_size=1, max_size=5), num_samples=st.integers(100, 300)
)
def test_shares_add_up_and_are_off_by_less_than_one(weights: list[float], num_samples: int) -> None:
    counts = share_out(num_samples, weights)
    assert sum(counts) == num_samples
    for count, weight in zip(counts, weights, strict=True):
        assert abs(count - num_samples * weight / sum(weights)) < 1


def test_a_source_that_would_give_nothing_is_refused(tiny_model_folder: Path) -> None:
    with pytest.raises(CalibrationError, match="text would get none of 8 samples; raise"):
        _blocks(tiny_model_folder, _part("fox"), _part("text", 0.01))


def test_a_source_too_small_for_its_share_says_what_was_found(tiny_model_folder: Path) -> None:
    with pytest.raises(CalibrationError, match=r"text has \d+ tokens: 4 blocks of 16 need 64"):
        _blocks(tiny_model_folder, _part("fox"), _part("text", words=1))


def test_the_manifest_names_files_and_not_where_they_lie(
    tiny_model_folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "words.txt").write_text("word after word\n" * 200)
    rows = [{"messages": [{"role": "user", "content": "word " * 9}]}] * 20
    (tmp_path / "chat.json").write_text(json.dumps(rows))
    parts = read_mix(
        [str(tmp_path / "words.txt"), f"{tmp_path / 'chat.json'}:messages=3", "builtin"]
    )
    manifest = _blocks(tiny_model_folder, *parts, num_samples=10).manifest
    words, chat, builtin = manifest["sources"]
    assert words == {
        "source": "words.txt",
        "sha256": hashlib.sha256(b"word after word\n" * 200).hexdigest(),
        "documents": 1,
        "whole": True,
        "chat_template": False,
        "weight": 1.0,
        "samples": 2,
        "tokens": 32,
    }
    assert (chat["source"], chat["chat_template"], chat["samples"]) == (
        "chat.json:messages",
        True,
        6,
    )
    assert builtin["source"] == "builtin-calibration"
    assert (manifest["samples"], manifest["seq_len"], manifest["tokens"]) == (10, 16, 160)
    assert manifest["seed"] == 3
    assert set(manifest["versions"]) == {"python", "torch", "transformers", "tokenizers"}
    assert str(tmp_path) not in json.dumps(manifest)


def _sampler(request: SampleRequest) -> Tensor:
    assert request.first_token == 0 and request.seed == 3  # <s>
    return torch.full((request.num_samples, request.seq_len), 7)


SELF = Part("self", Source("self"), None)


def test_the_models_own_text_comes_from_the_sampler(tiny_model_folder: Path) -> None:
    mixed = _blocks(tiny_model_folder, _part("fox"), SELF, sampler=_sampler)
    assert (mixed.ids[4:] == 7).all() and not (mixed.ids[:4] == 7).all()
    entry = mixed.manifest["sources"][1]
    assert (entry["source"], entry["samples"]) == ("self", 4)
    assert entry["sha256"] == hashlib.sha256((7).to_bytes(8, "little") * 64).hexdigest()


def test_nothing_is_sampled_before_the_other_sources_are_known_to_fit(
    tiny_model_folder: Path,
) -> None:
    def too_early(_: SampleRequest) -> Tensor:
        raise AssertionError("sampled")

    with pytest.raises(CalibrationError, match="fox has"):
        _blocks(tiny_model_folder, SELF, _part("fox", words=1), sampler=too_early)


def test_without_a_sampler_the_models_own_text_is_refused(tiny_model_folder: Path) -> None:
    with pytest.raises(CalibrationError, match="'self' needs the runtime"):
        _blocks(tiny_model_folder, SELF)
