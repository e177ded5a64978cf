"""Likelihoods equal a log-softmax, and no other text changes them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from qtool import LLM
from qtool.errors import RequestError
from qtool.runtime import scoring
from qtool.runtime.scoring import loglikelihoods, scorable_tokens
from qtool.runtime.tasks import Continuation


@contextmanager
def _llm(
    folder: Path, batch_size: int, backend: str = "reference", budget: int = 64
) -> Iterator[LLM]:
    with LLM(
        str(folder),
        device="cpu",
        dtype="fp32",
        backend=backend,
        max_num_seqs=batch_size,
        max_num_batched_tokens=budget,
    ) as llm:
        yield llm


def _texts(count: int = 12) -> list[Continuation]:
    chance, texts = random.Random(0), []
    for _ in range(count):
        ids = tuple(chance.randrange(384) for _ in range(chance.randrange(2, 50)))
        texts.append(Continuation(ids, chance.randrange(1, len(ids))))
    return texts


def test_likelihoods_equal_transformers(tiny_model_folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model_folder, dtype=torch.float64)
    texts = _texts()
    # One that greedy decoding would write.
    prompt = torch.tensor([texts[0].token_ids])
    written = model.generate(prompt, max_new_tokens=3, do_sample=False, pad_token_id=0)
    texts.append(Continuation(tuple(written[0].tolist()), prompt.shape[1]))
    with _llm(tiny_model_folder, 4) as llm:
        results = loglikelihoods(llm, texts)
    for text, result in zip(texts, results, strict=True):
        ids = torch.tensor([text.token_ids])
        with torch.inference_mode():
            logprobs = model(ids).logits[0, :-1].log_softmax(-1)
        targets = ids[0, 1:]
        scored = logprobs.gather(-1, targets.unsqueeze(-1)).squeeze(-1)[text.start - 1 :]
        assert result.logprob == pytest.approx(float(scored.sum()), rel=1e-5)
        greedy = (logprobs.argmax(-1) == targets)[text.start - 1 :]
        assert result.greedy == bool(greedy.all())
    assert results[-1].greedy and not results[0].greedy


def test_scores_do_not_depend_on_the_batch_size_or_the_order_in_one_bit(
    tiny_model_folder: Path,
) -> None:
    texts = _texts()
    with _llm(tiny_model_folder, 1) as llm:
        alone = [loglikelihoods(llm, [text])[0] for text in texts]
    for batch_size, budget in ((1, 7), (3, 16), (16, 512)):
        with _llm(tiny_model_folder, batch_size, budget=budget) as llm:
            assert loglikelihoods(llm, texts) == alone
            assert loglikelihoods(llm, texts[::-1]) == alone[::-1]


def test_other_back_ends_differ_by_rounding_only(tiny_model_folder: Path) -> None:
    texts = _texts()
    with _llm(tiny_model_folder, 1) as llm:
        exact = loglikelihoods(llm, texts)
    for batch_size in (1, 5):
        with _llm(tiny_model_folder, batch_size, "cpu") as llm:
            results = loglikelihoods(llm, texts)
        assert [r.greedy for r in results] == [r.greedy for r in exact]
        expected = pytest.approx([r.logprob for r in exact], rel=1e-5)
        assert [r.logprob for r in results] == expected


def test_progress_counts_texts_in_parts(
    tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scoring, "TEXTS_AT_A_TIME", 5)
    seen: list[tuple[int, int]] = []
    with _llm(tiny_model_folder, 4) as llm:
        whole = loglikelihoods(llm, _texts(), lambda done, total: seen.append((done, total)))
        assert loglikelihoods(llm, []) == []
    assert seen == [(5, 12), (10, 12), (12, 12)]
    assert len(whole) == 12


def test_the_longest_text_fits_and_the_next_does_not(
    model_factory: Callable[..., Path],
) -> None:
    with _llm(model_factory(max_positions=32), 2) as llm:
        longest = scorable_tokens(llm.info.max_model_len)
        assert longest == 31
        loglikelihoods(llm, [Continuation((1,) * longest, 1)])
        with pytest.raises(RequestError, match="max_model_len=32"):
            loglikelihoods(llm, [Continuation((1,) * (longest + 1), 1)])
