"""What enters the engine, and what it tells about itself. No torch here."""

from __future__ import annotations

from dataclasses import dataclass

from qtool.runtime.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class Request:
    """One completion to generate. ``request_id`` is unique among requests in flight.

    ``params.n`` has no meaning here: a caller that wants n completions submits n requests.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    priority: int = 0  # lower runs first


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What does not change while an engine lives."""

    model: str
    served_name: str
    device: str
    dtype: str
    backend: str
    quantization: str
    max_model_len: int
    block_size: int
    num_blocks: int
    kv_bytes_per_token: int
    weight_bytes: int
    vocab_size: int
    notes: tuple[str, ...]  # what was not as asked, one sentence each


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters and gauges of a running engine, for ``/metrics``."""

    num_running: int
    num_waiting: int
    blocks_used: int
    blocks_total: int
    prompt_tokens: int  # computed so far
    generated_tokens: int
    preemptions: int
    steps: int
