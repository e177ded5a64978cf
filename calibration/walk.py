"""Walk a model block by block, with the inputs each block really gets.

The model is built on the meta device, so it has its shape and no memory. The part before the
blocks (embeddings, rotary tables) runs once to capture the first block's input and every
block's other arguments (positions, masks). Then, for each block: its weights are read, the
caller observes it and replaces its weights, and it runs once more, so that the next block's
input carries the error made so far. One block's weights are in memory at a time.

A second stream may go along: held-out windows, which see every block with its original weights,
before the caller changes them. What they are after the last block gives the original's logits
(:mod:`qtool.calibration.logits`), and no model is loaded twice. A third one may be the samples
themselves as they are in the original model, for callers that aim at the original's outputs.

Everything computes in float32. Hidden states of all samples stay in host memory in float32:
``samples * seq_len * hidden_size * 4`` bytes (151 MB for SmolLM2 at 128 x 512, 1.07 GB for a
hidden size of 4096), once a stream: a block's outputs replace its inputs. Between two blocks they
are all that a walk needs to go on later (:class:`WalkState`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from qtool.calibration.cache_peaks import CachePeaks, cache_peaks
from qtool.calibration.decoder_block import DecoderBlock, attach
from qtool.calibration.families import ModelFamily
from qtool.calibration.meta_model import build_on_meta, load_weights, release_weights
from qtool.calibration.observers import AbsMax
from qtool.calibration.products import exact_products
from qtool.formats.checkpoint import CheckpointReader

RoundInput = Callable[[str, Tensor], Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class WalkState:
    """Where a walk stands between two blocks.

    Attributes:
        index: the block that is next.
        hidden: its inputs on calibration samples, float32 [num_samples, seq_len, hidden_size], or
            ``None`` for a walk without.
        held_out: its inputs on held-out windows through the original weights, likewise.
        originals: what ``hidden`` is in the original model, for a walk that keeps it.
    """

    index: int
    hidden: Tensor | None = None
    held_out: Tensor | None = None
    originals: Tensor | None = None


@dataclass(slots=True)
class _Stream:
    """Token windows on their way.

    Attributes:
        hidden: the next block's inputs.
        arguments: every block's other arguments.
        originals: what ``hidden`` is in the original model, if anybody looks at it.
    """

    hidden: Tensor
    arguments: Sequence[Mapping[str, Any]]
    originals: Tensor | None = None


class Walk:
    """A model block by block; it can stop between two blocks and go on from its state.

    Args:
        reader: the source checkpoint.
        family: row of the model's family.
        device: where blocks compute.
        ids: calibration samples int64 [num_samples, seq_len], all real tokens, or ``None``.
        held_out: windows int64 [num_windows, seq_len] for the original weights, or ``None``.
        originals: pass the samples through the original weights as well, for methods that make
            up for the error of earlier blocks.
        watch_cache: note the largest keys and values of the samples in every block.
        round_input: what the linear of a full name makes of its input before it multiplies, for
            checkpoints that round it.
        state: where to go on, with the same samples and windows; at the first block if ``None``.

    Raises:
        ModelError: the tokens or the config do not fit the model.
        CalibrationError: a hidden state is not finite.
    """

    def __init__(
        self,
        reader: CheckpointReader,
        family: ModelFamily,
        device: torch.device,
        *,
        ids: Tensor | None = None,
        held_out: Tensor | None = None,
        originals: bool = False,
        watch_cache: bool = False,
        round_input: RoundInput | None = None,
        state: WalkState | None = None,
    ) -> None:
        self._reader, self._device, self._watch_cache = reader, device, watch_cache
        self._model = build_on_meta(reader.folder)
        if round_input is not None:
            _round_inputs(self._model, round_input)
        self._prefixes = family.block_prefixes(reader.config)
        state = state or WalkState(0)
        self._index = state.index
        self._block: DecoderBlock | None = None
        self._peaks: dict[str, float] = {}
        self._cache_peaks: CachePeaks | None = None

        def open_stream(ids: Tensor | None, hidden: Tensor | None) -> _Stream | None:
            if ids is None:
                return None
            # The arguments are the same for all samples, so one is enough where hidden is known.
            ids = ids if hidden is None else ids[:1]
            first, arguments = _capture_first_inputs(self._model, reader, family, ids, device)
            return _Stream(first if hidden is None else hidden, arguments)

        self._samples = open_stream(ids, state.hidden)
        self._held_out = open_stream(held_out, state.held_out)
        if originals and self._samples is not None:
            kept = state.originals
            self._samples.originals = self._samples.hidden.clone() if kept is None else kept

    @property
    def state(self) -> WalkState:
        """Where the walk stands. Its tensors change when the walk goes on."""
        samples, held_out = self._samples, self._held_out
        return WalkState(
            self._index,
            None if samples is None else samples.hidden,
            None if held_out is None else held_out.hidden,
            None if samples is None else samples.originals,
        )

    @property
    def peaks(self) -> dict[str, float]:
        """Largest \\|input\\| of every linear of the latest block on the held-out windows."""
        return self._peaks

    @property
    def cache_peaks(self) -> CachePeaks | None:
        """Largest keys and values of the block left last, with the weights it was left with."""
        return self._cache_peaks

    def blocks(self) -> Iterator[DecoderBlock]:
        """Hand out the remaining blocks; each is left by :meth:`advance`, by whomever called."""
        while self._index < len(self._prefixes):
            index = self._index
            yield self._enter()
            if self._index == index:
                self.advance()

    def advance(self) -> None:
        """Leave the current block: with its present weights it makes the next one's input."""
        block = self._enter()
        if self._watch_cache and self._samples is not None:
            self._cache_peaks = cache_peaks(block)
        if self._samples is not None and self._index + 1 < len(self._prefixes):
            block.propagate()
        block.release()
        release_weights(block.module)
        self._block = None
        self._index += 1

    def _enter(self) -> DecoderBlock:
        """The current block, with its weights; held-out windows have passed it then."""
        if self._block is None:
            prefix = self._prefixes[self._index]
            module = self._model.get_submodule(prefix)
            load_weights(module, prefix, self._reader, self._device)
            self._pass_held_out(module, prefix)
            stream = self._samples or _Stream(torch.empty(0, 1, 1), [{}] * len(self._prefixes))
            self._block = self._decoder_block(module, stream)
        return self._block

    def _pass_held_out(self, module: nn.Module, prefix: str) -> None:
        if self._held_out is None:
            return
        linears = [name for name, m in module.named_modules() if isinstance(m, nn.Linear)]
        observers = {name: AbsMax(f"{prefix}.{name}") for name in linears}
        with ExitStack() as hooks, exact_products():
            attach(module, {name: (observer,) for name, observer in observers.items()}, hooks)
            self._decoder_block(module, self._held_out).propagate()
        self._peaks = {
            f"{prefix}.{name}": float(observer.result().max())
            for name, observer in observers.items()
            if observer.tokens  # an expert may have seen none
        }

    def _decoder_block(self, module: nn.Module, stream: _Stream) -> DecoderBlock:
        index = self._index
        return DecoderBlock(
            index,
            self._prefixes[index],
            module,
            stream.hidden,
            stream.arguments[index],
            self._device,
            stream.originals,
        )


