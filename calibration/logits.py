"""From the hidden states after the last block to logits: the end of a model without its blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from qtool.calibration.families import ModelFamily
from qtool.calibration.meta_model import build_on_meta, load_weights
from qtool.calibration.walk import RoundInput, Walk
from qtool.formats.checkpoint import CheckpointReader


class FinalLogits:
    """Logits of windows whose hidden states a walk has carried to the end.

    The model runs as it is, with every block standing aside, so the final norm, the head and what
    a family does to its logits are transformers' own. Embedding and head are in memory, in
    float32, and the logits of the rows that are asked for.

    Args:
        reader: the checkpoint that the hidden states come from.
        family: row of the model's family.
        device: where to compute.
        ids: the windows, int64 [num_windows, seq_len].
        hidden: what comes out of the last block, float32 [num_windows, seq_len, hidden_size].
    """

    def __init__(
        self,
        reader: CheckpointReader,
        family: ModelFamily,
        device: torch.device,
        ids: Tensor,
        hidden: Tensor,
    ) -> None:
        self._ids, self._hidden, self._device = ids, hidden, device
        self._model = build_on_meta(reader.folder)
        self._window = 0
        _load_ends(self._model, reader, family, device)
        for block in self._model.get_submodule(family.blocks).children():
            block.forward = self._stand_in()

    @property
    def ids(self) -> Tensor:
        """The windows, int64 [num_windows, seq_len]."""
        return self._ids

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        return int(self._model.config.vocab_size)  # type: ignore[union-attr, arg-type]

    @torch.no_grad()
    def logits(self, window: int, start: int, end: int) -> Tensor:
        """Float32 logits [end - start, vocab] of the positions of one window, on the host."""
        self._window = window
        rows = torch.arange(start, end, device=self._device)
        ids = self._ids[window : window + 1].to(self._device)
        output = self._model(input_ids=ids, use_cache=False, logits_to_keep=rows)
        logits: Tensor = output.logits[0].float().cpu()
        return logits

    def _stand_in(self) -> Callable[..., Tensor]:
        def forward(hidden_states: Tensor, **_: Any) -> Tensor:
            return self._hidden[self._window : self._window + 1].to(self._device)

        return forward


def final_logits(
    reader: CheckpointReader,
    family: ModelFamily,
    device: torch.device,
    ids: Tensor,
    progress: Callable[[int, int], None] = lambda done, total: None,
    round_input: RoundInput | None = None,
) -> FinalLogits:
    """Run windows through a checkpoint block by block, for a model that fits nowhere whole.

    ``progress`` is told the blocks done and their number; ``round_input`` is that of
    :class:`~qtool.calibration.walk.Walk`.
    """
    walk = Walk(reader, family, device, held_out=ids, round_input=round_input)
    count = len(family.block_prefixes(reader.config))
    with torch.no_grad():
        for index in range(count):
            walk.advance()
            progress(index + 1, count)
    hidden = walk.state.held_out
    assert hidden is not None
    return FinalLogits(reader, family, device, ids, hidden)


def _load_ends(
    model: nn.Module, reader: CheckpointReader, family: ModelFamily, device: torch.device
) -> None:
    """Weights of everything around the blocks; a tied head is the embedding itself."""
    trunk_name, _, blocks_name = family.blocks.rpartition(".")
    for name, child in model.get_submodule(trunk_name).named_children():
        if name != blocks_name:
            load_weights(child, f"{trunk_name}.{name}", reader, device)
            child.to(device)
    head = model.get_output_embeddings()  # type: ignore[operator]
    if reader.config.get("tie_word_embeddings", False) or f"{family.head}.weight" not in reader:
        head.weight = model.get_input_embeddings().weight  # type: ignore[operator]
    else:
        load_weights(head, family.head, reader, device)
