"""Random requests that begin alike, some of them samples of the one before."""

from __future__ import annotations

import random
from collections.abc import Sequence

from qtool.runtime.request import Request
from qtool.runtime.sampling_params import SamplingParams


def requests_alike(
    count: int,
    *,
    seed: int,
    prefixes: Sequence[int],
    own: int,
    samples_every: int,
    answers: int,
) -> list[Request]:
    """The same ones for the same arguments; tokens are below 384.

    Args:
        prefixes: how many tokens of one common beginning a prompt may have.
        own: a prompt has fewer tokens of its own than this, and at least one.
        samples_every: of so many requests the last is a sample of the one before.
        answers: an answer has fewer tokens than this, and at least one.
    """
    chance, requests = random.Random(seed), list[Request]()
    common = [chance.randrange(384) for _ in range(max(prefixes))]
    for index in range(count):
        tail = [chance.randrange(384) for _ in range(chance.randrange(1, own))]
        prompt, fork_of = common[: chance.choice(prefixes)] + tail, None
        if index % samples_every == samples_every - 1:
            prompt, fork_of = list(requests[-1].prompt_token_ids), requests[-1].request_id
        params = SamplingParams(
            temperature=chance.choice([0.0, 1.0]),
            seed=index,
            logprobs=2,
            max_tokens=chance.randrange(1, answers),
            ignore_eos=True,
        )
        requests.append(Request(f"r{index}", tuple(prompt), params, fork_of=fork_of))
    return requests