def _round_inputs(model: nn.Module, round_input: RoundInput) -> None:
    """Let every linear of a model see its input rounded."""

    def rounded(name: str) -> Callable[[nn.Module, tuple[Any, ...]], Tensor]:
        return lambda _, args: round_input(name, args[0])

    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(rounded(name))


def walk_blocks(
    reader: CheckpointReader,
    family: ModelFamily,
    ids: Tensor,
    device: torch.device,
    *,
    originals: bool = False,
) -> Iterator[DecoderBlock]:
    """All blocks of a model, with calibration samples alone; see :class:`Walk`."""
    return Walk(reader, family, device, ids=ids, originals=originals).blocks()


def _capture_first_inputs(
    model: nn.Module,
    reader: CheckpointReader,
    family: ModelFamily,
    ids: Tensor,
    device: torch.device,
) -> tuple[Tensor, list[dict[str, Any]]]:
    """Run everything around the blocks; returns block 0's inputs and every block's arguments."""
    trunk_name, _, blocks_name = family.blocks.rpartition(".")
    trunk = model.get_submodule(trunk_name)
    blocks = list(trunk.get_submodule(blocks_name).children())
    around = [(name, child) for name, child in trunk.named_children() if name != blocks_name]
    for name, child in around:
        load_weights(child, f"{trunk_name}.{name}", reader, device)
        child.to(device)
    hidden: list[Tensor] = []
    arguments: list[dict[str, Any]] = [{} for _ in blocks]
    with ExitStack() as stubs:
        for index, block in enumerate(blocks):
            # Set again, the method would be held by the block that it holds: a cycle in every
            # copy of a block, whose weights then wait for the garbage collector.
            stubs.callback(delattr, block, "forward")
            block.forward = _stub(index, hidden, arguments)
        # One sample at a time, so that masks have a batch of one and fit any batch later.
        for sample in ids.split(1):
            trunk(input_ids=sample.to(device), use_cache=False)
    for _, child in around:
        release_weights(child)
    return torch.cat(hidden), arguments


def _stub(
    index: int, hidden: list[Tensor], arguments: list[dict[str, Any]]
) -> Callable[..., Tensor]:
    """Stands in for a block: notes what it is called with, and returns its input."""

    def forward(hidden_states: Tensor, **kwargs: Any) -> Tensor:
        if index == 0:
            hidden.append(hidden_states.float().cpu())
        arguments[index] = kwargs
        return hidden_states

    return forward
