"""The engine: requests in, deltas out, one step at a time. Owned by one thread.

``step`` = schedule -> batch -> forward -> commit -> sample -> post-process.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

from torch import Tensor

from qtool.errors import RequestError
from qtool.runtime.admission import SchedulerConfig
from qtool.runtime.batch import build_batch
from qtool.runtime.blocks import BlockManager
from qtool.runtime.capacity import CacheSize, cache_size
from qtool.runtime.detokenizer import TextStream
from qtool.runtime.eviction import eviction_rule
from qtool.runtime.generation import Generation
from qtool.runtime.kv_cache import new_evictor
from qtool.runtime.kv_groups import LayerGroups, choose_groups
from qtool.runtime.load_plan import make_plan
from qtool.runtime.loaded_model import LoadedModel
from qtool.runtime.model import Decoder
from qtool.runtime.options import EngineOptions
from qtool.runtime.outputs import OutputDelta
from qtool.runtime.prefix_cache import PrefixCache
from qtool.runtime.request import EngineStats, Request
from qtool.runtime.sampler import Sampled, SamplerRow, make_generator, sample, sample_likeliest
from qtool.runtime.scheduled_step import Chunk, ScheduledStep
from qtool.runtime.scheduler import Scheduler
from qtool.runtime.sequence import Sequence
from qtool.runtime.tokenizer import Tokenizer

# Of the cache, what admitting a request leaves free for those that run.
WATERMARK = 0.01
# How often smaller requests are admitted past one that does not fit yet. Each may delay it by as
# long as it runs; 16 fill a batch that would else run half empty.
MAX_PASSES = 16


class Engine:
    """Runs many requests on one decoder.

    Args:
        clock: seconds, for requests with a time limit.

    Raises:
        EngineError: on construction, when the cache has no memory.
    """

    def __init__(
        self,
        model: LoadedModel,
        tokenizer: Tokenizer,
        options: EngineOptions,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        decoder = model.decoder
        self._block_size = decoder.block_size(options.block_size)
        longest = model.max_model_len
        rule = eviction_rule(
            options.loading.kv_eviction,
            options.loading.kv_budget,
            self._block_size,
            decoder.config.windows,
            longest,
        )
        windows, schemes = decoder.config.windows, decoder.kv.schemes
        groups = choose_groups(windows, schemes, self._block_size, longest, evicts=rule is not None)
        size = self._size_cache(
            options, decoder, groups, longest if rule is None else rule.max_tokens
        )
        self._decoder, self._tokenizer, self._seed = decoder, tokenizer, options.seed
        self._clock = clock
        self._cache = decoder.new_cache(size.blocks, self._block_size, size.tails, groups)
        decoder.warm_up(self._cache)
        evictor = None if rule is None else new_evictor(rule, self._cache)
        prefixes = None
        if options.enable_prefix_caching and rule is None:
            prefixes = PrefixCache(self._block_size, decoder.kv_cache_dtype)
        self._blocks = BlockManager(
            size.blocks,
            self._block_size,
            groups.windows,
            prefixes,
            size.tails or None,
            evictor,
            options.max_num_batched_tokens,
        )
        config = SchedulerConfig(
            max_num_seqs=options.max_num_seqs,
            max_num_batched_tokens=options.max_num_batched_tokens,
            max_model_len=longest,
            policy=options.scheduling_policy,
            watermark=WATERMARK,
            expects_output=True,
            max_passes=MAX_PASSES,
        )
        self._scheduler = Scheduler(config, self._blocks)
        self._generations: dict[str, Generation] = {}
        self._requests = itertools.count()
        self._prompt_tokens = self._generated_tokens = self._preemptions = self._steps = 0
        self._timeouts = 0
        self.info = make_plan(model, options, self._block_size, *size, rule, groups)

    def _size_cache(
        self, options: EngineOptions, decoder: Decoder, groups: LayerGroups, longest: int
    ) -> CacheSize:
        """Blocks and tail pages for sequences of ``longest`` tokens, of which each computes its
        share of a step's tokens at a time.
        """
        size, chunk = self._block_size, -(-options.max_num_batched_tokens // options.max_num_seqs)
        return cache_size(
            options,
            groups.blocks(longest, size, chunk) * size,
            size,
            groups.slot_bytes(decoder.kv_bytes_per_token),
            decoder.kv_tail_bytes,
            decoder.device,
        )

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return self._scheduler.has_work

    def stats(self) -> EngineStats:
        """Counters so far and gauges of now."""
        return EngineStats(
            num_running=self._scheduler.num_running,
            num_waiting=self._scheduler.num_waiting,
            blocks_used=self.info.num_blocks - self._blocks.num_free,
            blocks_total=self.info.num_blocks,
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._generated_tokens,
            preemptions=self._preemptions,
            steps=self._steps,
            slots_used=self._scheduler.num_slots_used,
            blocks_known=self._blocks.num_known,
            reused_tokens=self._scheduler.num_reused_tokens,
            timeouts=self._timeouts,
            evicted_blocks=self._blocks.num_evicted,
        )

    def check_integrity(self) -> None:
        """Raise AssertionError when the books of blocks and sequences do not balance."""
        self._scheduler.check_integrity()

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            RequestError: it can never run here; the engine is unchanged.
        """
        self._check_ids(request)
        sequence = Sequence(
            request.request_id,
            list(request.prompt_token_ids),
            request.params,
            priority=request.priority,
            cache_salt=request.cache_salt,
            deadline=None if request.timeout is None else self._clock() + request.timeout,
        )
        row = self._sampler_row(sequence)
        text = TextStream(self._tokenizer, sequence.prompt_token_ids, request.params)
        parent = self._generations.get(request.fork_of or "")
        if parent is None:
            self._scheduler.add(sequence)
        else:
            self._scheduler.fork(parent.sequence, sequence)
        self._generations[request.request_id] = Generation(sequence, row, text)

    def abort(self, request_id: str) -> None:
        """Forget a request; its blocks are free at once. Unknown ids are no error."""
        self._generations.pop(request_id, None)
        self._scheduler.abort(request_id)

    def step(self) -> list[OutputDelta]:
        """Advance every scheduled sequence by its share of tokens."""
        late = self._expire()
        step = self._scheduler.schedule()
        if step.chunks:
            return late + self._run(step)
        self._scheduler.commit(step)
        return late

    def _expire(self) -> list[OutputDelta]:
        """End requests whose time has passed."""
        late = self._scheduler.expire(self._clock())
        self._timeouts += len(late)
        return [self._generations.pop(sequence.request_id).expire() for sequence in late]

    def _run(self, step: ScheduledStep) -> list[OutputDelta]:
        generations = [self._generations[chunk.sequence.request_id] for chunk in step.chunks]
        samples = [chunk.samples for chunk in step.chunks]
        self._cache.copy_tails(step.tail_copies)
        self._cache.copy_blocks(step.copies)
        if all(generation.needs_no_logits for generation in generations):
            sampled = self._forward_likeliest(step.chunks)
            self._commit(step)
            writing = [g for g, done in zip(generations, samples, strict=True) if done]
            return self._close(self._accept(writing, sampled))
        logits, counts = self._forward(step.chunks, generations)
        self._commit(step)
        return self._close(self._post_process(step.chunks, samples, generations, logits, counts))

    def _forward_likeliest(self, chunks: list[Chunk]) -> list[Sampled]:
        """Next tokens of the chunks that sample, where the likeliest is all they ask for."""
        batch = build_batch(chunks, self._block_size, self._decoder.device)
        return sample_likeliest(*self._decoder.likeliest(batch, self._cache))

    def _forward(
        self, chunks: list[Chunk], generations: list[Generation]
    ) -> tuple[Tensor, list[int]]:
        """Logits [R, vocab] and how many of the rows are each chunk's.

        A chunk has all its rows where prompt log-probabilities are wanted, else one if it samples.
        """
        everything = [generation.scores_prompt for generation in generations]
        batch = build_batch(chunks, self._block_size, self._decoder.device, everything)
        logits = self._decoder.forward(batch, self._cache)
        counts = [
            chunk.length if whole else int(chunk.samples)
            for chunk, whole in zip(chunks, everything, strict=True)
        ]
        return logits, counts

    def _post_process(
        self,
        chunks: list[Chunk],
        samples: list[bool],
        generations: list[Generation],
        logits: Tensor,
        counts: list[int],
    ) -> list[OutputDelta]:
        writing: list[Generation] = []
        last_rows: list[int] = []
        deltas: list[OutputDelta] = []
        end = 0
        for chunk, done, generation, count in zip(
            chunks, samples, generations, counts, strict=True
        ):
            start, end = end, end + count
            if generation.scores_prompt:
                generation.record_prompt(chunk, logits[start:end])
            if done and generation.only_scores:
                deltas.append(generation.end_scoring())
            elif done:
                writing.append(generation)
                last_rows.append(end - 1)
        if writing:
            # A copy of 32 rows of 49,152 costs as much as the rest of the host's work in a step.
            logits = logits if len(last_rows) == len(logits) else logits[last_rows]
            sampled = sample(logits, [generation.row for generation in writing])
            deltas += self._accept(writing, sampled)
        return deltas

    def _accept(self, writing: list[Generation], sampled: list[Sampled]) -> list[OutputDelta]:
        self._generated_tokens += len(writing)
        return [g.accept(token) for g, token in zip(writing, sampled, strict=True)]

    def _close(self, deltas: list[OutputDelta]) -> list[OutputDelta]:
        """Forget requests that have ended."""
        for delta in deltas:
            if delta.finish_reason is not None:
                self._scheduler.finish(self._generations.pop(delta.request_id).sequence)
        return deltas

    def _commit(self, step: ScheduledStep) -> None:
        self._scheduler.commit(step)
        self._count(step)

    def _sampler_row(self, sequence: Sequence) -> SamplerRow:
        params = sequence.params
        seed = params.seed
        if seed is None and self._seed is not None:
            # Requests without a seed differ from one another, and repeat with the engine's.
            seed = self._seed + next(self._requests)
        return SamplerRow(
            params=params,
            prompt_token_ids=sequence.prompt_token_ids,
            output_token_ids=sequence.output_token_ids,
            generator=make_generator(seed),
            eos_token_ids=self._tokenizer.eos_token_ids,
            bad_words_ids=self._tokenizer.bad_words_ids(params.bad_words),
        )

    def _check_ids(self, request: Request) -> None:
        vocab_size, params = self.info.vocab_size, request.params
        for name, ids in (
            ("prompt", request.prompt_token_ids),
            ("stop_token_ids", params.stop_token_ids),
            ("logit_bias", params.logit_bias),
            ("allowed_token_ids", params.allowed_token_ids or ()),
        ):
            bad = [token for token in ids if not 0 <= token < vocab_size]
            if bad:
                rule = f"token ids are 0 to {vocab_size - 1}"
                raise RequestError(f"{name} has token id {bad[0]}: {rule}", name)

    def _count(self, step: ScheduledStep) -> None:
        self._steps += 1
        self._preemptions += len(step.preempted)
        self._prompt_tokens += sum(
            max(min(c.start + c.length, len(c.sequence.prompt_token_ids)) - c.start, 0)
            for c in step.chunks
        )
