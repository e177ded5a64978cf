"""What a user may set about a running model. No torch here: the command line builds these."""

from __future__ import annotations

from dataclasses import dataclass

from qtool.errors import UsageError
from qtool.runtime.admission import POLICIES, Policy
from qtool.runtime.eviction import KV_EVICTIONS
from qtool.runtime.kv_schemes import FOLLOW, KV_CACHE_DTYPES, SCHEMES

DEVICES = ("auto", "cpu", "cuda")
DTYPES = ("auto", "bf16", "fp16", "fp32")
CPU_COMPUTES = ("auto", "int8", "bf16", "fp32")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """Where and how a model is loaded.

    Attributes:
        device: ``auto`` takes a GPU if there is one.
        dtype: compute dtype; ``auto`` follows the checkpoint (float16 becomes bfloat16 on a CPU).
        backend: ``auto``, or kernels by name: ``reference`` is exact and batch-invariant.
        cpu_compute: what native CPU kernels multiply in: ``int8`` rounds activations to 8 bits, a
            scale a token and group; ``auto`` is int8 for quantized weights in bfloat16, else fp32.
        kv_cache_dtype: how keys and values are stored, a row of
            :data:`~qtool.runtime.kv_schemes.SCHEMES`; ``auto`` is the checkpoint's own plan, or
            ``wide`` where it has none.
        kv_eviction: ``heavy-hitter``: sequences keep ``kv_budget`` tokens at most, and give up the
            blocks that get the least attention (:mod:`qtool.runtime.eviction`).
        kv_budget: tokens that a sequence keeps; whole blocks of them count.
        batch_invariant: a request gets the same tokens in any company, whatever that costs.
        strict: whatever is not as asked is an error instead of a note.
        self_check: ask a checkpoint's own probe (``qtool/probe.json``) after loading.
    """

    device: str = "auto"
    dtype: str = "auto"
    backend: str = "auto"
    cpu_compute: str = "auto"
    kv_cache_dtype: str = "auto"
    kv_eviction: str = "off"
    kv_budget: int | None = None
    batch_invariant: bool = False
    strict: bool = False
    self_check: bool = True

    def __post_init__(self) -> None:
        for name, allowed in (
            ("device", DEVICES),
            ("dtype", DTYPES),
            ("cpu_compute", CPU_COMPUTES),
            ("kv_cache_dtype", KV_CACHE_DTYPES),
            ("kv_eviction", KV_EVICTIONS),
        ):
            value = getattr(self, name)
            if value not in allowed:
                raise UsageError(f"{name}={value!r}: use one of {', '.join(allowed)}")
        self._check_budget()

    @property
    def evicts(self) -> bool:
        """Whether sequences give up blocks."""
        return self.kv_eviction != "off"

    def _check_budget(self) -> None:
        if self.evicts and self.kv_budget is None:
            raise UsageError(
                f"kv_eviction={self.kv_eviction!r}: needs kv_budget, the tokens that a sequence "
                "keeps; give it"
            )
        if not self.evicts and self.kv_budget is not None:
            raise UsageError(
                f"kv_budget={self.kv_budget}: has no meaning without kv_eviction heavy-hitter; "
                "give both, or leave it out"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """Names and meanings follow vLLM.

    Attributes:
        model: folder, GGUF file or packaged name.
        loading: device, dtype and back end.
        served_model_name: name in the API; the model's own if ``None``.
        max_num_seqs: sequences that run at a time.
        max_model_len: tokens of one sequence, prompt and output; the model's limit if ``None``.
        max_num_batched_tokens: tokens of one step.
        gpu_memory_utilization: share of a GPU's memory for weights and cache, in (0, 1].
        kv_cache_memory: bytes for keys and values; overrides the share.
        quantization: what the user believes the checkpoint is; checked against it.
        block_size: tokens per cache block; ``None`` is 16, or what the form of the cache needs.
        enable_prefix_caching: requests that begin alike share what of it is computed.
        scheduling_policy: ``priority`` serves lower priorities first, and among equals in the
            order of arrival; ``fcfs`` by arrival alone, and refuses priorities.
        seed: of requests without one; ``None`` takes it from the operating system.
    """

    model: str
    loading: ModelOptions = ModelOptions()
    served_model_name: str | None = None
    max_num_seqs: int = 256
    max_model_len: int | None = None
    max_num_batched_tokens: int = 2048
    gpu_memory_utilization: float = 0.9
    kv_cache_memory: int | None = None
    quantization: str | None = None
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    block_size: int | None = None
    enable_prefix_caching: bool = True
    scheduling_policy: Policy = "priority"
    seed: int | None = None

    def __post_init__(self) -> None:
        self._check_numbers()
        if self.loading.kv_cache_dtype != FOLLOW:
            SCHEMES[self.loading.kv_cache_dtype].block_size(self.block_size)
        if self.scheduling_policy not in POLICIES:
            allowed = ", ".join(POLICIES)
            raise UsageError(f"scheduling_policy={self.scheduling_policy!r}: use one of {allowed}")

    def _check_numbers(self) -> None:
        for name in ("tensor_parallel_size", "pipeline_parallel_size"):
            if getattr(self, name) != 1:
                raise UsageError(
                    f"{name}={getattr(self, name)}: this version runs on one device; leave it at 1"
                )
        for name in ("max_num_seqs", "max_model_len", "max_num_batched_tokens", "block_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"{name}={value}: must be at least 1")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise UsageError(
                f"gpu_memory_utilization={self.gpu_memory_utilization}: must be above 0 and at "
                "most 1"
            )
        if self.kv_cache_memory is not None and self.kv_cache_memory < 1:
            raise UsageError(f"kv_cache_memory={self.kv_cache_memory}: must be at least 1 byte")
