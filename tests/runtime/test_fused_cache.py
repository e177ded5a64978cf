"""Whole tiny decoders over the GPU back end's own pages, in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from qtool.errors import EngineError
from qtool.runtime.batch import build_batch
from qtool.runtime.kv_cache import BlockPools, LayerCache
from qtool.runtime.kv_fused import FusedLayer, page_form
from qtool.runtime.kv_groups import group_layers
from qtool.runtime.kv_schemes import INT4, SCHEMES, KVScheme, Stored
from qtool.runtime.load_plan import make_plan
from qtool.runtime.loaded_model import LoadedModel, load_model
from qtool.runtime.model import Decoder
from qtool.runtime.options import EngineOptions, ModelOptions
from qtool.runtime.sampling_params import SamplingParams
from qtool.runtime.scheduled_step import Chunk
from qtool.runtime.sequence import FORGOTTEN, Sequence
from qtool.runtime.tails import BlockCopy
from support.gemm import relative_error

pytest.importorskip("triton")

CPU = torch.device("cpu")
# Ours rounds what it rotates once, and not what it decodes: a code may move by a step.
BOUNDS = {"wide": 0.005, "fp8": 0.02, "int8": 0.01, "k8v4": 0.02, "int4": 0.02}


@pytest.fixture(scope="module")
def folder(model_factory: Callable[..., Path]) -> Path:
    return model_factory(dtype=torch.float16, head_dim=64, heads=2, kv_heads=1, layers=1)


def _load(folder: Path, backend: str, scheme: str = "wide", dtype: str = "fp16") -> LoadedModel:
    options = ModelOptions(
        device="cpu", backend=backend, dtype=dtype, kv_cache_dtype=scheme, self_check=False
    )
    return load_model(folder, options)


def _ids(count: int) -> list[int]:
    return torch.randint(384, (count,), generator=torch.Generator().manual_seed(7)).tolist()


def _sequence(name: str, ids: list[int], table: list[int], tail: int) -> Sequence:
    sequence = Sequence(name, list(ids), SamplingParams())
    sequence.block_table, sequence.tail = table, tail
    return sequence


def _cache(decoder: Decoder, tails: int = 2) -> BlockPools:
    cache = decoder.new_cache(8, 64, tails)
    for pool in (*cache.pools, *cache.tails):
        pool.view(torch.uint8).fill_(255)
    return cache


def _step(decoder: Decoder, cache: BlockPools, *chunks: Chunk) -> Tensor:
    return decoder.forward(build_batch(chunks, 64, CPU, [True] * len(chunks)), cache)


def _greedy(decoder: Decoder, ids: list[int], count: int) -> tuple[Tensor, list[int]]:
    """Logits of the prompt in two chunks, and tokens chosen one after another."""
    sequence, cache = _sequence("s", ids, [5, 2], 1), _cache(decoder)
    logits = [
        _step(decoder, cache, Chunk(sequence, start, length))
        for start, length in ((0, 40), (40, len(ids) - 40))
    ]
    tokens = [int(logits[-1][-1].argmax())]
    while len(tokens) < count:
        sequence.append(tokens[-1])
        chunk = Chunk(sequence, len(ids) + len(tokens) - 1, 1)
        tokens.append(int(_step(decoder, cache, chunk)[-1].argmax()))
    return torch.cat(logits), tokens


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_decoder_computes_what_the_reference_does_with_the_same_cache(
    scheme: str, folder: Path
) -> None:
    ours, theirs = (_load(folder, name, scheme).decoder for name in ("triton", "reference"))
    cache = ours.new_cache(2, 64)
    assert isinstance(cache, LayerCache)
    assert all(isinstance(layer, FusedLayer) for layer in cache.layers)
    ids = _ids(66)
    found, tokens = _greedy(ours, ids, 3)
    expected, wanted = _greedy(theirs, ids, 3)
    assert relative_error(found, expected.double()) < BOUNDS[scheme]
    assert tokens == wanted


@pytest.mark.parametrize("scheme", ["int8", "k8v4", "int4"])
def test_forks_in_mid_page_see_what_each_would_alone(scheme: str, folder: Path) -> None:
    decoder, ids = _load(folder, "triton", scheme).decoder, _ids(70)
    cache = _cache(decoder)
    parent = _sequence("p", ids, [3, 1], 0)
    _step(decoder, cache, Chunk(parent, 0, 70))
    fork = _sequence("f", ids, [3, 6], 1)
    cache.copy_blocks([BlockCopy(1, 6)])
    if cache.tails:
        cache.copy_tails([BlockCopy(0, 1)])
    parent.append(11)
    fork.append(12)
    together = _step(decoder, cache, Chunk(parent, 70, 1), Chunk(fork, 70, 1))
    for token, logits in zip((11, 12), together, strict=True):
        alone, own = _sequence("a", [*ids, token], [0, 4], 0), _cache(decoder)
        _step(decoder, own, Chunk(alone, 0, 70))
        expected = _step(decoder, own, Chunk(alone, 70, 1))[0]
        assert relative_error(logits, expected.double()) < 1e-3


@pytest.mark.parametrize("scheme", ["wide", "int8", "k8v4", "int4"])
def test_groups_of_layers_see_their_own_blocks_and_nothing_behind_their_window(
    scheme: str, model_factory: Callable[..., Path]
) -> None:
    window = {"use_sliding_window": True, "sliding_window": 40, "max_window_layers": 1}
    shape = {"model_type": "qwen2", "head_dim": 64, "heads": 2, "kv_heads": 1, "hidden_size": 128}
    folder = model_factory(dtype=torch.float16, layers=2, **shape, **window)
    decoder, size = _load(folder, "triton", scheme).decoder, SCHEMES[scheme].block_size(None)
    groups, ids = group_layers(decoder.config.windows, size, 256), _ids(140)
    assert groups.windows == (None, 40) and groups.depth == 1
    caches = [decoder.new_cache(20, size, 1, g) for g in (None, groups)]
    assert all(isinstance(layer, FusedLayer) for layer in caches[1].layers)  # type: ignore[attr-defined]
    for cache in caches:
        for pool in (*cache.pools, *cache.tails):
            pool.view(torch.uint8).fill_(255)
    whole, apart = (_sequence("s", ids, list(range(10, 1, -1)), 0) for _ in caches)
    apart.more_tables = (list(range(11, 20)),)
    start = 0
    for length in (130, 6, 1, 1):
        logits = [
            decoder.forward(build_batch([Chunk(s, start, length)], size, CPU, [True]), cache)
            for s, cache in zip((whole, apart), caches, strict=True)
        ]
        assert torch.equal(logits[0], logits[1])
        start += length
        for index in range((start - 40 + 1) // size):
            if (block := apart.more_tables[0][index]) != FORGOTTEN:
                apart.more_tables[0][index] = FORGOTTEN
                for pool in caches[1].pools:
                    pool[block].view(torch.uint8).fill_(255)
    assert FORGOTTEN in apart.more_tables[0]


class _Recorder:
    """Before a kernel: remembers the forms that would be compiled."""

    def __init__(self, kernel: Any) -> None:
        self._kernel, self.forms = kernel, set[tuple[tuple[str, str], ...]]()

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, **constants: Any) -> None:
            self.forms.add(tuple(sorted((name, str(v)) for name, v in constants.items())))
            self._kernel[grid](*args, **constants)

        return launch


@pytest.mark.parametrize("scheme", ["int8", "k8v4", "int4"])
def test_nothing_is_compiled_after_warm_up_which_stores_nothing(
    scheme: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from qtool.runtime.kernels.triton import backend, kv_pages

    decoder = _load(folder, "triton", scheme).decoder
    cache = _cache(decoder)
    names = ("paged_attention_kernel", "write_rows_kernel", "seal_pages_kernel")
    recorders = [_Recorder(getattr(kv_pages, name)) for name in names]
    for name, recorder in zip(names, recorders, strict=True):
        monkeypatch.setattr(kv_pages, name, recorder)
    before = [pool.clone() for pool in cache.pools]
    with monkeypatch.context() as patch:
        patch.setattr(backend, "is_interpreted", lambda: False)
        decoder.warm_up(cache)
    for pool, old in zip(cache.pools, before, strict=True):
        assert torch.equal(pool.view(torch.uint8), old.view(torch.uint8))
    warmed = [set(recorder.forms) for recorder in recorders]
    assert len(warmed[0]) == len(warmed[1]) == 2
    sequence, start = _sequence("s", _ids(66), [5, 2], 1), 0
    for rows in (40, 20, 5, 1):
        _step(decoder, cache, Chunk(sequence, start, rows))
        start += rows
    assert [recorder.forms for recorder in recorders] == warmed


@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_is_reported_is_what_is_allocated(scheme: str, folder: Path) -> None:
    decoder = _load(folder, "triton", scheme).decoder
    assert decoder.block_size() == 64
    assert SCHEMES[scheme].has_tails or decoder.block_size(16) == 16
    cache = decoder.new_cache(5, 64, 3)
    assert sum(pool.nbytes for pool in cache.pools) == 5 * 64 * decoder.kv_bytes_per_token
    assert sum(tail.nbytes for tail in cache.tails) == 3 * decoder.kv_tail_bytes


def _attention(model: LoadedModel, block_size: int = 64) -> list[tuple[str, str]]:
    plan = make_plan(model, EngineOptions(model="t"), block_size, 8)
    return [(part.kernel, part.why) for part in plan.parts if part.part == "attention"]


def test_the_plan_names_the_kernel(folder: Path) -> None:
    model = _load(folder, "triton", "int4")
    assert [kernel for kernel, _ in _attention(model)] == ["triton paged, int4"]
    assert not any("attention" in note for note in model.notes)


def test_what_the_kernels_do_not_take_runs_on_torch_and_says_so(
    folder: Path, tiny_model_folder: Path
) -> None:
    small = _load(tiny_model_folder, "triton", "int8")
    assert any("plain torch" in note and "head_dim is 16" in note for note in small.notes)
    ((kernel, reason),) = _attention(small)
    assert "torch" in kernel and "head_dim is 16; the kernels take 64" in reason
    cache = small.decoder.new_cache(2, 64)
    assert isinstance(cache, LayerCache)
    assert not any(isinstance(layer, FusedLayer) for layer in cache.layers)
    assert any("float32" in note for note in _load(folder, "triton", "wide", "fp32").notes)
    odd = _attention(_load(folder, "triton"), 48)
    assert "block_size is 48; the kernels take 16, 32, 64 or 128" in odd[0][1]


def test_strict_refuses_attention_on_torch(tiny_model_folder: Path) -> None:
    options = ModelOptions(device="cpu", backend="triton", dtype="fp16", strict=True)
    with pytest.raises(EngineError, match="head_dim is 16"):
        load_model(tiny_model_folder, options)


def test_a_scheme_that_no_kernel_has_is_no_form() -> None:
    turned = KVScheme("turned", INT4.values, INT4.keys, "keys in groups, values by channel")
    assert page_form(turned) is None
    assert page_form(KVScheme("3 bits", Stored(3, "int", "head"), INT4.values, "")) is None
