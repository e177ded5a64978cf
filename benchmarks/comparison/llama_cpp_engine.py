"""llama.cpp for the comparison: its batch API, several sequences a step, no server around it.

The loop is as short as Python allows and the text is never put together, so nothing but
``llama_decode`` and an argmax is on the clock.
"""

from __future__ import annotations

import ctypes
import time
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np

from comparison.worker import About

BATCH = 2048
# The library's own default for a physical batch.
MICRO_BATCH = 512
# Of one sequence: as much as any scenario needs, since attention may look at all of it.
CONTEXT = 768

Row = tuple[int, int, int, bool]  # token, position, sequence, wants logits


class LlamaCppEngine:
    """A model, and one context for every number of sequences that was asked for."""

    def __init__(self, model: Any, threads: int) -> None:
        self._model, self._threads = model, threads
        self._vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        self._batch = llama_cpp.llama_batch_init(BATCH, 0, 1)
        self._contexts: dict[int, Any] = {}

    @property
    def about(self) -> About:
        model = self._model
        head_dim = llama_cpp.llama_model_n_embd(model) // llama_cpp.llama_model_n_head(model)
        values = llama_cpp.llama_model_n_layer(model) * llama_cpp.llama_model_n_head_kv(model)
        return About(
            version=llama_cpp.__version__,
            form="Q4_0, Q8_0 head, f16 KV",
            # The embedding is the head too: a decode step reads the whole model.
            weight_bytes=llama_cpp.llama_model_size(model),
            kv_bytes_per_token=2 * 2 * values * head_dim,
        )

    def run(self, prompts: list[list[int]], new_tokens: int) -> list[list[float]]:
        context = self._context(len(prompts))
        self._clear(context)
        times: list[list[float]] = [[] for _ in prompts]
        start = time.perf_counter()
        tokens = self._prefill(context, prompts, times, start)
        for step in range(new_tokens - 1):
            rows = [(t, len(prompts[s]) + step, s, True) for s, t in enumerate(tokens)]
            self._decode(context, rows)
            tokens = [self._greedy(context, i) for i in range(len(rows))]
            now = time.perf_counter() - start
            for sequence in times:
                sequence.append(now)
        return times

    def logits(self, window: list[int]) -> Any:
        context = self._context(1)
        self._clear(context)
        self._decode(context, [(token, i, 0, True) for i, token in enumerate(window)])
        rows = llama_cpp.llama_get_logits(context)
        return np.ctypeslib.as_array(rows, (len(window), self._vocab)).copy()

    def _prefill(
        self, context: Any, prompts: list[list[int]], times: list[list[float]], start: float
    ) -> list[int]:
        """First tokens; as many whole prompts a call as fit the batch."""
        first: list[int] = []
        group = max(1, BATCH // max(map(len, prompts)))
        for begin in range(0, len(prompts), group):
            some = list(enumerate(prompts))[begin : begin + group]
            rows = [
                (token, i, s, i == len(ids) - 1) for s, ids in some for i, token in enumerate(ids)
            ]
            self._decode(context, rows)
            first += [self._greedy(context, i) for i, row in enumerate(rows) if row[3]]
            now = time.perf_counter() - start
            for s, _ in some:
                times[s].append(now)
        return first

    def _decode(self, context: Any, rows: list[Row]) -> None:
        batch = self._batch
        batch.n_tokens = len(rows)
        for i, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, wanted
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = sequence
        status = llama_cpp.llama_decode(context, batch)
        if status != 0:
            raise RuntimeError(f"llama_decode returned {status} for {len(rows)} rows")

    def _greedy(self, context: Any, row: int) -> int:
        logits = llama_cpp.llama_get_logits_ith(context, row)
        return int(np.ctypeslib.as_array(logits, (self._vocab,)).argmax())

    def _context(self, sequences: int) -> Any:
        if sequences not in self._contexts:
            params = llama_cpp.llama_context_default_params()
            params.n_ctx = sequences * CONTEXT
            params.n_batch, params.n_ubatch = BATCH, MICRO_BATCH
            params.n_seq_max = sequences
            params.n_threads = params.n_threads_batch = self._threads
            context = llama_cpp.llama_init_from_model(self._model, params)
            if not context:
                raise RuntimeError(f"llama.cpp made no context for {sequences} sequences")
            self._contexts[sequences] = context
        return self._contexts[sequences]

    def _clear(self, context: Any) -> None:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)


@llama_cpp.llama_log_callback  # type: ignore[untyped-decorator]
def _only_errors(level: int, text: bytes, _: ctypes.c_void_p) -> None:
    if level == 4:
        print(text.decode(errors="replace"), end="")


def load(model: Path, threads: int, sequences: int) -> LlamaCppEngine:
    """A GGUF file, in memory as the library's own defaults lay it out for this CPU."""
    llama_cpp.llama_log_set(_only_errors, ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()
    params = llama_cpp.llama_model_default_params()
    loaded = llama_cpp.llama_model_load_from_file(str(model).encode(), params)
    if not loaded:
        raise RuntimeError(f"llama.cpp cannot load {model}")
    return LlamaCppEngine(loaded, threads)
