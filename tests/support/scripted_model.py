"""A decoder that writes what it is told, for tests of everything behind the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from qtool.runtime.batch import Batch
from qtool.runtime.kv_cache import BlockPools, CacheForm
from qtool.runtime.kv_groups import LayerGroups
from qtool.runtime.kv_schemes import WIDE
from qtool.runtime.loaded_model import LoadedModel, load_model
from qtool.runtime.options import ModelOptions


@dataclass
class ScriptedDecoder:
    """After a prompt of the one token ``t`` comes ``scripts[t]``, then ``end``.

    A sequence is known by its first cache block, where its first token was seen.
    """

    config: Any
    scripts: Mapping[int, Sequence[int]]
    end: int
    dtype: torch.dtype = torch.float32
    device: torch.device = torch.device("cpu")
    backend: Any = field(
        default_factory=lambda: SimpleNamespace(
            name="scripted", attention_kernel="none", norm_kernel="none", fused_kernel=""
        )
    )
    linears: Mapping[str, Any] = field(default_factory=dict)
    weight_bytes: int = 0
    kv_bytes_per_token: int = 4
    kv_tail_bytes: int = 0
    kv_cache_dtype: str = "scripted"
    has_native_attention: bool = False
    kv: CacheForm = CacheForm.uniform(WIDE, 1)
    _script_of: dict[int, int] = field(default_factory=dict)

    def block_size(self, asked: int | None = None) -> int:
        return self.kv.schemes.block_size(asked)

    def warm_up(self, cache: object) -> None:
        """There is nothing to compile."""

    def new_cache(
        self,
        num_blocks: int,
        block_size: int,
        num_tails: int = 0,
        groups: LayerGroups | None = None,
    ) -> BlockPools:
        return BlockPools(block_size, [torch.zeros(num_blocks)])

    def forward(self, batch: Batch, cache: object) -> Tensor:
        wanted = set(batch.logit_rows.tolist())
        rows = []
        for span, table in zip(batch.spans, batch.block_tables.tolist(), strict=True):
            if span.context_len == span.length:
                self._script_of[table[0]] = int(batch.token_ids[span.start])
            script = self.scripts[self._script_of[table[0]]]
            for row in sorted(wanted & set(range(span.start, span.start + span.length))):
                position = int(batch.positions[row])
                rows.append(script[position] if position < len(script) else self.end)
        logits = torch.zeros(len(rows), self.config.vocab_size)
        logits[range(len(rows)), rows] = 20.0
        return logits

    def likeliest(self, batch: Batch, cache: object) -> tuple[Tensor, Tensor]:
        best, tokens = self.forward(batch, cache).max(dim=-1)
        return best, tokens


def scripted_model(
    folder: Path, scripts: Mapping[int, Sequence[int]], end: int, vocab_size: int
) -> LoadedModel:
    """A model with the shape of the one in ``folder`` that writes ``scripts``."""
    model = load_model(folder, ModelOptions(device="cpu", dtype="fp32"))
    config = replace(model.decoder.config, vocab_size=vocab_size)
    decoder: Any = ScriptedDecoder(config, scripts, end)
    return replace(model, decoder=decoder)
