"""Logits to next tokens, each row as if it were alone.

The steps, in vLLM's order: logit bias, penalties, masks; then the likeliest token for greedy
rows, or temperature, min-p, top-k, top-p and a draw. Reported log-probabilities are those of
the model, before any of this.

What a row gets must not depend on its neighbours in the batch, to the bit. A floating-point sum
depends on its order, and so on how a kernel cuts the batch; so a token's share is an integer,
its probability relative to the likeliest token's in units of 2**-34. Everything after the
exponential is exact in any order, and one number from the request's own generator picks a share.
What it costs: a token less than 6e-11 times as likely as the likeliest one is never drawn.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qtool.errors import EngineError
from qtool.runtime.logprobs import report
from qtool.runtime.outputs import Logprobs
from qtool.runtime.sampling_params import SamplingParams

# Share of the likeliest token. A vocabulary of 2**19 tokens then sums to at most 2**53, up to
# which float64 holds every integer.
FULL_SHARE = 2**34

# The nucleus of top-p mostly lies within so many tokens: taking them is 7 times faster than
# sorting 49,152 shares (0.6 against 4 ms on one core of a Zen 4).
NUCLEUS_GUESS = 1024

# Prompt positions reported at once; all of a long prompt would need a second copy of its logits.
REPORT_ROWS = 128


@dataclass(frozen=True, slots=True)
class SamplerRow:
    """What the sampler must know about one request.

    Attributes:
        prompt_token_ids, output_token_ids: its tokens so far; the caller's own lists, which grow.
        generator: its own source of chance, on the CPU (:func:`make_generator`).
        eos_token_ids: the model's ends of sequence.
        bad_words_ids: token sequences that must not appear in the output.
    """

    params: SamplingParams
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]
    generator: torch.Generator
    eos_token_ids: frozenset[int] = frozenset()
    bad_words_ids: Sequence[Sequence[int]] = ()

    @property
    def changes_logits(self) -> bool:
        """Whether anything but the distribution's shape is asked for in this step."""
        params = self.params
        return bool(
            params.logit_bias
            or params.repetition_penalty != 1
            or params.presence_penalty
            or params.frequency_penalty
            or params.allowed_token_ids is not None
            or self.bad_words_ids
            or len(self.output_token_ids) < params.min_tokens
        )

    @property
    def takes_likeliest(self) -> bool:
        """Whether nothing is left to chance."""
        return self.params.greedy or self.params.top_k == 1

    @property
    def needs_no_logits(self) -> bool:
        """Whether the likeliest token of this step is all that is asked for."""
        return self.takes_likeliest and not self.changes_logits and self.params.logprobs is None


@dataclass(frozen=True, slots=True)
class Sampled:
    """The next token of one row, with log-probabilities if asked for."""

    token_id: int
    logprobs: Logprobs | None = None


def make_generator(seed: int | None) -> torch.Generator:
    """A request's source of chance: the same numbers for the same seed, on every device.

    Without a seed the operating system gives one.
    """
    generator = torch.Generator()
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(seed % 2**64)
    return generator


def sample(logits: Tensor, rows: Sequence[SamplerRow]) -> list[Sampled]:
    """Next token of each row of ``logits`` [rows, vocab], any float dtype; logits stay as they are.

    Every token id a row names must lie in the vocabulary; end-of-sequence ids outside it count
    for nothing.

    Raises:
        EngineError: NaN or infinite logits, or none but minus infinity.
    """
    assert logits.ndim == 2 and logits.shape[0] == len(rows), (logits.shape, len(rows))
    logits = logits.float()
    tokens = _choose(_adjusted(logits, rows), rows)
    reports = _reports(logits, tokens, rows)
    return [Sampled(*pair) for pair in zip(tokens, reports, strict=True)]


def sample_likeliest(best: Tensor, tokens: Tensor) -> list[Sampled]:
    """:func:`sample` for rows that all need no logits.

    Args:
        best: [rows], the largest logit of each row, NaN if one of them is.
        tokens: int64 [rows], where it is; of equals the lowest.

    Raises:
        EngineError: NaN or infinite logits, or none but minus infinity.
    """
    _check_finite(best)
    return [Sampled(token) for token in tokens.tolist()]


