"""Batch-invariant engines: whatever happens around a request, and in the cache before it, its
tokens and their log-probabilities are those of a solo run, bit for bit.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from qtool.quantize.options import QuantizeOptions
from qtool.quantize.pipeline import quantize_model
from qtool.runtime.engine import Engine
from qtool.runtime.loaded_model import LoadedModel, load_model
from qtool.runtime.options import EngineOptions, ModelOptions
from qtool.runtime.outputs import CompletionOutput
from qtool.runtime.request import Request
from qtool.runtime.tokenizer import Tokenizer
from support.alike import requests_alike
from support.native import LEVELS

# What is loaded, and how.
FORMS = {
    "reference": ("plain", {"dtype": "fp32", "backend": "reference"}),
    "plain weights": ("plain", {"batch_invariant": True}),
    "8-bit cache": ("quantized", {"batch_invariant": True, "kv_cache_dtype": "int8"}),
}
NAN_BYTE, ZERO_BYTE = 255, 0  # all ones is NaN in every floating dtype


@pytest.fixture(scope="module")
def folders(
    model_factory: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    plain = model_factory(dtype=torch.bfloat16)
    quantized = tmp_path_factory.mktemp("quantized") / "model"
    quantize_model(plain, quantized, QuantizeOptions(method="rtn", group_size=32))
    return {"plain": plain, "quantized": quantized}


@pytest.fixture(scope="module", params=FORMS)
def model(request: pytest.FixtureRequest, folders: dict[str, Path]) -> LoadedModel:
    name, options = FORMS[request.param]
    if "kv_cache_dtype" in options and not LEVELS:
        pytest.skip("no native code here")
    return load_model(folders[name], ModelOptions(device="cpu", **options))  # type: ignore[arg-type]


def _make_engine(model: LoadedModel, blocks: int, fill: int, **settings: int) -> Engine:
    memory = blocks * 16 * model.decoder.kv_bytes_per_token
    options = EngineOptions(model="tiny", kv_cache_memory=memory, **settings)  # type: ignore[arg-type]
    engine = Engine(model, Tokenizer.load(model.folder), options)
    for pool in engine._cache.pools:
        pool.view(torch.uint8).fill_(fill)
    return engine


def _requests(seed: int, count: int) -> list[Request]:
    """Half of them begin alike, a quarter are samples of the one before."""
    return requests_alike(
        count, seed=seed, prefixes=(0, 0, 20, 40), own=50, samples_every=4, answers=40
    )


def _drive(engine: Engine, requests: list[Request], seed: int) -> dict[str, CompletionOutput]:
    """Arrivals, steps and strangers that are aborted, in random order."""
    chance, outputs = random.Random(seed), dict[str, CompletionOutput]()
    pending, strangers = list(requests), list[str]()
    while pending or engine.has_work:
        if pending and chance.random() < 0.5:
            request = pending.pop(0)
            strangers.append(f"x-{request.request_id}")
            engine.add(request)
            engine.add(Request(strangers[-1], request.prompt_token_ids, request.params))
        for delta in engine.step():
            if not delta.request_id.startswith("x"):
                outputs.setdefault(delta.request_id, CompletionOutput(0)).extend(delta)
        if strangers and chance.random() < 0.5:
            engine.abort(strangers.pop(chance.randrange(len(strangers))))
    return outputs


def _solo(engine: Engine, requests: list[Request]) -> dict[str, CompletionOutput]:
    outputs: dict[str, CompletionOutput] = {}
    for request in requests:
        engine.add(request)
        while engine.has_work:
            for delta in engine.step():
                outputs.setdefault(delta.request_id, CompletionOutput(0)).extend(delta)
    return outputs


@pytest.mark.usefixtures("expecting_nothing")
def test_a_cache_full_of_nan_gives_the_bits_of_a_solo_run_as_one_of_zeros_does(
    model: LoadedModel,
) -> None:
    requests = _requests(seed=1, count=24)
    solo = _make_engine(model, 64, ZERO_BYTE, enable_prefix_caching=False)
    expected = _solo(solo, requests)
    for fill in (NAN_BYTE, ZERO_BYTE):
        engine = _make_engine(model, 12, fill, max_num_batched_tokens=48, max_num_seqs=6)
        assert _drive(engine, requests, seed=fill) == expected
        stats = engine.stats()
        assert stats.preemptions > 0 and stats.reused_tokens > 100 and stats.blocks_used == 0
