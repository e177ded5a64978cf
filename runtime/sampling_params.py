"""What one request asks of the sampler. No torch here: servers and clients build these."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral

from qtool.errors import RequestError

# Below this temperature the distribution is a point within float32; dividing logits by less
# would overflow, so sampling is greedy there.
MIN_TEMPERATURE = 1e-5

# Bounds that keep one request from costing more than its tokens (vllm#51447: half a million
# stop strings took 54 s before admission).
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1024
MAX_BAD_WORDS = 128
MAX_LOGPROBS = 20
MAX_CHOICES = 64

_WHOLE_NUMBERS = ("n", "top_k", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs", "seed")


def _require(ok: bool, param: str, value: object, rule: str) -> None:
    if not ok:
        raise RequestError(f"{param}={value!r}: {rule}", param)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Names and meanings follow vLLM; a value out of range raises :class:`RequestError`.

    Attributes:
        n: number of independent completions of the prompt.
        temperature: 0 is greedy; logits are divided by it otherwise.
        top_p: keep the smallest set of tokens whose probability reaches this, in (0, 1].
        top_k: keep the k likeliest tokens; 0 or -1 keeps all.
        min_p: drop tokens below this fraction of the likeliest one's probability.
        repetition_penalty: > 1 weakens tokens of prompt and output (Keskar et al. 2019, 4.1).
        presence_penalty, frequency_penalty: subtracted from the logits of generated tokens,
            once, and times their count; in [-2, 2].
        seed: makes sampling reproducible for this request.
        stop: strings that end the text; they are removed unless ``include_stop_str_in_output``.
        stop_token_ids: token ids that end the text, beside the model's own.
        ignore_eos: go on after the model's end-of-sequence tokens.
        max_tokens: most tokens to generate; ``None`` is all that fits in the context; 0 only
            scores the prompt.
        min_tokens: no end-of-sequence or stop token before this many tokens.
        logprobs: report this many likeliest tokens (and the chosen one) per step.
        prompt_logprobs: the same for the prompt's tokens.
        logit_bias: token id to a value added to its logit, in [-100, 100].
        allowed_token_ids: nothing else is ever sampled.
        bad_words: texts that must not appear.
        skip_special_tokens: leave special tokens out of the text.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] | None = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] = ()
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        stop = self.stop or ()
        object.__setattr__(self, "stop", (stop,) if isinstance(stop, str) else tuple(stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids or ()))
        object.__setattr__(self, "bad_words", tuple(self.bad_words or ()))
        self._check_types()
        self._check_distribution()
        self._check_stopping()
        self._check_reporting()

    def _check_types(self) -> None:
        # The engine would find out in a step, when all its other requests go down with it.
        for name in _WHOLE_NUMBERS:
            value = getattr(self, name)
            ok = value is None or isinstance(value, Integral)
            _require(ok, name, value, "must be a whole number")

    def _check_distribution(self) -> None:
        _require(1 <= self.n <= MAX_CHOICES, "n", self.n, f"must be 1 to {MAX_CHOICES}")
        ok = math.isfinite(self.temperature) and self.temperature >= 0
        _require(ok, "temperature", self.temperature, "must be a finite number, 0 or more")
        _require(0 < self.top_p <= 1, "top_p", self.top_p, "must be above 0 and at most 1")
        _require(self.top_k >= -1, "top_k", self.top_k, "must be positive, or 0 or -1 for off")
        _require(0 <= self.min_p <= 1, "min_p", self.min_p, "must be 0 to 1")
        ok = math.isfinite(self.repetition_penalty) and self.repetition_penalty > 0
        _require(ok, "repetition_penalty", self.repetition_penalty, "must be above 0")
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _require(-2 <= value <= 2, name, value, "must be -2 to 2")
        for token, bias in self.logit_bias.items():
            _require(-100 <= bias <= 100, "logit_bias", {token: bias}, "must be -100 to 100")
        allowed = self.allowed_token_ids
        _require(allowed is None or len(allowed) > 0, "allowed_token_ids", allowed, "is empty")

    def _check_stopping(self) -> None:
        assert isinstance(self.stop, tuple)
        count, longest = len(self.stop), max(map(len, self.stop), default=0)
        _require(count <= MAX_STOP_STRINGS, "stop", count, f"at most {MAX_STOP_STRINGS} strings")
        _require(all(self.stop), "stop", list(self.stop), "an empty stop string would end all text")
        rule = f"a stop string has at most {MAX_STOP_LENGTH} characters"
        _require(longest <= MAX_STOP_LENGTH, "stop", longest, rule)
        count = len(self.bad_words)
        _require(count <= MAX_BAD_WORDS, "bad_words", count, f"at most {MAX_BAD_WORDS}")
        _require(all(self.bad_words), "bad_words", list(self.bad_words), "has an empty string")
        ok = self.max_tokens is None or self.max_tokens >= 0
        _require(ok, "max_tokens", self.max_tokens, "must be 0 or more")
        ok = self.min_tokens >= 0 and (
            self.max_tokens is None or self.min_tokens <= self.max_tokens
        )
        _require(ok, "min_tokens", self.min_tokens, f"must be 0 to max_tokens ({self.max_tokens})")

    def _check_reporting(self) -> None:
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            ok = value is None or 0 <= value <= MAX_LOGPROBS
            _require(ok, name, value, f"must be 0 to {MAX_LOGPROBS}")

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature < MIN_TEMPERATURE

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """``stop`` in its normal form."""
        assert isinstance(self.stop, tuple)
        return self.stop

    def for_choice(self, index: int) -> SamplingParams:
        """Parameters of one of ``n`` completions: its own seed, or all would be equal."""
        seed = None if self.seed is None else self.seed + index
        return replace(self, n=1, seed=seed)
