"""Our engine as a model of lm-evaluation-harness, without importing it.

:class:`HarnessModel` has all the methods of ``lm_eval.api.model.LM``;
:func:`qtool.commands.harness.harness_model` makes it one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any, Protocol

from qtool.errors import UsageError
from qtool.runtime.llm import LLM
from qtool.runtime.sampling_params import SamplingParams
from qtool.runtime.scoring import loglikelihoods, scorable_tokens
from qtool.runtime.tasks import Continuation, encode_pair, text_start
from qtool.runtime.tokenizer import Tokenizer

# The harness's own default for tasks that do not say.
DEFAULT_MAX_GEN_TOKS = 256

# Generation settings of tasks, and the sampling parameters they are.
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens")


class Instance(Protocol):
    """A request of the harness."""

    @property
    def args(self) -> tuple[Any, ...]: ...


class HarnessModel:
    """Requests of the harness, answered by an engine. All that are asked together run together.

    Attributes:
        shortened: texts so far that lost their beginning because the context cannot hold them.
    """

    def __init__(self, llm: LLM, tokenizer: Tokenizer) -> None:
        super().__init__()
        self._llm, self._tokenizer = llm, tokenizer
        self._max_tokens = scorable_tokens(llm.info.max_model_len)
        self.shortened = 0

    @property
    def tokenizer_name(self) -> str:
        """Tells apart the harness's caches of requests."""
        return self._llm.info.model.replace("/", "__")

    def loglikelihood(self, requests: Sequence[Instance]) -> list[tuple[float, bool]]:
        """Log-probability of each continuation, and whether greedy decoding would write it."""
        texts = [self._fit(encode_pair(self._tokenizer, *request.args)) for request in requests]
        return [(item.logprob, item.greedy) for item in loglikelihoods(self._llm, texts)]

    def loglikelihood_rolling(self, requests: Sequence[Instance]) -> list[float]:
        """Log-probability of each whole text, in windows where it is longer than the context."""
        windows = [self._rolling(*request.args) for request in requests]
        flat = [window for text in windows for window in text]
        values = iter([item.logprob for item in loglikelihoods(self._llm, flat)])
        return [math.fsum(islice(values, len(text))) for text in windows]

    def generate_until(self, requests: Sequence[Instance]) -> list[str]:
        """Text after each context, up to but without the first of the ``until`` strings."""
        params = [sampling_params(request.args[1]) for request in requests]
        prompts = [
            self._prompt(request.args[0], each.max_tokens or 0)
            for request, each in zip(requests, params, strict=True)
        ]
        outputs = self._llm.generate(prompts, params, progress=False) if prompts else []
        return [output.outputs[0].text for output in outputs]

    def _rolling(self, text: str) -> list[Continuation]:
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        return rolling_windows(ids, text_start(self._tokenizer), self._max_tokens)

    def _fit(self, text: Continuation) -> Continuation:
        self.shortened += len(text.token_ids) > self._max_tokens
        return text.last(self._max_tokens)

    def _prompt(self, context: str, max_tokens: int) -> list[int]:
        """The end of the context that leaves room for ``max_tokens`` more."""
        ids = self._tokenizer.encode(context) or [text_start(self._tokenizer)]
        room = self._llm.info.max_model_len - max_tokens
        if room < 1:
            raise UsageError(
                f"the task generates {max_tokens} tokens, the model's context holds "
                f"{self._llm.info.max_model_len}; choose another task"
            )
        self.shortened += len(ids) > room
        return ids[-room:]


def rolling_windows(ids: Sequence[int], prefix: int, max_tokens: int) -> list[Continuation]:
    """Windows of at most ``max_tokens`` (2 or more) that score every id exactly once.

    With 3 at most, ids 1 2 3 4 5 and prefix P; those in brackets are scored:

        P [1 2]
          2 [3 4]
            3 4 [5]     the last window is filled up with context
    """
    whole = (prefix, *ids)
    windows = []
    for start in range(1, len(whole), max_tokens - 1):
        end = min(start + max_tokens - 1, len(whole))
        first = max(end - max_tokens, 0)
        windows.append(Continuation(whole[first:end], start - first))
    return windows


def sampling_params(settings: Mapping[str, Any]) -> SamplingParams:
    """Of a task's ``generation_kwargs``; greedy unless they ask for sampling.

    Raises:
        UsageError: a setting that the engine does not have.
    """
    known = {"until", "do_sample", *_SAMPLING, *_LENGTHS}
    if unknown := sorted(set(settings) - known):
        raise UsageError(
            f"the task sets {unknown[0]}={settings[unknown[0]]!r}, which this engine does not "
            f"have; it has {', '.join(sorted(known))}"
        )
    values = {name: settings[name] for name in _SAMPLING if name in settings}
    if not settings.get("do_sample", values.get("temperature", 0) > 0):
        values["temperature"] = 0.0
    lengths = (settings[name] for name in _LENGTHS if name in settings)
    max_tokens = next(lengths, DEFAULT_MAX_GEN_TOKS)
    return SamplingParams(stop=settings.get("until"), max_tokens=max_tokens, **values)
