"""The reference back end gives a row the same bits in any company and any chunk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from qtool.runtime.kernels.cpu import build
from qtool.runtime.kernels.cpu.native_backend import NativeBackend
from qtool.runtime.kernels.reference import KEY_TILE, ROW_TILE, ReferenceBackend
from qtool.runtime.loaded_model import load_model
from qtool.runtime.model import Decoder
from qtool.runtime.native_decoder import NativeDecoder
from qtool.runtime.options import ModelOptions
from qtool.runtime.scheduled_step import Chunk
from support.batches import batch_of, make_cache, make_sequence, run_chunked, run_whole
from support.families import FAMILY_VARIANTS
from support.native import LEVELS

BACKEND = ReferenceBackend(torch.device("cpu"), torch.float32)


@pytest.fixture(scope="module")
def decoder(model_factory: Callable[..., Path]) -> Decoder:
    # Odd widths: tails in every vectorized loop.
    folder = model_factory(hidden_size=72, intermediate_size=100, heads=6, kv_heads=2, layers=3)
    return load_model(folder, ModelOptions(device="cpu", dtype="fp32", backend="reference")).decoder


def _random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _token_ids(count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 384, (count,), generator=generator).tolist()


@pytest.mark.parametrize(
    ("columns", "rows"), [(576, 960), (576, 3072), (1536, 576), (100, 72), (33, 7), (4096, 256)]
)
def test_a_rows_place_in_a_tile_does_not_matter(columns: int, rows: int) -> None:
    linear = BACKEND.linear(_random(rows, columns), None)
    x = _random(1, columns, seed=1)
    alone = linear(x)
    for place in range(ROW_TILE):
        company = _random(ROW_TILE, columns, seed=place + 2)
        company[place] = x[0]
        assert torch.equal(linear(company)[place], alone[0]), place


def test_norm_and_activation_do_not_depend_on_the_number_of_rows() -> None:
    x, weight = _random(50, 1000), _random(1000, seed=1)
    for size in (1, 2, 15, 16, 17, 50):
        assert torch.equal(
            BACKEND.rms_norm(x[:size], weight, 1e-5)[0], BACKEND.rms_norm(x, weight, 1e-5)[0]
        )
        for function in (BACKEND.silu_mul, BACKEND.gelu_mul):
            assert torch.equal(function(x[:size])[size - 1], function(x)[size - 1])


@pytest.mark.parametrize("sizes", [[1], [5], [16], [17, 3], [KEY_TILE + 1], [40, 1, 1, 29]])
def test_chunks_of_any_size_give_the_same_bits(decoder: Decoder, sizes: list[int]) -> None:
    token_ids = _token_ids(KEY_TILE + 37, 1)
    assert torch.equal(run_chunked(decoder, token_ids, sizes), run_whole(decoder, token_ids))


def test_company_does_not_change_a_bit(decoder: Decoder) -> None:
    """Prompts, chunks and decodes of 9 others in the same step."""
    token_ids = _token_ids(70, 2)
    alone = run_whole(decoder, token_ids)
    cache = make_cache(decoder, 256)
    sequence = make_sequence(token_ids, 0, "mine")
    others = [
        make_sequence(_token_ids(9 + 7 * i, 10 + i), 1 + 20 * (i + 1), f"o{i}") for i in range(9)
    ]
    before = [Chunk(other, 0, other.num_tokens - 3) for other in others]
    first = decoder.forward(batch_of(*before[:4], Chunk(sequence, 0, 50), *before[4:]), cache)
    offset = sum(chunk.length for chunk in before[:4])
    assert torch.equal(first[offset : offset + 50], alone[:50])
    after = [Chunk(other, other.num_tokens - 3, 1) for other in others]
    second = decoder.forward(batch_of(*after, Chunk(sequence, 50, 20)), cache)
    assert torch.equal(second[len(after) :], alone[50:])


# One model of each kind of code: native step, native linears under torch, experts, soft caps.
INVARIANT = {
    "llama": {},
    "llama, bfloat16": {"dtype": torch.bfloat16},
    "qwen3": FAMILY_VARIANTS["qwen3"],
    "gemma2": FAMILY_VARIANTS["gemma2"],
    "mixture": FAMILY_VARIANTS["qwen2_moe"],
}


@pytest.mark.parametrize("native", [True, False], ids=["native", "no compiler"])
@pytest.mark.parametrize("variant", INVARIANT)
def test_asked_for_it_a_cpu_gives_the_same_bits_in_any_company(
    model_factory: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    variant: str,
    native: bool,
) -> None:
    if not native:
        monkeypatch.setattr(build, "load_native", lambda: build.Native(None, "", "no compiler"))
    options = ModelOptions(device="cpu", batch_invariant=True)
    decoder = load_model(model_factory(**INVARIANT[variant]), options).decoder
    assert isinstance(decoder.backend, NativeBackend) == (native and bool(LEVELS))
    assert isinstance(decoder, NativeDecoder) == (
        native and bool(LEVELS) and variant.startswith("llama")
    )
    mine, token_ids = [], _token_ids(70, 2)
    alone = run_whole(decoder, token_ids)
    cache, sequence = make_cache(decoder, 256), make_sequence(token_ids, 0, "mine")
    others = [make_sequence(_token_ids(9 + 7 * i, 10 + i), 21 + 20 * i, f"o{i}") for i in range(9)]
    first = [Chunk(other, 0, other.num_tokens - 3) for other in others]
    for size, company in ((33, first[:4]), (1, []), (36, first[4:])):
        chunk = Chunk(sequence, sum(map(len, mine)), size)
        logits = decoder.forward(batch_of(*company, chunk), cache)
        mine.append(logits[sum(other.length for other in company) :])
    assert torch.equal(torch.cat(mine), alone)
