"""Perplexity, KL and agreement against transformers in float64."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from qtool.errors import UsageError
from qtool.runtime import evaluate as evaluation
from qtool.runtime.evaluate import evaluate
from qtool.runtime.loaded_model import load_model
from qtool.runtime.model import Decoder
from qtool.runtime.options import ModelOptions


def _load(folder: Path) -> Decoder:
    return load_model(folder, ModelOptions(device="cpu", dtype="fp32")).decoder


def _log_probs(folder: Path, windows: torch.Tensor) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    with torch.inference_mode():
        return torch.log_softmax(model(windows).logits[:, :-1], -1)


@pytest.fixture(scope="module")
def folders(model_factory: Callable[..., Path]) -> tuple[Path, Path]:
    return model_factory(seed=0), model_factory(seed=1)


@pytest.fixture(scope="module")
def windows() -> torch.Tensor:
    return torch.randint(0, 384, (3, 50), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("chunk", [7, 256])
def test_quality_equals_the_definition(
    folders: tuple[Path, Path],
    windows: torch.Tensor,
    chunk: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(evaluation, "CHUNK", chunk)
    p, q = (_log_probs(folder, windows) for folder in (folders[1], folders[0]))
    targets = windows[:, 1:].unsqueeze(-1)
    quality = evaluate(_load(folders[0]), windows, _load(folders[1]))
    assert quality.tokens == 3 * 49
    assert quality.nll == pytest.approx(float(-q.gather(-1, targets).mean()), rel=1e-5)
    assert quality.reference_nll == pytest.approx(float(-p.gather(-1, targets).mean()), rel=1e-5)
    assert quality.kl == pytest.approx(float((p.exp() * (p - q)).sum(-1).mean()), rel=1e-4)
    agreement = float((p.argmax(-1) == q.argmax(-1)).double().mean())
    assert quality.top1 == pytest.approx(agreement, abs=0.01)
    assert quality.perplexity == pytest.approx(
        float((-q.gather(-1, targets)).mean().exp()), rel=1e-4
    )


def test_a_model_is_at_no_distance_from_itself(
    folders: tuple[Path, Path], windows: torch.Tensor
) -> None:
    decoder = _load(folders[0])
    quality = evaluate(decoder, windows, decoder)
    assert (quality.kl, quality.top1) == (pytest.approx(0, abs=1e-9), 1.0)


def test_what_cannot_be_compared_is_refused(
    folders: tuple[Path, Path], windows: torch.Tensor, model_factory: Callable[..., Path]
) -> None:
    other = _load(model_factory(vocab_size=400))
    with pytest.raises(UsageError, match="the reference has 400 tokens, the model 384"):
        evaluate(_load(folders[0]), windows, other)
    with pytest.raises(UsageError, match="nothing to predict"):
        evaluate(other, windows[:, :1])
