"""Random schedules for the scripted engine, and what must hold of what they give."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from qtool.errors import RequestError
from qtool.runtime.admission import SchedulerConfig
from qtool.runtime.eviction import EvictionRule
from qtool.runtime.sequence import Sequence
from support.scripted import VOCAB_SIZE, ScriptedEngine, make_sequence, run_alone


def limit(engine: ScriptedEngine, sequence: Sequence) -> int:
    """As ``Scheduler.token_limit``, worked out again."""
    max_tokens = sequence.params.max_tokens
    wanted = 10**9 if max_tokens is None else len(sequence.prompt_token_ids) + max_tokens
    return min(wanted, longest(engine))


def longest(engine: ScriptedEngine) -> int:
    """Tokens that a sequence may have, by the blocks that it would hold on its way."""
    size, chunk = engine.blocks.block_size, engine.config.max_num_batched_tokens
    if engine.rule is not None:
        return engine.config.max_model_len
    for length in range(1, engine.config.max_model_len + 1):
        # A chunk's first token sees a window; blocks begin before it, and end behind the chunk.
        reaches = [length if w is None else w - 1 + chunk + size - 1 for w in engine.windows]
        if sum(-(-min(length, reach) // size) for reach in reaches) > engine.blocks.num_blocks:
            return (length - 1) // size * size
    return engine.config.max_model_len


def max_steps(engine: ScriptedEngine, sequences: list[Sequence]) -> int:
    """More steps than these may take. With one priority, the sum of their tokens.

    With several, or where later ones may pass, a better one may begin while a worse one runs and
    take its blocks, so each of them may begin anew once for each better one.
    """
    num_tokens = sum(limit(engine, sequence) for sequence in sequences)
    one_priority = len({sequence.priority for sequence in sequences}) <= 1
    strict = one_priority and engine.config.max_passes == 0
    return num_tokens if strict else num_tokens * len(sequences)


def assert_streams_are_those_of_solo_runs(engine: ScriptedEngine) -> None:
    for sequence in engine.finished:
        end = limit(engine, sequence)
        expected = run_alone(sequence.prompt_token_ids, end, engine.windows, engine.rule)
        assert sequence.output_token_ids == expected, sequence.request_id


def random_config(rng: random.Random) -> tuple[SchedulerConfig, int, int]:
    seqs = rng.randint(1, 8)
    config = SchedulerConfig(
        max_num_seqs=seqs,
        max_num_batched_tokens=seqs + rng.choice([0, 1, 3, 10, 100]),
        max_model_len=rng.choice([12, 30, 1000]),
        watermark=rng.choice([0.0, 0.0, 0.0, 0.1, 0.5]),
        expects_output=rng.random() < 0.2,
        max_passes=rng.choice([0, 0, 1, 5]),
    )
    block_size = rng.choice([1, 2, 3, 4, 8])
    return config, max(rng.randint(8, 64) // block_size, 2), block_size


# Prompts begin alike, or prefixes would never be found; some have the salt of another tenant.
SHARED_PREFIX = list(range(1, 25))
SALTS = ("", "", "tenant")


def random_sequence(rng: random.Random, name: str, priorities: int) -> Sequence:
    prompt = [rng.randrange(VOCAB_SIZE) for _ in range(rng.choice([1, 3, 6, 12, 24]))]
    prompt = SHARED_PREFIX[: rng.choice([0, 0, 5, 16, 24])] + prompt
    max_tokens = rng.choice([0, 1, 5, 20, 20, None])
    priority, salt = rng.randrange(priorities), rng.choice(SALTS)
    return make_sequence(name, prompt, max_tokens, priority, salt, rng.choice([None, None, 9.0]))


def _random_fork(rng: random.Random, name: str, parent: Sequence) -> Sequence:
    """Another sample of the parent's prompt, a continuation of it, or a branch of its output."""
    end = rng.choice([len(parent.prompt_token_ids), parent.num_tokens])
    branch = [rng.randrange(VOCAB_SIZE)] * rng.randint(0, 2)
    tokens = parent.token_ids(0, end) + branch
    return make_sequence(name, tokens, rng.choice([1, 5, 20]), 0, parent.cache_salt)


def _act(rng: random.Random, engine: ScriptedEngine, name: str, priorities: int) -> None:
    """Add, fork, abort (between steps or in one), or just step."""
    victim = rng.choice(engine.alive) if engine.alive else None
    action = rng.random()
    try:
        if action < 0.3 or victim is None:
            engine.add(random_sequence(rng, name, priorities))
        elif action < 0.4:
            engine.fork(victim, _random_fork(rng, name, victim))
        elif action < 0.44:
            engine.abort(victim)
        elif action < 0.445:
            engine.expire(9.0)
        else:
            engine.step(abort_in_flight=victim if action < 0.48 else None)
    except RequestError as error:
        assert error.param == "prompt"


def random_rule(rng: random.Random, num_blocks: int, block_size: int) -> EvictionRule:
    """A budget of 3 blocks or more; small ones, or few schedules would reach it."""
    budget = rng.randint(3, min(max(num_blocks, 3), 12))
    return EvictionRule(block_size, budget, rng.randint(0, budget - 2))


def _run_random_schedule(
    seed: int,
    window: int | None = None,
    remembers: bool = True,
    tails: bool = False,
    evicts: bool = False,
    more_windows: tuple[int, ...] = (),
) -> ScriptedEngine:
    rng = random.Random(seed)
    config, num_blocks, block_size = random_config(rng)
    num_tails, rule = 1 + seed % config.max_num_seqs if tails else None, None
    if evicts:
        num_blocks = max(num_blocks, 3)
        rule = random_rule(random.Random(seed), num_blocks, block_size)
        # Nothing else bounds an answer.
        config = replace(config, max_model_len=min(config.max_model_len, 90))
    engine = ScriptedEngine(
        config,
        num_blocks * (1 + len(more_windows)),
        block_size,
        window,
        remembers=remembers,
        num_tails=num_tails,
        rule=rule,
        more_windows=more_windows,
    )
    priorities = rng.choice([1, 1, 3])
    for i in range(rng.randint(1, 40)):
        _act(rng, engine, f"{seed}-{i}", priorities)
    engine.drain(max_steps(engine, engine.alive))
    return engine


def check_schedules(
    seeds: range,
    window: Callable[[int], int | None],
    remembers: bool = True,
    tails: bool = False,
    evicts: bool = False,
    more_windows: Callable[[int], tuple[int, ...]] = lambda seed: (),
) -> dict[str, float]:
    """How often what might go wrong was tried, a schedule."""
    counts = Counter[str]()
    for seed in seeds:
        try:
            more = more_windows(seed)
            engine = _run_random_schedule(seed, window(seed), remembers, tails, evicts, more)
            assert_streams_are_those_of_solo_runs(engine)
        except AssertionError as error:
            raise AssertionError(f"schedule with seed {seed}: {error}") from error
        counts["preemptions"] += engine.num_preemptions
        counts["copies"] += engine.num_copies
        counts["hits"] += engine.num_hits
        counts["tail copies"] += engine.num_tail_copies
        counts["evictions"] += engine.blocks.num_evicted
        counts["finished"] += len(engine.finished)
    return {name: count / len(seeds) for name, count in counts.items()}


def no_window(seed: int) -> None:
    return None


def some_window(seed: int) -> int:
    return 1 + seed % 10


def layer_groups(seed: int) -> tuple[int, ...]:
    """Windows of one to three groups beside the first, wide ones first."""
    rng = random.Random(seed)
    return tuple(sorted((rng.randint(1, 10) for _ in range(rng.randint(1, 3))), reverse=True))