def prompt_logprobs(logits: Tensor, token_ids: Sequence[int], count: int) -> list[Logprobs]:
    """How the model saw given tokens.

    Args:
        logits: [positions, vocab]; row t is the prediction for ``token_ids[t]``, that is, the
            output at the token before.
        count: how many of the likeliest tokens to report besides the one given.

    Raises:
        EngineError: NaN or infinite logits.
    """
    assert logits.ndim == 2 and logits.shape[0] == len(token_ids), (logits.shape, len(token_ids))
    reports: list[Logprobs] = []
    for start in range(0, len(token_ids), REPORT_ROWS):
        part = logits[start : start + REPORT_ROWS].float()
        _check_finite(part.amax(dim=-1))
        reports += report(part, token_ids[start : start + REPORT_ROWS], count)
    return reports


def _choose(scores: Tensor, rows: Sequence[SamplerRow]) -> list[int]:
    best, likeliest = scores.max(dim=-1)  # the lowest id of equals
    _check_finite(best)
    tokens: list[int] = likeliest.tolist()
    drawn = [i for i, row in enumerate(rows) if not row.takes_likeliest]
    if drawn:
        chosen = _draw(scores[drawn], [rows[i] for i in drawn])
        for i, token in zip(drawn, chosen, strict=True):
            tokens[i] = token
    return tokens


def _check_finite(best: Tensor) -> None:
    """``best``: the largest logit of each row; a NaN anywhere in a row is its largest."""
    bad = (~best.isfinite()).nonzero().flatten().tolist()
    if bad:
        raise EngineError(
            f"logits of row {bad[0]} have {best[bad[0]].item()} as their maximum: the weights are "
            "damaged or activations overflow; load with dtype bf16 or fp32"
        )


def _adjusted(logits: Tensor, rows: Sequence[SamplerRow]) -> Tensor:
    """Logits [rows, vocab] with biases, penalties and masks; a copy if there are any."""
    changed = [i for i, row in enumerate(rows) if row.changes_logits]
    if not changed:
        return logits
    scores = logits.clone()
    for i in changed:
        _add_bias(scores[i], rows[i].params)
        _penalize(scores[i], rows[i])
        _mask(scores[i], rows[i])
    return scores


def _add_bias(scores: Tensor, params: SamplingParams) -> None:
    if params.logit_bias:
        ids = _ids(list(params.logit_bias), scores)
        scores[ids] += torch.tensor(list(params.logit_bias.values()), device=scores.device)


def _penalize(scores: Tensor, row: SamplerRow) -> None:
    """Penalties in place on ``scores`` [vocab].

    Repetition divides as in Keskar et al. 2019, 4.1, but multiplies a negative logit, so that it
    always lowers it.
    """
    params, counts = row.params, Counter(row.output_token_ids)
    if params.repetition_penalty != 1:
        ids = _ids(sorted(counts.keys() | set(row.prompt_token_ids)), scores)
        seen, penalty = scores[ids], params.repetition_penalty
        scores[ids] = torch.where(seen > 0, seen / penalty, seen * penalty)
    if counts and (params.presence_penalty or params.frequency_penalty):
        times = torch.tensor(list(counts.values()), dtype=scores.dtype, device=scores.device)
        ids = _ids(list(counts), scores)
        scores[ids] -= params.presence_penalty + params.frequency_penalty * times


def _mask(scores: Tensor, row: SamplerRow) -> None:
    allowed = row.params.allowed_token_ids
    if allowed is not None:
        ids = _ids(sorted(set(allowed)), scores)
        kept = scores[ids]
        scores.fill_(-math.inf)
        scores[ids] = kept
    banned = _banned(row, scores.shape[0])
    if banned:
        scores[_ids(sorted(banned), scores)] = -math.inf


def _banned(row: SamplerRow, vocab_size: int) -> set[int]:
    """Tokens that may not come next: ends before ``min_tokens``, and last tokens of bad words.

    Some token must come. Where ``allowed_token_ids`` leaves none but these, bad words are given
    up first, then the minimum.
    """
    early = len(row.output_token_ids) < row.params.min_tokens
    ends = {*row.eos_token_ids, *row.params.stop_token_ids} if early else set()
    ends = {token for token in ends if 0 <= token < vocab_size}
    for banned in (ends | set(_completions(row)), ends):
        allowed = row.params.allowed_token_ids
        left = vocab_size > len(banned) if allowed is None else set(allowed) - banned
        if left:
            return banned
    return set()


