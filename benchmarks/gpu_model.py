"""For gpu_check.py, what is larger than a product: norms, experts, decode steps of a model."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from qtool.formats.scheme import WeightScheme, fp8_scheme, w8a8_scheme, weight_scheme
from qtool.formats.tensor import QuantizedTensor
from qtool.runtime.batch import Batch, build_batch
from qtool.runtime.config import DecoderConfig, parse_decoder_config
from qtool.runtime.kernels import select_backend
from qtool.runtime.kernels.backend import Stream
from qtool.runtime.kernels.reference import ReferenceBackend
from qtool.runtime.kv_cache import BlockPools
from qtool.runtime.layers import Mlp
from qtool.runtime.loader import DecoderBuilder
from qtool.runtime.model import Decoder
from qtool.runtime.sampling_params import SamplingParams
from qtool.runtime.scheduled_step import Chunk
from qtool.runtime.sequence import Sequence
from qtool.runtime.weight_source import WeightSource

if TYPE_CHECKING:
    from gpu_check import Bench, Row

# Tokens of a block: what the quantized pages have (docs/kv-cache.md).
BLOCK = 64
W4 = weight_scheme(4, False, 128)


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """A model's shape, and the steps taken with it.

    Attributes:
        config: as in a ``config.json``.
        batches: sequences of a step.
        context: tokens that each of them has in the cache.
    """

    config: dict[str, object]
    batches: tuple[int, ...]
    context: int


def llama(
    hidden: int, width: int, layers: int, heads: int, kv: int, vocab: int
) -> dict[str, object]:
    """The config of a model in Llama's shape."""
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "vocab_size": vocab,
        "max_position_embeddings": 8192,
        "rope_theta": 500_000.0,
    }


FULL = ModelPlan(llama(4096, 14336, 32, 32, 8, 128_256), batches=(1, 16, 64), context=512)
SMALL = ModelPlan(llama(128, 256, 1, 2, 1, 96), batches=(1, 2), context=9)


def model_checks(bench: Bench) -> Iterator[Row]:
    """What shares a launch against what does not."""
    shape = bench.plan.shapes[0]
    for name, scheme in (("W8A8 INT8", w8a8_scheme()), ("W8A8 FP8 blocks", fp8_scheme("block"))):
        yield _norm_check(bench, name, scheme, shape)
    for name, scheme in (("W4A16 g128", W4), ("W8A8 INT8", w8a8_scheme())):
        yield _experts_check(bench, name, scheme)


def _norm_check(bench: Bench, name: str, scheme: WeightScheme, shape: tuple[int, int]) -> Row:
    """Addition, norm and rounding at once: the same product as one after the other."""
    backend, layer = bench.backend, bench.backend.linear(bench.weight(scheme, shape), None)
    rows, update = bench.random(9, shape[1]).float(), bench.random(9, shape[1])
    weight = bench.random(shape[1]).float()
    _, apart = ReferenceBackend.norm_for(backend, None, Stream(rows, update), weight, 1e-5)
    expected = layer.read(apart)
    _, together = backend.norm_for(layer, Stream(rows.clone(), update), weight, 1e-5)
    error = _relative_error(layer.read(together), expected)
    # On a GPU a multiplication and an addition may be one instruction in one of them.
    verdict = "ok" if error < 1e-2 else f"relative error {error:.2g} of the norm's launch"
    return bench.row("check", f"{name} behind a norm", shape, 9, verdict=verdict)


def _experts_check(bench: Bench, name: str, scheme: WeightScheme) -> Row:
    """A mixture's experts at once: what they give one after another."""
    backend, count, top_k = bench.backend, 5, 2
    rows, columns = min(bench.plan.shapes[0][0], 1024), min(bench.plan.shapes[0][1], 1024)
    mlps = [
        Mlp(
            backend.gate_up(bench.weight(scheme, (2 * columns, columns)), None, "silu"),
            backend.linear(bench.weight(scheme, (rows, columns)), None),
        )
        for _ in range(count)
    ]
    x, chosen = bench.random(9, columns), torch.arange(18, device=bench.device).view(9, 2) % count
    weights = torch.rand(chosen.shape, device=bench.device)
    parts = [[mlps[e](x[t : t + 1], backend)[0] for e in chosen[t].tolist()] for t in range(9)]
    exact = sum(weights[:, i, None] * torch.stack([p[i] for p in parts]) for i in range(top_k))
    together = backend.experts([m.gate_up for m in mlps], [m.down for m in mlps], "silu", top_k)
    assert together is not None and isinstance(exact, Tensor)
    error = _relative_error(together(x, weights, chosen), exact)
    verdict = "ok" if error < 1e-2 else f"relative error {error:.2g} of all experts at once"
    return bench.row("check", f"{name}, experts", (rows, columns), 9, verdict=verdict)


