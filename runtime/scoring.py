"""Likelihoods from the engine: the prompt's log-probabilities of scored texts.

Every text is a request of its own, without padding. So what a text scores depends on others only
as far as the back end's arithmetic does: with the reference back end, not in one bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from qtool.runtime.llm import LLM
from qtool.runtime.outputs import RequestOutput
from qtool.runtime.sampling_params import SamplingParams
from qtool.runtime.tasks import Continuation, Likelihood

# Texts between two calls of ``progress``. Their results have an entry for every token.
TEXTS_AT_A_TIME = 128


def loglikelihoods(
    llm: LLM,
    continuations: Sequence[Continuation],
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Likelihood]:
    """One result each, in order.

    Raises:
        RequestError: a text is longer than :func:`scorable_tokens`.
    """
    params = SamplingParams(max_tokens=0, prompt_logprobs=0)
    results: list[Likelihood] = []
    for first in range(0, len(continuations), TEXTS_AT_A_TIME):
        part = continuations[first : first + TEXTS_AT_A_TIME]
        outputs = llm.generate([list(c.token_ids) for c in part], params, progress=False)
        results += map(_likelihood, part, outputs)
        progress(len(results), len(continuations))
    return results


def scorable_tokens(max_model_len: int) -> int:
    """Tokens of the longest text that can be scored: the engine keeps room for one more."""
    return max_model_len - 1


def _likelihood(continuation: Continuation, output: RequestOutput) -> Likelihood:
    assert output.prompt_logprobs is not None
    scored = [entry.chosen for entry in output.prompt_logprobs[continuation.start :] if entry]
    assert len(scored) == len(continuation.token_ids) - continuation.start
    return Likelihood(
        math.fsum(token.logprob for token in scored), all(token.rank == 1 for token in scored)
    )