def _completions(row: SamplerRow) -> Iterator[int]:
    """Last tokens of the bad words of which everything else has just been written."""
    for *prefix, last in row.bad_words_ids:
        written = row.output_token_ids[-len(prefix) :] if prefix else ()
        if list(written) == prefix:
            yield last


def _draw(scores: Tensor, rows: Sequence[SamplerRow]) -> list[int]:
    """One token per row of ``scores`` [rows, vocab], by its probability; overwrites ``scores``."""
    shares = _shares(scores, [row.params.temperature for row in rows])
    for i, row in enumerate(rows):
        _restrict(shares[i], row.params)
    bounds = shares.cumsum_(dim=-1)
    chances = [torch.rand((), dtype=torch.float64, generator=row.generator) for row in rows]
    # Below the total, because a chance is at most 1 - 2**-53 and the total at most 2**53.
    points = torch.stack(chances).to(scores.device).unsqueeze(-1) * bounds[:, -1:]
    found = torch.searchsorted(bounds, points.to(torch.int64), right=True)
    tokens: list[int] = found.flatten().tolist()
    return tokens


def _shares(scores: Tensor, temperatures: Sequence[float]) -> Tensor:
    """int64 [rows, vocab]: probabilities in units of the likeliest one's 2**-34.

    Works in place on ``scores``: with new tensors for every step, page faults take most of the
    time (32 rows of 49,152 on one core of a Zen 4: 45 ms, in place 20).
    """
    # A temperature that is infinite in float32 would make NaN of a masked token.
    limit = torch.finfo(torch.float32).max
    divisors = torch.tensor([min(t, limit) for t in temperatures], device=scores.device)
    scores.sub_(scores.amax(dim=-1, keepdim=True)).div_(divisors.unsqueeze(-1))
    return scores.exp_().mul_(FULL_SHARE).to(torch.int64)


def _restrict(shares: Tensor, params: SamplingParams) -> None:
    """Zero the shares [vocab] that min-p, top-k and top-p exclude, in place and in this order.

    Tokens as likely as the last one kept are kept too, so no order among equals matters.
    """
    if params.min_p > 0:
        shares.masked_fill_(shares < math.ceil(params.min_p * FULL_SHARE), 0)
    if 0 < params.top_k < shares.shape[0]:
        shares.masked_fill_(shares < shares.topk(params.top_k).values[-1], 0)
    if params.top_p < 1:
        shares.masked_fill_(shares < _nucleus_floor(shares, params.top_p), 0)


def _nucleus_floor(shares: Tensor, top_p: float) -> Tensor:
    """Smallest share in the nucleus: the fewest tokens with ``top_p`` of the sum.

    Holtzman et al. 2020, 3.1.
    """
    needed = math.ceil(top_p * int(shares.sum()))
    ranked = shares.topk(min(NUCLEUS_GUESS, shares.shape[0])).values
    if int(ranked.sum()) < needed:
        ranked = shares.sort(descending=True).values
    return ranked[torch.searchsorted(ranked.cumsum(dim=-1), needed)]


def _reports(
    logits: Tensor, tokens: Sequence[int], rows: Sequence[SamplerRow]
) -> list[Logprobs | None]:
    reports: list[Logprobs | None] = [None] * len(rows)
    counts = {i: row.params.logprobs for i, row in enumerate(rows)}
    wanted = {i: count for i, count in counts.items() if count is not None}
    if wanted:
        chosen = [tokens[i] for i in wanted]
        found = report(logits[list(wanted)], chosen, max(wanted.values()))
        for (i, count), logprobs in zip(wanted.items(), found, strict=True):
            reports[i] = Logprobs(logprobs.chosen, logprobs.top[:count])
    return reports


def _ids(token_ids: Sequence[int], like: Tensor) -> Tensor:
    return torch.tensor(list(token_ids), dtype=torch.int64, device=like.device)