def _relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm())


class RandomWeights:
    """In a checkpoint's place: random weights, made on the device when they are asked for."""

    def __init__(self, bench: Bench, config: DecoderConfig, scheme: WeightScheme | None) -> None:
        self._bench, self._scheme, hidden = bench, scheme, config.hidden_size
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self._vocabulary, self._hidden = (config.vocab_size, hidden), hidden
        self._shapes = {
            "q_proj": (queries, hidden),
            "k_proj": (keys, hidden),
            "v_proj": (keys, hidden),
            "o_proj": (hidden, queries),
            "gate_proj": (config.intermediate_size, hidden),
            "up_proj": (config.intermediate_size, hidden),
            "down_proj": (hidden, config.intermediate_size),
        }

    def tensor(self, name: str) -> Tensor:
        """The embedding, or a norm's weight."""
        if name == "model.embed_tokens.weight":
            return self._bench.random(*self._vocabulary)
        return torch.ones(self._hidden, device=self._bench.device)

    def weight(self, module: str) -> Tensor | QuantizedTensor:
        """A linear's weight; the head is never quantized."""
        shape = self._shapes.get(module.rpartition(".")[2], self._vocabulary)
        if self._scheme is None or module == "lm_head":
            return self._bench.random(*shape) * shape[1] ** -0.5
        return self._bench.weight(self._scheme, shape)

    def refuse_leftovers(self, tied_head: bool) -> None:
        """There are none."""


def random_decoder(bench: Bench, plan: ModelPlan, scheme: WeightScheme | None) -> Decoder:
    """A decoder of the real kind in bfloat16; weights in 16 bits without a scheme."""
    backend = select_backend("triton", bench.device, torch.bfloat16).backend
    config = parse_decoder_config(plan.config)
    source = cast(WeightSource, RandomWeights(bench, config, scheme))
    return DecoderBuilder(source, config, backend).build(plan.context + 1)


def decode_batch(plan: ModelPlan, count: int, device: torch.device) -> Batch:
    """The next token of ``count`` sequences."""
    blocks = -(-(plan.context + 1) // BLOCK)
    chunks = []
    for index in range(count):
        sequence = Sequence(str(index), [1] * (plan.context + 1), SamplingParams())
        sequence.block_table = list(range(index * blocks, (index + 1) * blocks))
        chunks.append(Chunk(sequence, plan.context, 1))
    return build_batch(chunks, BLOCK, device)


def decode_steps(bench: Bench) -> Iterator[Row]:
    """Steps of a whole decoder, 4 bits against 16; of the ceiling: bytes that a step must read."""
    plan = FULL if bench.device.type == "cuda" else SMALL
    dense: dict[int, float] = {}
    for name, scheme in (("bf16", None), ("W4A16 g128", W4)):
        decoder = random_decoder(bench, plan, scheme)
        for count in plan.batches:
            batch = decode_batch(plan, count, bench.device)
            cache = decoder.new_cache(count * batch.block_tables.shape[1], BLOCK)
            seconds, how = _step_seconds(bench, decoder, batch, cache)
            weights = sum(op.num_bytes for op in decoder.linears.values())
            read = weights + count * plan.context * decoder.kv_bytes_per_token
            speedup = dense.setdefault(count, seconds) / seconds
            yield bench.row(
                "model", f"decode, {name}, {how}", tokens=count, seconds=seconds,
                of_ceiling=read / bench.bandwidth / seconds, speedup=speedup,
            )  # fmt: skip
        del decoder
        if bench.device.type == "cuda":
            torch.cuda.empty_cache()


def _step_seconds(
    bench: Bench, decoder: Decoder, batch: Batch, cache: BlockPools
) -> tuple[float, str]:
    """Of a step, and how it ran: as a captured graph, or where something reads back, launched."""

    def step() -> Tensor:
        return decoder.forward(batch, cache)

    try:
        return bench.seconds([step]), "captured"
    except RuntimeError as error:
        if "captur" not in str(error):
            raise
        torch.cuda.synchronize()
        return _launched_seconds(step), "launched"


def _launched_seconds(step: Callable[[], object], repeats: int = 3) -> float:
    step()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / repeats
