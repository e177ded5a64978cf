"""Keys whose channels are of one size, so that a scale a token and head suits them all.

A key's channel is divided by ``2**e`` and the query's is multiplied by it: scores stay what they
are. The idea of moving size from where it hurts to where it does not is SmoothQuant's (Xiao et al.
2023, section 4, equation 4 with alpha = 1); powers of two leave every mantissa as it was, so that
factors can be folded into weights at load and a cache in the compute dtype gives the same bits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from qtool.errors import CheckpointError
from qtool.formats.kv_plan import KV_PLAN_PATH, MAX_EXPONENT, KeyExponents
from qtool.formats.tensor import QuantizedTensor
from qtool.runtime.config import DecoderConfig

Weight = Tensor | QuantizedTensor

# float16 ends at 65504: queries are multiplied by no more than 16.
FLOAT16_MAX_EXPONENT = 4


@dataclass(frozen=True, slots=True)
class SmoothedKeys:
    """Layers whose keys are smoothed, by what their factors come from.

    Attributes:
        by_plan: the checkpoint's plan of the cache.
        by_norm: gains of ``k_norm`` and the rows of ``k_proj``.
        refused: layers that the plan has factors for and that go without, with the reason.
    """

    by_plan: tuple[int, ...] = ()
    by_norm: tuple[int, ...] = ()
    refused: Mapping[int, str] = field(default_factory=dict)

    def describe(self) -> str:
        """For people; empty where no layer is."""
        parts = [("the checkpoint's plan", self.by_plan), ("gains of k_norm", self.by_norm)]
        return ", ".join(f"by {source} in {len(of)} layers" for source, of in parts if of)

    def notes(self) -> tuple[str, ...]:
        """What is not as the plan says, a sentence for each reason."""
        return tuple(
            f"keys of {count} layers are not smoothed as {KV_PLAN_PATH} says: {reason}"
            for reason, count in Counter(self.refused.values()).items()
        )


def exponents_of(peaks: Tensor, rotary_dim: int) -> Tensor:
    """Exponents ``e``, int64 [heads, head_dim], within 0 and :data:`MAX_EXPONENT`.

    ``e = round(log2(peak / smallest peak))`` within a head, with peaks of at least ``2**-8`` of the
    head's largest. The smallest channel keeps its size, and larger ones become about as small. A
    channel that is always zero keeps it too, and says nothing of the others.

    Args:
        peaks: largest \\|key\\| of every channel, float [heads, head_dim].
        rotary_dim: so many channels are rotated, the first half of them with the second: what is
            rotated together has the larger of two peaks. 0 where nothing is rotated.
    """
    if not bool(peaks.isfinite().all()):
        return torch.zeros(peaks.shape, dtype=torch.int64)
    tied, half = peaks.float().cpu().clone(), rotary_dim // 2
    pairs = torch.maximum(tied[:, :half], tied[:, half:rotary_dim])
    tied[:, :rotary_dim] = pairs.repeat(1, 2)
    floored = tied.maximum(tied.amax(1, keepdim=True) * 2.0**-MAX_EXPONENT)
    smallest = floored.masked_fill(tied == 0, torch.inf).amin(1, keepdim=True)
    return torch.where(tied == 0, 0.0, (floored / smallest).log2().round()).long()


def expected_peaks(
    gains: Tensor, weight: Weight, bias: Tensor | None, input_gains: Tensor
) -> Tensor:
    """How large channels of normed keys are, up to a factor, float32 [1, head_dim].

    Of inputs whose channels are independent and as large as the gains of their norm, a row of the
    projection makes a channel as large as the root of the sum of its squares. The norm of keys then
    divides each head by its size. Heads share gains, so the largest of them counts.

    Args:
        gains: of the norm of keys, [head_dim].
        weight: projection of keys, [num_kv_heads * head_dim, hidden].
        bias: [num_kv_heads * head_dim], or ``None``.
        input_gains: of the norm before the projection, [hidden].
    """
    rows = (weight.dequantize() if isinstance(weight, QuantizedTensor) else weight.float()).cpu()
    squares = (rows * input_gains.cpu()).square().sum(1)
    if bias is not None:
        squares = squares + bias.float().cpu().square()
    heads = squares.unflatten(0, (-1, len(gains)))
    sizes = (heads / heads.mean(1, keepdim=True)).sqrt()
    peaks: Tensor = sizes * gains.abs().cpu()
    return peaks.amax(0, keepdim=True)


def calibrated_exponents(
    peaks: Iterable[Sequence[Sequence[float]]], config: DecoderConfig
) -> tuple[KeyExponents, ...]:
    """Exponents of every layer from its keys' peaks on calibration text.

    Args:
        peaks: of each layer, [num_kv_heads][head_dim]. Heads that share a norm share peaks.
    """
    found = []
    for layer, rows in enumerate(peaks):
        table = torch.tensor(rows)
        if config.family.qk_norm:
            table = table.amax(0, keepdim=True).expand_as(table)
        exponents = exponents_of(table, _rotary_dim(config, layer))
        found.append(tuple(tuple(head) for head in exponents.tolist()))
    return tuple(found)


class KeySmoother:
    """Chooses each layer's factors while a decoder is built, and remembers what became of them.

    Args:
        config: of the decoder.
        planned: the plan's exponents, a layer each; ``None`` where it has none.
        static: names of attentions with FP8 scales of their own: those were calibrated without.
        dtype: compute dtype.

    Raises:
        CheckpointError: factors that would change scores.
    """

    def __init__(
        self,
        config: DecoderConfig,
        planned: Sequence[KeyExponents | None] | None,
        static: Container[str],
        dtype: torch.dtype,
    ) -> None:
        self._config, self._static = config, static
        self._planned = planned or (None,) * config.num_layers
        self._limit = FLOAT16_MAX_EXPONENT if dtype == torch.float16 else MAX_EXPONENT
        self._by_plan: list[int] = []
        self._by_norm: list[int] = []
        self._refused: dict[int, str] = {}
        for layer, exponents in enumerate(self._planned):
            if exponents is not None:
                _check_exact(config, layer, torch.tensor(exponents))

    @property
    def smoothed(self) -> SmoothedKeys:
        """What became of the layers so far."""
        return SmoothedKeys(tuple(self._by_plan), tuple(self._by_norm), dict(self._refused))

    def norms(
        self,
        layer: int,
        attention: str,
        query: Tensor,
        key: Tensor,
        expected: Callable[[], Tensor],
    ) -> tuple[Tensor, Tensor]:
        """Gains [head_dim] of the norms of queries and keys, float32, with factors in them.

        ``expected`` gives peaks of keys, [1, head_dim], where no plan knows better.
        """
        planned = self._of_plan(layer, attention)
        if planned is None and attention in self._static:
            return query, key
        exponents = planned
        if exponents is None:
            exponents = exponents_of(expected(), _rotary_dim(self._config, layer))
        exponents = exponents[0].clamp(max=self._limit)
        if bool(exponents.any()):
            (self._by_norm if planned is None else self._by_plan).append(layer)
        factors = powers_of_two(exponents).to(query.device)
        return query * factors, key / factors

    def projections(
        self,
        layer: int,
        attention: str,
        weights: list[Weight],
        biases: list[Tensor | None],
    ) -> tuple[list[Weight], list[Tensor | None]]:
        """Projections of queries, keys and values, one or three, with the plan's factors in them.

        Args:
            weights: [rows, in_features] each.
            biases: [rows] each, or ``None``.
        """
        planned = self._of_plan(layer, attention)
        if planned is None or not bool(planned.any()):
            return weights, biases
        if any(isinstance(w, QuantizedTensor) and w.scheme.strategy == "block" for w in weights):
            self._refused[layer] = "scales of the projections span 128 rows"
            return weights, biases
        self._by_plan.append(layer)
        parts = self._rows(planned.clamp(max=self._limit)).split([w.shape[0] for w in weights])
        return (
            [scale_rows(weight, part) for weight, part in zip(weights, parts, strict=True)],
            [
                None if bias is None else _times(bias, part)
                for bias, part in zip(biases, parts, strict=True)
            ],
        )

    def _of_plan(self, layer: int, attention: str) -> Tensor | None:
        exponents = self._planned[layer]
        if exponents is None:
            return None
        if attention in self._static:
            self._refused[layer] = "the checkpoint has FP8 scales for the cache, made without"
            return None
        return torch.tensor(exponents)

    def _rows(self, exponents: Tensor) -> Tensor:
        """Exponents of all rows of q, k and v: queries up, keys down; [rows], int64."""
        groups = self._config.num_heads // self._config.num_kv_heads
        queries = exponents.repeat_interleave(groups, dim=0).flatten()
        return torch.cat((queries, -exponents.flatten(), torch.zeros_like(exponents).flatten()))


def scale_rows(weight: Weight, exponents: Tensor) -> Weight:
    """A weight whose row ``i`` is multiplied by ``2**exponents[i]``, exactly.

    Of a quantized one the scales are, codes and zeros stay. Where one scale serves the whole
    weight, each row gets it as its own.

    Args:
        weight: [rows, in_features]; its scales span no rows but all.
        exponents: int64 [rows].
    """
    if isinstance(weight, Tensor):
        return _times(weight, exponents)
    if weight.scheme.strategy == "tensor":
        rows = weight.shape[0]
        weight = replace(
            weight,
            scales=weight.scales.expand(rows, 1),
            zeros=weight.zeros.expand(rows, 1).contiguous(),
            scheme=replace(weight.scheme, strategy="channel"),
        )
    return replace(weight, scales=_times(weight.scales, exponents))


def powers_of_two(exponents: Tensor) -> Tensor:
    """``2**exponents``, float32, of int64 within :data:`MAX_EXPONENT` of 0."""
    steps = range(-MAX_EXPONENT, MAX_EXPONENT + 1)
    table = torch.tensor([2.0**step for step in steps])
    return table[exponents + MAX_EXPONENT]


def _times(values: Tensor, exponents: Tensor) -> Tensor:
    """Rows of ``values`` times powers of two; float16 becomes float32 where it would round."""
    factors = powers_of_two(exponents).reshape(-1, *(1,) * (values.ndim - 1)).to(values.device)
    if values.dtype != torch.float16:
        return values * factors.to(values.dtype)
    exact = values.float() * factors
    rounded = exact.to(torch.float16)
    return rounded if torch.equal(rounded.float(), exact) else exact


def _rotary_dim(config: DecoderConfig, layer: int) -> int:
    rope = config.rope_of[layer]
    return 0 if rope is None else config.ropes[rope].rotary_dim(config.head_dim)


def _check_exact(config: DecoderConfig, layer: int, exponents: Tensor) -> None:
    """Refuse factors that do not go through what lies between weights and scores."""
    if problem := next(_problems(config, layer, exponents), None):
        raise CheckpointError(
            f"{KV_PLAN_PATH}: key_exponents of layer {layer} {problem}; write it again with qtool "
            "quantize --kv-cache, or delete the file"
        )


def _problems(config: DecoderConfig, layer: int, exponents: Tensor) -> Iterator[str]:
    width = _rotary_dim(config, layer)
    half = width // 2
    if not torch.equal(exponents[:, :half], exponents[:, half:width]):
        yield f"differ between channels that are rotated together, {half} apart"
    if config.family.qk_norm and bool((exponents != exponents[:1]).any()):
        yield "differ by head, and gains of k_norm are one for all heads"
