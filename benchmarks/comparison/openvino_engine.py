"""OpenVINO GenAI for the comparison: continuous batching, INT8 cache, no text put together."""

from __future__ import annotations

import itertools
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai

from comparison.worker import About

MODEL_NAME = "openvino_model.xml"
BATCH = 2048
# Gigabytes: 32 sequences of 256 tokens need less.
CACHE_SIZE = 2
# Rows of a window at a time; later ones read the earlier ones' keys and values from the cache.
CHUNK = 64


class OpenVinoEngine:
    """A pipeline, and for logits, which it does not hand out, the same model on its own."""

    def __init__(self, pipeline: Any, folder: Path, properties: dict[str, Any]) -> None:
        self._pipeline, self._folder, self._properties = pipeline, folder, properties
        self._ids = itertools.count()
        self._model: Any = None

    @property
    def about(self) -> About:
        return About(
            version=openvino_genai.get_version(),
            form="INT4, INT8 head, u8 KV",
            weight_bytes=(self._folder / MODEL_NAME).with_suffix(".bin").stat().st_size,
            kv_bytes_per_token=_kv_bytes(self._folder),
        )

    def run(self, prompts: list[list[int]], new_tokens: int) -> list[list[float]]:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = new_tokens, True, False
        tensors = [openvino.Tensor(np.array([ids], dtype=np.int64)) for ids in prompts]
        times: list[list[float]] = [[] for _ in prompts]
        start = time.perf_counter()
        handles = [
            self._pipeline.add_request(next(self._ids), tensor, config) for tensor in tensors
        ]
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            now = time.perf_counter() - start
            for handle, sequence in zip(handles, times, strict=True):
                while handle.can_read():
                    for output in handle.read().values():
                        sequence += [now] * len(output.generated_ids)
        return times

    def logits(self, window: list[int]) -> Any:
        if self._model is None:
            model = openvino.Core().read_model(self._folder / MODEL_NAME)
            self._model = openvino.compile_model(model, "CPU", self._properties)
        request = self._model.create_infer_request()
        rows = [
            request.infer(_inputs(window, start, min(start + CHUNK, len(window))))["logits"][0]
            for start in range(0, len(window), CHUNK)
        ]
        return np.concatenate(rows)


def load(model: Path, threads: int, sequences: int) -> OpenVinoEngine:
    """A folder that optimum-intel exported."""
    properties = {"INFERENCE_NUM_THREADS": threads, "KV_CACHE_PRECISION": "u8"}
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.max_num_seqs, scheduler.max_num_batched_tokens = sequences, BATCH
    scheduler.cache_size = CACHE_SIZE
    pipeline = openvino_genai.ContinuousBatchingPipeline(model, scheduler, "CPU", properties)
    return OpenVinoEngine(pipeline, model, properties)


def _inputs(window: list[int], start: int, end: int) -> dict[str, Any]:
    """Rows [start, end) of a window; the model keeps those before as its state."""
    return {
        "input_ids": np.array([window[start:end]], dtype=np.int64),
        "attention_mask": np.ones((1, end), dtype=np.int64),
        "position_ids": np.arange(start, end, dtype=np.int64)[None],
        "beam_idx": np.zeros(1, dtype=np.int32),
    }


def _kv_bytes(folder: Path) -> int:
    """8-bit keys and values, with a float32 scale and zero for each token and head."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return int(2 * config["num_hidden_layers"] * config["num_key_value_heads"] * (head_dim + 8))
