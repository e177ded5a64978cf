"""One window of tokens through a decoder, chunk by chunk, as a request would run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from qtool.runtime.batch import Batch, build_batch
from qtool.runtime.blocks import BlockManager
from qtool.runtime.eviction import EvictionRule
from qtool.runtime.kv_cache import new_evictor
from qtool.runtime.model import Decoder
from qtool.runtime.sampling_params import SamplingParams
from qtool.runtime.scheduled_step import Chunk
from qtool.runtime.sequence import Sequence


class WindowRun:
    """One window through a decoder, with a cache of its own.

    Args:
        eviction: what of the window's keys and values is kept; everything if ``None``.

    Attributes:
        cache: what chunks so far have left.
    """

    def __init__(
        self, decoder: Decoder, window: list[int], eviction: EvictionRule | None = None
    ) -> None:
        self._block_size = decoder.block_size()
        blocks = -(-len(window) // self._block_size) if eviction is None else eviction.budget
        self._decoder = decoder
        self.cache = decoder.new_cache(blocks, self._block_size)
        evictor = None if eviction is None else new_evictor(eviction, self.cache)
        self._blocks = BlockManager(blocks, self._block_size, num_tails=1, evictor=evictor)
        self._sequence = Sequence("window", window, SamplingParams())
        self._blocks.adopt(self._sequence, [[]])

    def logits(self, start: int, end: int) -> Tensor:
        """Float32 logits [end - start, vocab]; chunks must follow one another."""
        parts = self._run(start, end, everything=True)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def skip(self, start: int, end: int) -> None:
        """The same chunk, where nobody asks for its logits; not the window's last."""
        self._run(start, end, everything=False)

    def _run(self, start: int, end: int, *, everything: bool) -> list[Tensor]:
        logits = list[Tensor]()
        while start < end:
            length = min(end - start, self._blocks.room(self._sequence))
            with self.chunk(start, start + length, everything=everything) as batch:
                logits.append(self._decoder.forward(batch, self.cache))
            start += length
        return logits

    @contextmanager
    def chunk(self, start: int, end: int, *, everything: bool = True) -> Iterator[Batch]:
        """A chunk as a batch, which is to be computed before the context ends.

        Args:
            everything: whether logits of all its rows are wanted, or those of the last alone.
        """
        self._blocks.grow(self._sequence, end - start)
        chunk = Chunk(self._sequence, start, end - start)
        yield build_batch([chunk], self._block_size, self._decoder.device, [everything])
        self._blocks.advance(self._sequence, end - start)
