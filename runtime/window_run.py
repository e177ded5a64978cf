"""One window of tokens through a decoder, chunk by chunk, as a request would run."""

from __future__ import annotations

import torch
from torch import Tensor

from qtool.runtime.batch import build_batch
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
    """

    def __init__(
        self, decoder: Decoder, window: list[int], eviction: EvictionRule | None = None
    ) -> None:
        self._block_size = decoder.kv.schemes.block_size(None)
        blocks = -(-len(window) // self._block_size) if eviction is None else eviction.budget
        self._decoder = decoder
        self._cache = decoder.new_cache(blocks, self._block_size)
        evictor = None if eviction is None else new_evictor(eviction, self._cache)
        self._blocks = BlockManager(blocks, self._block_size, num_tails=1, evictor=evictor)
        self._sequence = Sequence("window", window, SamplingParams())
        self._blocks.adopt(self._sequence, [])

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
            self._blocks.grow(self._sequence, length)
            chunk = Chunk(self._sequence, start, length)
            batch = build_batch([chunk], self._block_size, self._decoder.device, [everything])
            logits.append(self._decoder.forward(batch, self._cache))
            self._blocks.advance(self._sequence, length)
            start += length
        return logits
