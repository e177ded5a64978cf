"""Batches for a decoder, laid over scattered blocks of a cache."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import torch
from torch import Tensor

from qtool.runtime.batch import Batch, build_batch
from qtool.runtime.kv_cache import BlockPools
from qtool.runtime.model import Decoder
from qtool.runtime.sampling_params import SamplingParams
from qtool.runtime.scheduled_step import Chunk
from qtool.runtime.sequence import NO_TAIL, Sequence

BLOCK_SIZE = 16


def block_size_of(decoder: Decoder) -> int:
    """Tokens of a block, where the form of the cache does not leave it open."""
    return decoder.kv.schemes.block_size(None)


def make_cache(
    decoder: Decoder, num_blocks: int = 64, *, poisoned: bool = True, num_tails: int = 1
) -> BlockPools:
    """A pool whose unused slots hold NaN: nothing may read them."""
    cache = decoder.new_cache(num_blocks, block_size_of(decoder), num_tails)
    if poisoned:
        for pool in (*cache.pools, *cache.tails):
            # All ones is NaN in every floating dtype, and in the steps of 8-bit pages.
            pool.view(torch.uint8).fill_(255)
    return cache


def _cache_for(decoder: Decoder, token_ids: SequenceOf[int]) -> BlockPools:
    """With room for every second block that the tokens take."""
    return make_cache(decoder, max(64, 2 * (len(token_ids) // BLOCK_SIZE + 2)))


def make_sequence(
    token_ids: SequenceOf[int],
    first_block: int,
    name: str = "s",
    *,
    block_size: int = BLOCK_SIZE,
    tail: int = NO_TAIL,
) -> Sequence:
    """A sequence on every second block, in falling order: nothing lies side by side."""
    sequence = Sequence(name, list(token_ids), SamplingParams())
    count = -(-len(token_ids) // block_size)
    sequence.block_table = [first_block + 2 * i for i in reversed(range(count))]
    sequence.tail = tail
    return sequence


def batch_of(*chunks: Chunk, block_size: int = BLOCK_SIZE) -> Batch:
    """All logits of all chunks."""
    return build_batch(chunks, block_size, torch.device("cpu"), [True] * len(chunks))


def run_whole(decoder: Decoder, token_ids: SequenceOf[int]) -> Tensor:
    """Logits [T, vocab] of one sequence, in one chunk."""
    size = block_size_of(decoder)
    sequence = make_sequence(token_ids, 0, block_size=size, tail=0)
    batch = batch_of(Chunk(sequence, 0, len(token_ids)), block_size=size)
    return decoder.forward(batch, _cache_for(decoder, token_ids))


def run_chunked(decoder: Decoder, token_ids: SequenceOf[int], sizes: SequenceOf[int]) -> Tensor:
    """The same in chunks of ``sizes``, the last of them repeated."""
    block_size, cache = block_size_of(decoder), _cache_for(decoder, token_ids)
    sequence = make_sequence(token_ids, 1, block_size=block_size, tail=0)
    logits, start, remaining = [], 0, list(sizes)
    while start < len(token_ids):
        size = remaining.pop(0) if len(remaining) > 1 else remaining[0]
        size = min(size, len(token_ids) - start)
        batch = batch_of(Chunk(sequence, start, size), block_size=block_size)
        logits.append(decoder.forward(batch, cache))
        start += size
    return torch.cat(logits)
