"""What the scheduler is told, and how much room a newcomer must find. No torch here.

Admitting whatever fits now leads to storms of preemptions, for every sequence grows; keeping a
place for all that a request may write leaves most of the cache unused. So room is kept for what
answers are expected to become: as long as those before them, more after a preemption. A guess that
was too low costs a recomputation, never a wrong token.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

from qtool.errors import RequestError, UsageError
from qtool.runtime.blocks import BlockManager, Tables
from qtool.runtime.sequence import Sequence

Policy = Literal["fcfs", "priority"]
POLICIES: tuple[Policy, ...] = get_args(Policy)

# The first guess of an answer's length, before any has ended.
FIRST_GUESS = 128.0
# Each answer moves the guess by this share of its distance: the last two dozen decide.
LEARNING_RATE = 0.08
# A preemption doubles what is kept, up to 8 times the guess; 70 calm steps halve it.
MAX_CAUTION = 8.0
CALM = 0.99
# Sequences looked at behind one that does not fit.
LOOK_AHEAD = 16


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of a step and of a sequence, and who comes first.

    Attributes:
        max_num_seqs: most sequences running at a time.
        max_num_batched_tokens: most tokens computed in a step, prompts' and decodes' together.
        max_model_len: most tokens of a sequence, prompt and output.
        policy: ``fcfs`` serves in the order of arrival; ``priority`` by priority before that.
        watermark: share of the cache that an admission leaves free, unless nothing else runs.
        expects_output: keep room for the output expected of everyone running, too.
        max_passes: how often later sequences may be admitted past one that does not fit; 0 is a
            strict queue.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    policy: Policy = "priority"
    watermark: float = 0.0
    expects_output: bool = False
    max_passes: int = 0

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len"):
            value = getattr(self, name)
            if value < 1:
                raise UsageError(f"{name}={value}: must be 1 or more")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise UsageError(
                f"max_num_batched_tokens={self.max_num_batched_tokens}: must be at least "
                f"max_num_seqs={self.max_num_seqs}, for each of them computes a token in every "
                f"step; raise the first or lower the second"
            )
        if self.policy not in POLICIES:
            raise UsageError(f"policy={self.policy!r}: use one of {', '.join(POLICIES)}")
        if not 0 <= self.watermark < 1:
            raise UsageError(f"watermark={self.watermark}: must be 0 or more, and below 1")
        if self.max_passes < 0:
            raise UsageError(f"max_passes={self.max_passes}: must be 0 or more")


class Admission:
    """Decides whether a sequence finds room, from the free blocks and what it has seen before."""

    def __init__(self, config: SchedulerConfig, blocks: BlockManager) -> None:
        self._blocks = blocks
        self._expects_output = config.expects_output
        self._watermark = int(config.watermark * blocks.num_blocks)
        self._guess = FIRST_GUESS
        self._caution = 1.0

    def ended(self, sequence: Sequence) -> None:
        """Learn from a sequence that came to its own end."""
        self._guess += LEARNING_RATE * (len(sequence.output_token_ids) - self._guess)

    def stepped(self, preempted: bool) -> None:
        """Learn from a step: whether somebody lost his blocks in it."""
        if preempted:
            self._caution = min(2 * self._caution, MAX_CAUTION)
        else:
            self._caution = max(CALM * self._caution, 1.0)

    def reserved(self, running: Iterable[Sequence]) -> int:
        """Free blocks that are as good as taken."""
        if not self._expects_output:
            return self._watermark
        return self._watermark + sum(map(self.growth, running))

    def growth(self, sequence: Sequence) -> int:
        """Blocks that a running sequence is expected to take beside those it has."""
        if not self._expects_output:
            return 0
        return self._blocks.to_come(sequence, sequence.tables, self._expected_end(sequence))

    def fits(self, sequence: Sequence, prefix: Tables, reserved: int) -> bool:
        """Whether a sequence that begins with ``prefix`` finds room, with so many reserved."""
        to_come = self._blocks.to_come(sequence, prefix, self._expected_end(sequence))
        return to_come + self._blocks.num_idle(prefix) + reserved <= self._blocks.num_free

    def fits_alone(self, sequence: Sequence, prefix: Tables) -> bool:
        """Whether all its tokens and the next one find room, where nothing else runs."""
        to_come = self._blocks.to_come(sequence, prefix, sequence.num_tokens + 1)
        return to_come + self._blocks.num_idle(prefix) <= self._blocks.num_free

    def _expected_end(self, sequence: Sequence) -> int:
        """Tokens it is expected to have when it ends."""
        end = sequence.num_tokens + 1
        if self._expects_output:
            expected = self._guess * self._caution - len(sequence.output_token_ids)
            more = max(int(expected), self._blocks.block_size)
            end = max(min(sequence.num_tokens + more, sequence.token_limit), end)
        return end


def check_can_ever_fit(sequence: Sequence, config: SchedulerConfig, blocks: BlockManager) -> None:
    """Refuse at once what no waiting would help.

    Raises:
        RequestError: a prompt that is empty, or too long for the model or the cache.
    """
    length, longest = sequence.num_tokens, config.max_model_len
    found = f"prompt: has {length} tokens"
    if length == 0:
        raise RequestError(f"{found}: must have 1 or more; send some text", "prompt")
    if length + 1 > longest:
        rule = f"with one to generate it must fit in max_model_len={longest}"
        raise RequestError(f"{found}: {rule}; shorten it", "prompt")
    if length + 1 > blocks.longest:
        needed = f"with one to generate it takes {blocks.most_blocks(length + 1)} blocks"
        rule = f"{needed} of {blocks.block_size}, the whole cache has {blocks.num_blocks}"
        remedy = "shorten it or give the cache more memory"
        raise RequestError(f"{found}: {rule}; {remedy}", "prompt")
