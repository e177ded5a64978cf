"""One window of tokens through a decoder, chunk by chunk, as a request would run."""

from __future__ import annotations

from torch import Tensor

from qtool.runtime.batch import build_batch
from qtool.runtime.model import Decoder
from qtool.runtime.sampling_params import SamplingParams
from qtool.runtime.scheduled_step import Chunk
from qtool.runtime.sequence import Sequence


class WindowRun:
    """One window through a decoder, with a cache of its own."""

    def __init__(self, decoder: Decoder, window: list[int]) -> None:
        self._block_size = decoder.block_size()
        blocks = -(-len(window) // self._block_size)
        self._decoder = decoder
        self._cache = decoder.new_cache(blocks, self._block_size)
        self._sequence = Sequence("window", window, SamplingParams())
        self._sequence.block_table, self._sequence.tail = list(range(blocks)), 0

    def logits(self, start: int, end: int) -> Tensor:
        """Float32 logits [end - start, vocab]; chunks must follow one another."""
        chunk = Chunk(self._sequence, start, end - start)
        batch = build_batch([chunk], self._block_size, self._decoder.device, [True])
        return self._decoder.forward(batch, self._cache)
