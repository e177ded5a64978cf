"""The packaged real model, SmolLM2-135M-Instruct: imported, compared with transformers, asked."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from qtool import LLM, SamplingParams
from qtool.formats.model_source import PACKAGED, resolve_model
from qtool.runtime.loaded_model import load_model
from qtool.runtime.options import ModelOptions
from qtool.runtime.tokenizer import Tokenizer
from support.batches import run_chunked, run_whole

NAME = "smollm2-135m"
TEXT = (
    "The quick brown fox jumps over the lazy dog. 你好，世界! Once upon a time, in a land far away,"
)

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec(PACKAGED[NAME].parts[0][0]) is None,
    reason=f"needs the model: {PACKAGED[NAME].install}",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QTOOL_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield resolve_model(NAME)


@pytest.fixture(scope="module")
def token_ids(folder: Path) -> list[int]:
    return Tokenizer.load(folder).encode(TEXT)


@pytest.fixture(scope="module")
def expected(folder: Path, token_ids: list[int]) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([token_ids])).logits[0]
    return logits


def _relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())


@pytest.mark.parametrize(
    ("backend", "dtype", "bound"),
    [
        ("reference", "fp32", 1e-4),
        ("cpu", "fp32", 1e-4),
        # All in bfloat16, as transformers computes it, the error is 0.033.
        ("reference", "bf16", 0.015),
        ("cpu", "bf16", 0.03),
    ],
)
def test_logits_equal_transformers(
    folder: Path,
    token_ids: list[int],
    expected: torch.Tensor,
    backend: str,
    dtype: str,
    bound: float,
) -> None:
    options = ModelOptions(device="cpu", dtype=dtype, backend=backend)
    decoder = load_model(folder, options, max_model_len=256).decoder
    assert _relative_error(run_whole(decoder, token_ids), expected) < bound
    assert _relative_error(run_chunked(decoder, token_ids, [9, 4, 1]), expected) < bound


def test_an_imported_folder_is_found_again_and_names_no_path(folder: Path) -> None:
    assert resolve_model(NAME) == folder
    for path in folder.glob("*.json"):
        assert b"site-packages" not in path.read_bytes(), path.name
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_a_question_is_answered(folder: Path) -> None:
    with LLM(model=str(folder), device="cpu", max_model_len=256) as llm:
        messages = [{"role": "user", "content": "What is the capital of France?"}]
        (result,) = llm.chat(messages, SamplingParams(temperature=0, max_tokens=16))
    assert "Paris" in result.outputs[0].text
    assert result.outputs[0].finish_reason == "stop"
