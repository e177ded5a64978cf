"""One request inside the engine: from sampled tokens to deltas, and when it ends."""

from __future__ import annotations

from torch import Tensor

from qtool.runtime.detokenizer import TextStream
from qtool.runtime.outputs import DEADLINE, FinishReason, Logprobs, OutputDelta
from qtool.runtime.sampler import Sampled, SamplerRow, prompt_logprobs
from qtool.runtime.scheduled_step import Chunk
from qtool.runtime.sequence import Sequence


class Generation:
    """State of a request beside its sequence.

    Attributes:
        row: what the sampler needs.
    """

    def __init__(self, sequence: Sequence, row: SamplerRow, text: TextStream) -> None:
        self.sequence, self.row = sequence, row
        self._text = text
        self._prompt_logprobs: list[Logprobs | None] = []
        self._prompt_sent = False

    @property
    def only_scores(self) -> bool:
        """``max_tokens=0``: the prompt's log-probabilities are all that is wanted."""
        return self.sequence.params.max_tokens == 0

    @property
    def scores_prompt(self) -> bool:
        """Whether log-probabilities of prompt tokens are still to be computed."""
        wanted = self.sequence.params.prompt_logprobs is not None
        return wanted and len(self._prompt_logprobs) < len(self.sequence.prompt_token_ids)

    @property
    def needs_no_logits(self) -> bool:
        """Whether a step needs nothing but the likeliest token."""
        return self.row.needs_no_logits and not self.scores_prompt and not self.only_scores

    def record_prompt(self, chunk: Chunk, logits: Tensor) -> None:
        """Score the prompt tokens that follow a chunk's rows; logits [chunk.length, vocab]."""
        count = self.sequence.params.prompt_logprobs
        assert count is not None
        if chunk.start == 0:
            # Nothing precedes the first token. A preempted prompt is scored anew.
            self._prompt_logprobs = [None]
        prompt = self.sequence.prompt_token_ids
        following = prompt[chunk.start + 1 : chunk.start + chunk.length + 1]
        self._prompt_logprobs += prompt_logprobs(logits[: len(following)], following, count)

    def end_scoring(self) -> OutputDelta:
        """The only delta of a request that generates nothing."""
        return self._delta("", (), finish_reason="length")

    def expire(self) -> OutputDelta:
        """The last delta of a request whose time has passed, with the text held back so far."""
        text = self._text.finish()
        return self._delta(text, (), finish_reason="abort", stop_reason=DEADLINE)

    def accept(self, sampled: Sampled) -> OutputDelta:
        """Append a sampled token; the delta has a finish reason if it was the last."""
        token = sampled.token_id
        self.sequence.append(token)
        logprobs = () if sampled.logprobs is None else (sampled.logprobs,)
        params = self.sequence.params
        if token in params.stop_token_ids:
            return self._delta(self._text.finish(), (token,), logprobs, "stop", token)
        if token in self.row.eos_token_ids and not params.ignore_eos:
            return self._delta(self._text.finish(), (token,), logprobs, "stop")
        text = self._text.push(token)
        at_limit = self.sequence.num_tokens >= self.sequence.token_limit
        if at_limit:
            text += self._text.finish()
        stopped = self._text.stop_reason
        if stopped is not None:
            return self._delta(text, (token,), logprobs, "stop", stopped)
        return self._delta(text, (token,), logprobs, "length" if at_limit else None)

    def _delta(
        self,
        text: str,
        token_ids: tuple[int, ...],
        logprobs: tuple[Logprobs, ...] = (),
        finish_reason: FinishReason | None = None,
        stop_reason: str | int | None = None,
    ) -> OutputDelta:
        wanted = self.sequence.params.prompt_logprobs is not None and not self._prompt_sent
        self._prompt_sent = True
        return OutputDelta(
            request_id=self.sequence.request_id,
            text=text,
            token_ids=token_ids,
            logprobs=logprobs,
            prompt_logprobs=tuple(self._prompt_logprobs) if wanted else None,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
        )
