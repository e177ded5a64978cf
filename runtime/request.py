"""What enters the engine, and what it tells about itself. No torch here."""

from __future__ import annotations

from dataclasses import dataclass

from qtool.runtime.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class Request:
    """One completion to generate. ``request_id`` is unique among requests in flight.

    ``params.n`` has no meaning here: a caller that wants n completions submits n requests, the
    later ones as forks of the first.

    Attributes:
        priority: lower runs first.
        fork_of: id of a request with the same prompt, whose computation it shares; one that is
            unknown or has ended is no error.
        cache_salt: it shares cached prefixes with requests of the same salt only.
        timeout: seconds from its arrival after which it ends with reason "abort" and whatever it
            has; ``None`` for never.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    priority: int = 0
    fork_of: str | None = None
    cache_salt: str = ""
    timeout: float | None = None


@dataclass(frozen=True, slots=True)
class PlannedPart:
    """Parts of a kind that one kernel runs.

    Attributes:
        part: the modules' names in a layer, or an operation without weights.
        count: how many of them there are.
        num_bytes: memory of all their weights; 0 for operations without.
        why: what chose this kernel.
    """

    part: str
    kernel: str
    count: int
    num_bytes: int
    why: str


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What does not change while an engine lives: the load plan.

    Attributes:
        notes: what was not as asked, one sentence each.
        backend_reason: why this back end.
        kv_cache_dtype: how keys and values are stored.
        kv_cache_reason: what decided it.
        key_smoothing: by what keys are smoothed before they are stored, in how many layers; empty
            where none are, or the compute dtype holds them.
        kv_tail_bytes: memory of all pages that running sequences have not filled yet, where the
            form of the cache keeps those aside.
        kv_eviction: what a sequence keeps of its keys and values; empty for everything.
        kv_budget: tokens that a sequence holds at most; 0 for all of them.
        kv_full_bytes_per_token: memory of a token further back than windows reach, where layers
            have block tables of their own and some have a window; 0 where all have the same.
        kv_window_bytes: what a sequence longer than that holds of layers with a window.
        kv_sequence_blocks: blocks that a sequence of ``max_model_len`` holds at most.
        kv_groups: which layers have block tables of their own, or why they have not; empty where
            all see equally far.
        parts: which kernel runs what, and why.
        batch_invariance: what it costs; empty if it was not asked for.
    """

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
    notes: tuple[str, ...]
    backend_reason: str = ""
    kv_cache_dtype: str = ""
    kv_cache_reason: str = ""
    key_smoothing: str = ""
    kv_tail_bytes: int = 0
    kv_eviction: str = ""
    kv_budget: int = 0
    kv_full_bytes_per_token: int = 0
    kv_window_bytes: int = 0
    kv_sequence_blocks: int = 0
    kv_groups: str = ""
    parts: tuple[PlannedPart, ...] = ()
    batch_invariance: str = ""
    prefix_caching: bool = False
    scheduling_policy: str = ""
    max_num_seqs: int = 0
    max_num_batched_tokens: int = 0

    @property
    def num_cache_tokens(self) -> int:
        """Tokens that the cache holds, in sequences of ``max_model_len`` where that decides it."""
        if self.kv_full_bytes_per_token:
            return int(self.num_full_sequences * self.max_model_len)
        return self.num_blocks * self.block_size

    @property
    def num_full_sequences(self) -> float:
        """Sequences of ``max_model_len`` that the cache holds."""
        if self.kv_sequence_blocks:
            return self.num_blocks / self.kv_sequence_blocks
        return self.num_cache_tokens / (self.kv_budget or self.max_model_len)


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters and gauges of a running engine, for ``/metrics``.

    Attributes:
        prompt_tokens: prompt tokens computed.
        slots_used: token slots of used blocks that hold a token.
        blocks_known: blocks, used or free, whose contents the prefix cache can find.
        reused_tokens: tokens that did not have to be computed, for others had.
        evicted_blocks: that running sequences gave up to stay within their budget.
        timeouts: requests that ended because their time had passed.
    """

    num_running: int
    num_waiting: int
    blocks_used: int
    blocks_total: int
    prompt_tokens: int
    generated_tokens: int
    preemptions: int
    steps: int
    slots_used: int = 0
    blocks_known: int = 0
    reused_tokens: int = 0
    timeouts: int = 0
    evicted_blocks: int = 0
