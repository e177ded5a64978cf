"""qtool for the comparison: the engine thread a server runs, with nothing left out."""

from __future__ import annotations

import itertools
import queue
import time
from pathlib import Path

import torch

import qtool
from comparison.worker import About
from qtool.errors import QtoolError
from qtool.runtime.engine import Engine
from qtool.runtime.engine_thread import EngineThread
from qtool.runtime.evaluate import CHUNK, WindowRun
from qtool.runtime.loaded_model import LoadedModel, load_model
from qtool.runtime.options import EngineOptions, ModelOptions
from qtool.runtime.outputs import OutputDelta
from qtool.runtime.request import Request
from qtool.runtime.sampling_params import SamplingParams
from qtool.runtime.tokenizer import Tokenizer

MAX_MODEL_LEN = 1024


class QtoolEngine:
    """Requests go in from this thread; tokens are timed where a server would send them."""

    def __init__(self, model: LoadedModel, thread: EngineThread) -> None:
        self._model, self._thread, self._ids = model, thread, itertools.count()

    @property
    def about(self) -> About:
        decoder, info = self._model.decoder, self._thread.info
        return About(
            version=qtool.__version__,
            form=f"{info.quantization}, {info.backend}, {'; '.join(info.notes) or 'as asked'}",
            weight_bytes=sum(op.num_bytes for op in decoder.linears.values()),
            kv_bytes_per_token=info.kv_bytes_per_token,
        )

    def run(self, prompts: list[list[int]], new_tokens: int) -> list[list[float]]:
        params = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
        requests = [Request(f"r{next(self._ids)}", tuple(ids), params) for ids in prompts]
        arrived: queue.SimpleQueue[tuple[float, OutputDelta | QtoolError]] = queue.SimpleQueue()
        start = time.perf_counter()
        for request in requests:
            self._thread.submit(request, lambda item: arrived.put((time.perf_counter(), item)))
        times: dict[str, list[float]] = {request.request_id: [] for request in requests}
        running = len(requests)
        while running:
            at, item = arrived.get()
            if isinstance(item, QtoolError):
                raise item
            times[item.request_id] += [at - start] * len(item.token_ids)
            running -= item.finish_reason is not None
        return list(times.values())

    def logits(self, window: list[int]) -> object:
        run = WindowRun(self._model.decoder, window)
        ends = [*range(CHUNK, len(window), CHUNK), len(window)]
        starts = [0, *ends[:-1]]
        return torch.cat([run.logits(s, e) for s, e in zip(starts, ends, strict=True)]).numpy()


def load(model: Path, threads: int, sequences: int) -> QtoolEngine:
    """A checkpoint on native kernels with an INT8 cache."""
    torch.set_num_threads(threads)
    options = EngineOptions(
        model=str(model),
        loading=ModelOptions(device="cpu", kv_cache_dtype="int8"),
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=sequences,
    )
    loaded = load_model(model, options.loading, MAX_MODEL_LEN)
    engine = Engine(loaded, Tokenizer.load(model), options)
    return QtoolEngine(loaded, EngineThread(engine))
