"""Text sources and the blocks cut from them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qtool.calibration.data import (
    calibration_documents,
    evaluation_windows,
    held_out_builtin,
    held_out_documents,
    load_tokenizer,
    token_blocks,
)
from qtool.calibration.documents import Text
from qtool.calibration.sources import BUILTIN, Source
from qtool.errors import CalibrationError
from support.models import make_tokenizer

PLAIN = make_tokenizer()
WITH_BOS = make_tokenizer(add_bos=True)


def _builtin() -> Text:
    documents = calibration_documents(Source(BUILTIN))
    assert isinstance(documents, Text)
    return documents


def _stream(text: Text) -> list[int]:
    encoded = PLAIN(list(text.documents), add_special_tokens=False).input_ids
    return [token for ids in encoded for token in ids]


def test_builtin_calibration_and_held_out_documents_are_disjoint_and_never_empty() -> None:
    calibration, held_out = _builtin(), held_out_builtin()
    assert held_out_documents("builtin") == held_out
    assert not set(calibration.documents) & set(held_out.documents)
    assert calibration.fingerprint != held_out.fingerprint
    sizes = [sum(map(len, text.documents)) for text in (calibration, held_out)]
    assert 0.25 < sizes[1] / sum(sizes) < 0.35


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
    assert blocks.shape == (2, seq_len)
    assert all(row in windows for row in blocks.tolist())


def test_no_token_is_padding() -> None:
    text = _builtin()
    for tokenizer in (PLAIN, WITH_BOS):
        ids = token_blocks(text, tokenizer, 32, 16, seed=1)
        assert ids.dtype == torch.int64 and ids.shape == (16, 32)
        assert not (ids[:, 1:] < 4).any(), "special tokens occur in no document"


def test_a_tokenizer_that_adds_bos_puts_it_first_in_every_block_and_window() -> None:
    text = _builtin()
    for ids in (
        token_blocks(text, WITH_BOS, 16, 4, seed=0),
        evaluation_windows(text, WITH_BOS, 16, 4),
    ):
        assert (ids[:, 0] == WITH_BOS.bos_token_id).all()
        assert (ids[:, 1:] != WITH_BOS.bos_token_id).all()


def test_the_seed_alone_decides_the_choice_and_blocks_are_distinct() -> None:
    text = _builtin()
    first, again, other = (token_blocks(text, PLAIN, 32, 8, seed) for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert first.unique(dim=0).shape[0] == 8


def test_a_text_the_model_makes_is_none_to_evaluate_it_on() -> None:
    with pytest.raises(CalibrationError, match="'self' is text that the model makes"):
        held_out_documents("self")


def test_evaluation_windows_are_the_text_as_it_is() -> None:
    text = held_out_builtin()
    windows = evaluation_windows(text, PLAIN, 32, 5)
    whole = PLAIN("".join(text.documents), add_special_tokens=False).input_ids
    assert windows.flatten().tolist() == whole[: 5 * 32]


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match="no tokenizer"):
        load_tokenizer(tmp_path)
