"""The packaged Gemma-3-270M, a base model: compared with transformers, asked, and chatted to."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from qtool import LLM, SamplingParams
from qtool.calibration.data import evaluation_windows, held_out_builtin, load_tokenizer
from qtool.errors import RequestError
from qtool.formats.model_source import PACKAGED, resolve_model
from qtool.runtime.loaded_model import load_model
from qtool.runtime.options import ModelOptions
from qtool.runtime.tokenizer import Tokenizer
from support.batches import run_chunked, run_whole
from support.variants import ref_logits, relative_error

NAME = "gemma3-270m"
WINDOW = 512

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        any(importlib.util.find_spec(module) is None for module, _ in PACKAGED[NAME].parts),
        reason=f"needs the model: {PACKAGED[NAME].install}",
    ),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QTOOL_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield resolve_model(NAME)


def test_logits_equal_transformers_past_the_window(folder: Path) -> None:
    text = " ".join(held_out_builtin().documents)
    ids = Tokenizer.load(folder).encode(text)[: WINDOW + 60]
    assert len(ids) == WINDOW + 60
    expected = ref_logits(folder, ids)
    options = ModelOptions(device="cpu", dtype="fp32")
    decoder = load_model(folder, options, max_model_len=1024).decoder
    assert relative_error(run_whole(decoder, ids), expected) < 1e-4
    assert relative_error(run_chunked(decoder, ids, [WINDOW, 50, 1]), expected) < 1e-4


def test_a_windows_first_token_is_the_one_bos_that_gemma_wants(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    windows = evaluation_windows(held_out_builtin(), tokenizer, 128, 3)
    assert (windows[:, 0] == tokenizer.bos_token_id).all()
    assert not (windows[:, 1:] == tokenizer.bos_token_id).any()


def test_a_text_is_continued_and_a_conversation_politely_refused(folder: Path) -> None:
    prompt = "The capital of France is"
    with LLM(model=str(folder), device="cpu", dtype="fp32", max_model_len=256) as llm:
        (result,) = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=8))
        before, after = Tokenizer.load(folder).encode(prompt), result.outputs[0].token_ids
        likeliest = ref_logits(folder, [*before, *after])[len(before) - 1 : -1].argmax(-1)
        assert likeliest.tolist() == list(after)
        with pytest.raises(RequestError, match="no chat template.*/v1/completions"):
            llm.chat([{"role": "user", "content": "Hello"}], SamplingParams(max_tokens=4))
