"""How much attention blocks are given: against a softmax in float64, in any chunks and company."""

from __future__ import annotations

import pytest
import torch

from qtool.runtime.attention_votes import UNITS, block_shares
from qtool.runtime.batch import build_batch
from qtool.runtime.kernels.backend import AttentionScope
from qtool.runtime.kernels.reference import ReferenceBackend
from qtool.runtime.kv_cache import CacheForm, LayerCache
from qtool.runtime.kv_schemes import SCHEMES
from qtool.runtime.sampling_params import SamplingParams
from qtool.runtime.scheduled_step import Chunk
from qtool.runtime.sequence import Sequence

CPU = torch.device("cpu")
NAN_BYTE = 255
SCOPE = AttentionScope(0.125)


@pytest.mark.parametrize(
    "scope", [AttentionScope(0.2), AttentionScope(0.2, 21), AttentionScope(0.2, None, 3.0)]
)
def test_shares_are_those_of_a_softmax_in_float64(scope: AttentionScope) -> None:
    generator = torch.Generator().manual_seed(0)
    q, keys = (torch.randn(n, generator=generator) for n in (6 * 8, 4 * 16 * 2 * 8))
    q, keys = q.view(6, 8), keys.view(4, 16, 2, 8)
    expected = torch.zeros(4, dtype=torch.float64)
    for head in range(6):
        scores = keys[:, :, head // 3].double().flatten(0, 1) @ q[head].double() * scope.scale
        if scope.softcap is not None:
            scores = scope.softcap * torch.tanh(scores / scope.softcap)
        if scope.window is not None:
            scores[: 64 - scope.window] = -torch.inf
        expected += torch.softmax(scores, 0).view(4, 16).sum(1)
    found = block_shares(q, keys, scope)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)
    assert float(found.sum()) == pytest.approx(6)


def _vote(
    name: str, bounds: list[tuple[int, int]], company: int
) -> tuple[list[float], torch.Tensor]:
    """Weights of the full blocks of the first of some equal sequences, and their keys as stored.

    Before that every slot and every tally holds something else.
    """
    scheme, size = SCHEMES[name], SCHEMES[name].block_size(None)
    cache = LayerCache(CacheForm.uniform(scheme, 1), (24, size, 2, 64), 2, torch.float32, CPU)
    for pool in (*cache.pools, *cache.tails):
        pool.view(torch.uint8).fill_(NAN_BYTE)
    votes = cache.count_votes()
    votes.totals.fill_(-(10**9))
    votes.counts.fill_(77)
    sequences = [Sequence(str(i), [0] * 160, SamplingParams()) for i in range(company)]
    for index, sequence in enumerate(sequences):
        sequence.block_table = [2 * i + index for i in range(160 // size + 1)]
        sequence.tail = index
    for start, end in bounds:
        batch = build_batch([Chunk(s, start, end - start) for s in sequences], size, CPU)
        rows = [torch.cat([part[start:end]] * company) for part in _data()]
        cache.attend(0, *rows, batch, SCOPE, ReferenceBackend(CPU, torch.float32))
    full = sequences[0].block_table[: 160 // size]
    return votes.weigh(full), cache.layers[0].read_keys(torch.tensor(full))


def _data() -> list[torch.Tensor]:
    """Queries, keys and values of 160 tokens."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(160, heads, 64, generator=generator) for heads in (4, 2, 2)]


@pytest.mark.parametrize("name", SCHEMES)
def test_weights_are_means_over_what_is_stored_in_any_chunks_and_company(name: str) -> None:
    weights, keys = _vote(name, [(0, 160)], company=2)
    chunks = [(0, 50), (50, 100), (100, 127), (127, 128), (128, 160)]
    assert _vote(name, chunks, company=1)[0] == weights
    most, size = len(weights), SCHEMES[name].block_size(None)
    expected = torch.zeros(most)
    for count in range(1, most + 1):
        expected[:count] += block_shares(_data()[0][count * size - 1], keys[:count], SCOPE)
    expected /= torch.arange(most, 0, -1)
    torch.testing.assert_close(torch.tensor(weights) / UNITS, expected, rtol=1e-5, atol=1e-5)
