"""Text sources and the blocks cut from them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qtool.calibration.data import (
    Text,
    calibration_text,
    evaluation_windows,
    held_out_text,
    load_tokenizer,
    token_blocks,
)
from qtool.errors import CalibrationError
from support.models import make_tokenizer

PLAIN = make_tokenizer()
WITH_BOS = make_tokenizer(add_bos=True)


def _stream(text: Text) -> list[int]:
    encoded = PLAIN(list(text.documents), add_special_tokens=False).input_ids
    return [token for ids in encoded for token in ids]


def test_builtin_calibration_and_held_out_documents_are_disjoint_and_never_empty() -> None:
    calibration, held_out = calibration_text("builtin"), held_out_text("builtin")
    assert not set(calibration.documents) & set(held_out.documents)
    assert calibration.fingerprint != held_out.fingerprint
    sizes = [sum(map(len, text.documents)) for text in (calibration, held_out)]
    assert 0.25 < sizes[1] / sum(sizes) < 0.35


def test_documents_of_a_file_are_its_paragraphs_and_lose_no_character(tmp_path: Path) -> None:
    content = "one\ntwo\n \n\nthree\n\n\n\nfour"
    (tmp_path / "a.txt").write_text(content)
    text = calibration_text(str(tmp_path / "a.txt"))
    assert text.documents == ("one\ntwo\n \n\n", "three\n\n\n\n", "four")
    assert "".join(text.documents) == content


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "holds no text"), (b" \n\n\t\n", "holds no text"), (b"caf\xe9", "not UTF-8")],
)
def test_a_file_without_usable_text_is_refused(
    tmp_path: Path, content: bytes, message: str
) -> None:
    path = tmp_path / "bad.txt"
    path.write_bytes(content)
    with pytest.raises(CalibrationError, match=message):
        calibration_text(str(path))


def test_a_missing_file_and_a_folder_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match="nowhere.txt does not exist"):
        held_out_text(str(tmp_path / "nowhere.txt"))
    with pytest.raises(CalibrationError, match="cannot be read"):
        held_out_text(str(tmp_path))


def test_a_small_text_is_refused_with_the_tokens_found_and_needed() -> None:
    text = Text("small", ("a few words",))
    found = len(_stream(text))
    with pytest.raises(CalibrationError, match=f"small has {found} tokens.*need 512"):
        token_blocks(text, PLAIN, 64, 8, seed=0)
    with pytest.raises(CalibrationError, match=f"small has {found} tokens"):
        evaluation_windows(text, PLAIN, 64, 8)


@settings(max_examples=30, deadline=None)
@given(
    documents=st.lists(
        st.text(alphabet="ab c\n", min_size=1, max_size=40), min_size=8, max_size=30
    ),
    seq_len=st.integers(2, 9),
    seed=st.integers(0, 3),
)
def test_every_block_is_a_window_of_the_real_token_stream(
    documents: list[str], seq_len: int, seed: int
) -> None:
    text = Text("t", tuple(documents))
    stream = _stream(text)
    if len(stream) < 2 * seq_len:
        return
    blocks = token_blocks(text, PLAIN, seq_len, 2, seed)
    windows = [stream[i : i + seq_len] for i in range(0, len(stream) - seq_len + 1, seq_len)]
    assert all(row in windows for row in blocks.ids.tolist())
    assert blocks.manifest["tokens"] == blocks.ids.numel() == 2 * seq_len


def test_no_token_is_padding() -> None:
    text = calibration_text("builtin")
    for tokenizer in (PLAIN, WITH_BOS):
        ids = token_blocks(text, tokenizer, 32, 16, seed=1).ids
        assert ids.dtype == torch.int64 and ids.shape == (16, 32)
        assert not (ids[:, 1:] < 4).any(), "special tokens occur in no document"


def test_a_tokenizer_that_adds_bos_puts_it_first_in_every_block_and_window() -> None:
    text = calibration_text("builtin")
    for ids in (
        token_blocks(text, WITH_BOS, 16, 4, seed=0).ids,
        evaluation_windows(text, WITH_BOS, 16, 4),
    ):
        assert (ids[:, 0] == WITH_BOS.bos_token_id).all()
        assert (ids[:, 1:] != WITH_BOS.bos_token_id).all()


def test_the_seed_alone_decides_the_choice_and_blocks_are_distinct() -> None:
    text = calibration_text("builtin")
    first, again, other = (token_blocks(text, PLAIN, 32, 8, seed).ids for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert first.unique(dim=0).shape[0] == 8


def test_evaluation_windows_are_the_text_as_it_is() -> None:
    text = held_out_text("builtin")
    windows = evaluation_windows(text, PLAIN, 32, 5)
    whole = PLAIN("".join(text.documents), add_special_tokens=False).input_ids
    assert windows.flatten().tolist() == whole[: 5 * 32]


def test_the_manifest_names_the_file_but_not_where_it_lies(tmp_path: Path) -> None:
    path = tmp_path / "words.txt"
    path.write_text("word after word\n" * 200)
    manifest = token_blocks(calibration_text(str(path)), PLAIN, 16, 4, seed=3).manifest
    assert manifest["source"] == "words.txt"
    assert str(tmp_path) not in str(manifest)
    assert manifest["seed"] == 3 and len(manifest["sha256"]) == 64
    assert set(manifest["versions"]) == {"torch", "transformers", "tokenizers"}


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match="no tokenizer"):
        load_tokenizer(tmp_path)
