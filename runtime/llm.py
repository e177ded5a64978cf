"""The offline API, as the field knows it: ``LLM(model=...).generate(prompts, params)``."""

from __future__ import annotations

import itertools
import operator
import queue
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypedDict, Unpack, cast

from qtool.errors import QtoolError, RequestError, UsageError
from qtool.runtime.admission import Policy
from qtool.runtime.options import EngineOptions, ModelOptions
from qtool.runtime.outputs import CompletionOutput, OutputDelta, RequestOutput
from qtool.runtime.progress import RequestProgress
from qtool.runtime.request import EngineInfo, EngineStats, Request
from qtool.runtime.sampling_params import SamplingParams
from qtool.runtime.startup import start_engine

Prompt = str | Sequence[int]
Message = Mapping[str, Any]


class RequestTerms(TypedDict, total=False):
    """Keyword arguments of every call, beside the sampling parameters.

    Attributes:
        timeout: seconds after which a completion ends with what it has, finish reason ``abort``.
        priority: lower runs first.
        cache_salt: cached prefixes are shared with calls of the same salt only.
    """

    timeout: float | None
    priority: int
    cache_salt: str


class LLM:
    """A model in this process. Thread-safe; use it as a context manager, or close it.

    Args:
        model: folder, GGUF file or packaged name.
        device, dtype, backend, cpu_compute, kv_cache_dtype, kv_eviction, kv_budget,
            batch_invariant, strict, self_check: see :class:`~qtool.runtime.options.ModelOptions`.
        Others: see :class:`~qtool.runtime.options.EngineOptions`.

    Raises:
        QtoolError: the model cannot be loaded as asked.
    """

    def __init__(
        self,
        model: str,
        *,
        device: str = "auto",
        dtype: str = "auto",
        backend: str = "auto",
        cpu_compute: str = "auto",
        kv_cache_dtype: str = "auto",
        kv_eviction: str = "off",
        kv_budget: int | None = None,
        batch_invariant: bool = False,
        strict: bool = False,
        self_check: bool = True,
        tensor_parallel_size: int = 1,
        pipeline_parallel_size: int = 1,
        gpu_memory_utilization: float = 0.9,
        kv_cache_memory: int | None = None,
        max_model_len: int | None = None,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 2048,
        quantization: str | None = None,
        block_size: int | None = None,
        enable_prefix_caching: bool = True,
        scheduling_policy: Policy = "priority",
        seed: int | None = None,
    ) -> None:
        loading = ModelOptions(
            device=device,
            dtype=dtype,
            backend=backend,
            cpu_compute=cpu_compute,
            kv_cache_dtype=kv_cache_dtype,
            kv_eviction=kv_eviction,
            kv_budget=kv_budget,
            batch_invariant=batch_invariant,
            strict=strict,
            self_check=self_check,
        )
        options = EngineOptions(
            model=model,
            loading=loading,
            tensor_parallel_size=tensor_parallel_size,
            pipeline_parallel_size=pipeline_parallel_size,
            gpu_memory_utilization=gpu_memory_utilization,
            kv_cache_memory=kv_cache_memory,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            quantization=quantization,
            block_size=block_size,
            enable_prefix_caching=enable_prefix_caching,
            scheduling_policy=scheduling_policy,
            seed=seed,
        )
        running = start_engine(options)
        self._engine, self._tokenizer = running.engine, running.tokenizer
        self._ids = itertools.count()

    @property
    def info(self) -> EngineInfo:
        """Device, dtype, sizes, and what was not as asked."""
        return self._engine.info

    def stats(self) -> EngineStats:
        """The engine's counters and gauges, as of its last step."""
        return self._engine.stats()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
        **terms: Unpack[RequestTerms],
    ) -> list[RequestOutput]:
        """Complete one prompt or many; results are in the prompts' order.

        Args:
            prompts: text, or token ids, or a list of these.
            sampling_params: for all prompts, or one each; the model's own defaults if ``None``.
            progress: show a bar on standard error when it is a terminal.
            terms: when and beside whom they run, see :class:`RequestTerms`.

        Raises:
            RequestError: a prompt or its parameters cannot run; nothing else is generated.
        """
        batch = _as_batch(prompts)
        encoded = [self._encode(prompt) for prompt in batch]
        texts = [prompt if isinstance(prompt, str) else None for prompt in batch]
        params = self._params(sampling_params, len(batch))
        return self._run(encoded, texts, params, progress, terms)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
        **terms: Unpack[RequestTerms],
    ) -> list[RequestOutput]:
        """Answer one conversation or many, through the model's chat template.

        Raises:
            RequestError: as :meth:`generate`, or the model has no chat template.
        """
        single = bool(messages) and isinstance(messages[0], Mapping)
        conversations = cast(Sequence[Sequence[Message]], [messages] if single else messages)
        encoded = [self._tokenizer.render_chat(conversation) for conversation in conversations]
        texts = [self._tokenizer.decode(ids, skip_special_tokens=False) for ids in encoded]
        params = self._params(sampling_params, len(encoded))
        return self._run(encoded, texts, params, progress, terms)

    def stream(
        self,
        prompt: Prompt | Sequence[Message],
        sampling_params: SamplingParams | None = None,
        **terms: Unpack[RequestTerms],
    ) -> Iterator[OutputDelta]:
        """Deltas of one completion as they come; leaving the loop early aborts it.

        Args:
            prompt: text, token ids, or the messages of a conversation.
            sampling_params: the model's own defaults if ``None``.
            terms: when and beside whom it runs, see :class:`RequestTerms`.

        Raises:
            RequestError: it cannot run.
        """
        (params,) = self._params(sampling_params, 1)
        if params.n != 1:
            raise UsageError(f"n={params.n}: a stream has one completion; use generate")
        request = self._request(self._encode_any(prompt), params, terms)
        outputs: queue.SimpleQueue[OutputDelta | QtoolError] = queue.SimpleQueue()
        self._engine.submit(request, outputs.put)
        try:
            while True:
                delta = _value(outputs.get())
                yield delta
                if delta.finish_reason is not None:
                    return
        finally:
            self._engine.abort(request.request_id)

    def close(self) -> None:
        """Stop the engine; may be called twice."""
        self._engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _encode_any(self, prompt: Prompt | Sequence[Message]) -> list[int]:
        if prompt and isinstance(prompt[0], Mapping):
            return self._tokenizer.render_chat(cast(Sequence[Message], prompt))
        return self._encode(cast(Prompt, prompt))

    def _encode(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return self._tokenizer.encode(prompt)
        try:
            return [operator.index(token) for token in prompt]
        except TypeError as error:
            raise RequestError(
                f"prompt: {error}; send text, or a list of token ids", "prompt"
            ) from None

    def _params(
        self, params: SamplingParams | Sequence[SamplingParams] | None, count: int
    ) -> list[SamplingParams]:
        if params is None:
            params = SamplingParams(**self._tokenizer.default_sampling)
        if isinstance(params, SamplingParams):
            return [params] * count
        if len(params) != count:
            raise UsageError(f"{len(params)} sampling_params for {count} prompts; give one each")
        return list(params)

    def _request(
        self,
        ids: list[int],
        params: SamplingParams,
        terms: RequestTerms,
        fork_of: str | None = None,
    ) -> Request:
        timeout = terms.get("timeout")
        if timeout is not None and not timeout > 0:
            raise RequestError(f"timeout={timeout}: must be above 0 seconds", "timeout")
        return Request(f"llm-{next(self._ids)}", tuple(ids), params, fork_of=fork_of, **terms)

    def _run(
        self,
        prompts: list[list[int]],
        texts: Sequence[str | None],
        params: list[SamplingParams],
        progress: bool,
        terms: RequestTerms,
    ) -> list[RequestOutput]:
        results = [
            RequestOutput(f"prompt-{i}", text, ids, [CompletionOutput(k) for k in range(p.n)])
            for i, (ids, text, p) in enumerate(zip(prompts, texts, params, strict=True))
        ]
        pending: dict[str, tuple[RequestOutput, CompletionOutput]] = {}
        outputs: queue.SimpleQueue[OutputDelta | QtoolError] = queue.SimpleQueue()
        try:
            for result, request_params in zip(results, params, strict=True):
                first: str | None = None
                for completion in result.outputs:
                    choice = request_params.for_choice(completion.index)
                    request = self._request(result.prompt_token_ids, choice, terms, first)
                    first = first or request.request_id
                    pending[request.request_id] = result, completion
                    self._engine.submit(request, outputs.put)
            with RequestProgress(len(pending), enabled=progress) as bar:
                while pending:
                    delta = _value(outputs.get())
                    bar.advance(len(delta.token_ids), delta.finish_reason is not None)
                    _extend(*pending[delta.request_id], delta)
                    if delta.finish_reason is not None:
                        del pending[delta.request_id]
        finally:
            for request_id in pending:
                self._engine.abort(request_id)
        return results


def _extend(result: RequestOutput, completion: CompletionOutput, delta: OutputDelta) -> None:
    completion.extend(delta)
    if delta.prompt_logprobs is not None:
        result.prompt_logprobs = list(delta.prompt_logprobs)


def _value(item: OutputDelta | QtoolError) -> OutputDelta:
    if isinstance(item, QtoolError):
        raise item
    return item


def _as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One text or one list of token ids is a batch of one."""
    if isinstance(prompts, str):
        return [prompts]
    if prompts and isinstance(prompts[0], int):
        return [cast(Sequence[int], prompts)]
    return list(cast(Sequence[Prompt], prompts))
