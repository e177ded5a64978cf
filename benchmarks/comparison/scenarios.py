"""What is run, and what the times of its tokens say. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

# Seconds from submission at which each token of each sequence was there.
TokenTimes = Sequence[Sequence[float]]

OURS = "qtool"


@dataclass(frozen=True, slots=True)
class Scenario:
    """``sequences`` prompts of ``prompt_tokens`` submitted at once, ``new_tokens`` from each."""

    name: str
    sequences: int
    prompt_tokens: int
    new_tokens: int

    def __post_init__(self) -> None:
        if min(self.sequences, self.prompt_tokens, self.new_tokens) < 1:
            raise ValueError(f"{self}: sequences and tokens must be at least 1")

    @property
    def is_prefill(self) -> bool:
        """Nothing is decoded: the first token ends it."""
        return self.new_tokens == 1

    @property
    def mean_context(self) -> float:
        """Tokens a row attends to, on average."""
        if self.is_prefill:
            return self.prompt_tokens / 2
        return self.prompt_tokens + self.new_tokens / 2


SCENARIOS = (
    Scenario("decode_b1", 1, 128, 128),
    Scenario("decode_c8", 8, 128, 128),
    Scenario("decode_c32", 32, 128, 128),
    Scenario("prefill", 1, 512, 1),
)


@dataclass(frozen=True, slots=True)
class Rates:
    """Tokens per second of one run.

    Attributes:
        phase: what the scenario is named for: prompt tokens of a prefill up to its first token;
            else new tokens while every sequence decodes, from the last one's first token to the
            first one's last.
        overall: new tokens over the whole time, prompts included.
    """

    phase: float
    overall: float


def rates(scenario: Scenario, times: TokenTimes) -> Rates:
    """Rates from the times of one run.

    Raises:
        ValueError: the engine did not do what the scenario says.
    """
    found = sorted({len(sequence) for sequence in times})
    if len(times) != scenario.sequences or found != [scenario.new_tokens]:
        raise ValueError(
            f"{scenario.name}: {len(times)} sequences of {found} tokens came back instead of "
            f"{scenario.sequences} of {scenario.new_tokens}"
        )
    whole = max(sequence[-1] for sequence in times)
    overall = scenario.sequences * scenario.new_tokens / whole
    if scenario.is_prefill:
        return Rates(scenario.sequences * scenario.prompt_tokens / whole, overall)
    return Rates(_decode_rate(times), overall)


def _decode_rate(times: TokenTimes) -> float:
    start = max(sequence[0] for sequence in times)
    end = min(sequence[-1] for sequence in times)
    if end <= start:
        raise ValueError("the sequences never decoded together: there is no decode phase")
    tokens = sum(start < at <= end for sequence in times for at in sequence)
    return tokens / (end - start)


def median_rates(runs: Sequence[Rates]) -> Rates:
    """The median of each rate."""
    return Rates(median(run.phase for run in runs), median(run.overall for run in runs))


def ratios(medians: Mapping[str, Mapping[str, Rates]]) -> dict[str, float]:
    """Ours over the best peer, by scenario; ``…_overall`` compares with prompts included.

    Args:
        medians: by scenario, then by engine. Without a peer there is nothing to compare.
    """
    result: dict[str, float] = {}
    for scenario, engines in medians.items():
        peers = [rate for name, rate in engines.items() if name != OURS]
        if OURS not in engines or not peers:
            continue
        ours = engines[OURS]
        result[scenario] = ours.phase / max(peer.phase for peer in peers)
        result[f"{scenario}_overall"] = ours.overall / max(peer.overall for peer in peers)
    return result


def rotated(names: Sequence[str], turn: int) -> list[str]:
    """The names, starting one later every turn: nobody always runs first on a warm machine."""
    start = turn % len(names)
    return [*names[start:], *names[:start]]


def prompts(scenario: Scenario, tokens: Sequence[int], turn: int) -> list[list[int]]:
    """Distinct stretches of ``tokens``, others every turn as far as the text goes."""
    length = scenario.prompt_tokens
    stretches = len(tokens) // length
    if stretches < scenario.sequences:
        raise ValueError(
            f"{scenario.name} needs {scenario.sequences * length} tokens of text, and there are "
            f"{len(tokens)}"
        )
    first = turn * scenario.sequences
    starts = [(first + i) % stretches * length for i in range(scenario.sequences)]
    return [list(tokens[start : start + length]) for start in starts]
