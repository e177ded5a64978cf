"""A decoder block while it is quantized: what flows into its linears, and how it is rewritten.

The block's module is the workspace: folding rewrites it in place without changing what it
computes, and at the end its linears hold the rounded weights, so that the walk hands their
error on to the next block.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from qtool.calibration.decoder_block import BATCH_TOKENS, DecoderBlock
from qtool.calibration.families import (
    ModelFamily,
    ResidualSum,
    SmoothingPair,
    head_dim,
    value_channels,
)
from qtool.calibration.observers import AbsMax, CrossMoment, EveryNth, Hessian, MeanAbs
from qtool.calibration.weights import check_scales, to_stored
from qtool.formats import affine
from qtool.formats.scheme import WeightScheme
from qtool.quantize import smoothing
from qtool.quantize.job import Job

# Tokens on which attention and MLP judge scales, spread evenly over the samples; linear parents
# use all tokens through the second moment. Four times as many gave SmolLM2 the same KL (.115).
SEARCH_TOKENS = 512

# Inputs of a block's last linear that are kept, in bytes, so that the block need not run once more
# to hand its outputs on. Larger ones are computed again.
KEPT_BYTES = 2**30

# A norm's gain below this share of the mean gain passes too little on to correct anything by.
QUIET_GAIN = 0.1


@dataclass(slots=True)
class Inputs:
    """Statistics of the input that the linears of one group share; folding keeps them true.

    Attributes:
        hessian: second moment, [K, K].
        peak: largest magnitude per channel, [K].
        tokens: behind the statistics.
    """

    hessian: Tensor
    peak: Tensor
    tokens: int

    def divide(self, scales: Tensor) -> None:
        """The same of the input divided by ``scales`` [K]."""
        self.hessian = smoothing.rescale_hessian(self.hessian, scales)
        self.peak = self.peak / scales


@dataclass(slots=True)
class SearchInputs(Inputs):
    """What searches look at besides: mean magnitudes [K], and sampled tokens [T, K]."""

    mean_abs: Tensor
    sample: Tensor

    def divide(self, scales: Tensor) -> None:
        Inputs.divide(self, scales)
        self.mean_abs = self.mean_abs / scales
        self.sample = self.sample / scales


@dataclass(slots=True)
class SolveInputs(Inputs):
    """What a solve looks at besides, to make up for the error of what was rounded before.

    With x the input now, x0 the original's, and per token:

    Attributes:
        drift: moment ``(x0 - x) x^T``, [K, K].
        shortfall: moment ``s x^T`` with s what the linear's output must add, so that the residual
            stream behind it is the original's, [N, K]; ``None`` if its output goes elsewhere.
    """

    drift: Tensor
    shortfall: Tensor | None = None


@dataclass(slots=True)
class Workspace:
    """A block being quantized, with what all steps need.

    Attributes:
        inputs: by linear; those of a group, quantized alike, share one object.
        strengths: of the smoothing that was searched, by linear; 0 where identity was best.
    """

    block: DecoderBlock
    family: ModelFamily
    schemes: Mapping[str, WeightScheme]
    dtype: torch.dtype
    head_dim: int
    value_channels: int
    inputs: dict[str, Inputs] = field(default_factory=dict)
    strengths: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, block: DecoderBlock, job: Job) -> Workspace:
        """The block as it comes from the walk.

        Raises:
            QuantizationError: a weight whose scales the stored dtype cannot hold.
        """
        schemes = job.schemes_of(block.prefix)
        config = job.reader.config
        widths = head_dim(config), value_channels(config)
        work = cls(block, job.family, schemes, job.dtype, *widths)
        if job.dtype == torch.float16:  # the others reach as far as float32
            for name, scheme in schemes.items():
                scales, _ = affine.choose_grid(work.linear(name).weight, scheme, job.dtype)
                check_scales(f"{block.prefix}.{name}", scales)
        return work

    @property
    def groups(self) -> list[tuple[str, ...]]:
        """Quantized linears that read the same input, in true-sequential order."""
        return [group for group in self.family.linear_groups if group[0] in self.schemes]

    def linear(self, name: str) -> nn.Linear:
        """A linear by its path in the block."""
        module = self.block.module.get_submodule(name)
        assert isinstance(module, nn.Linear)
        return module

    def observe(self, groups: Sequence[tuple[str, ...]]) -> None:
        """Measure the inputs of groups as the block now is, in one pass over all samples."""
        observers = {group[0]: (Hessian(group[0]), AbsMax(group[0])) for group in groups}
        self.block.observe(observers)
        for group in groups:
            hessian, peak = observers[group[0]]
            inputs = Inputs(hessian.result(), peak.result(), hessian.tokens)
            self.inputs.update(dict.fromkeys(group, inputs))

    @property
    def solve_passes(self) -> list[list[tuple[str, ...]]]:
        """Groups whose inputs are measured in one pass over the block before any is rounded.

        One each, but for experts' last linears: no expert's input depends on another expert, and
        a pass for each of 128 would run all of them 128 times.
        """
        passes: list[list[tuple[str, ...]]] = []
        room = 0
        for group in self.groups:
            features = self.linear(group[0]).in_features
            needed = 8 * features * (features + BATCH_TOKENS)  # moments and inputs, both models'
            if self._is_last_of_expert(group) and room >= needed and passes:
                passes[-1].append(group)
            else:
                passes.append([group])
                room = KEPT_BYTES if self._is_last_of_expert(group) else 0
            room -= needed
        return passes

    def _is_last_of_expert(self, group: tuple[str, ...]) -> bool:
        experts = self.family.experts
        return experts is not None and len(group) == 1 and group[0].startswith(f"{experts.module}.")

    def observe_beside_original(self, groups: Sequence[tuple[str, ...]]) -> None:
        """Measure the inputs of one pass's groups as the block now is, and against the original's.

        They take the place of all that was measured before, which no step looks at again.
        """
        self.inputs.clear()
        name, last = groups[0][0], groups[-1] == self.groups[-1]
        observers = {g[0]: (Hessian(g[0]), AbsMax(g[0]), CrossMoment(g[0])) for g in groups}
        # Experts, which alone share a pass, do not write the residual stream by themselves.
        shortfall, sum_ = CrossMoment(name), self.family.sums.get(name)
        places = [] if sum_ is None else [p for p in (sum_.stream, sum_.norm) if p is not None]
        kept: tuple[list[Tensor], list[Tensor]] = [], []
        attention = name == self.family.attention_output
        small = self.block.num_tokens * self.linear(name).in_features * 4 <= KEPT_BYTES
        keeps = sum_ is not None and (attention or (last and small))
        for now, then in self.block.beside_original([*observers, *places], last=last):
            for observed, (hessian, peak, drift) in observers.items():
                x = now[observed]
                hessian.update(x)
                peak.update(x)
                drift.update_pair(x, then[observed] - x)
            if keeps:
                kept[0].append(now[name])
            if keeps and not last:
                kept[1].append(then[name])
            if sum_ is not None:
                shortfall.update_pair(now[name], self._shortfall(sum_, now, then))
        for group in groups:
            hessian, peak, drift = observers.pop(group[0])
            inputs = SolveInputs(
                hessian.result(),
                peak.result(),
                hessian.tokens,
                drift.result(),
                None if sum_ is None else shortfall.result(),
            )
            self.inputs.update(dict.fromkeys(group, inputs))
        if keeps and sum_ is not None:
            self.block.replay(name, *kept, norm=sum_.stream, attention=attention)

    def _shortfall(
        self, sum_: ResidualSum, now: Mapping[str, Tensor], then: Mapping[str, Tensor]
    ) -> Tensor:
        """What a linear's output [T, N] must add to undo the residual stream's error.

        A norm in between divides by the output's root mean square and multiplies by its gain;
        the original's root mean square stands for that of the output to come.
        """
        missing = then[sum_.stream] - now[sum_.stream]
        if sum_.norm is None:
            return missing
        gain = self.family.norm_offset + self.block.module.get_parameter(f"{sum_.norm}.weight")
        root_mean_square = then[sum_.norm].square().mean(-1, keepdim=True).sqrt()
        heard = gain.abs() > QUIET_GAIN * gain.abs().mean()
        return missing * root_mean_square * torch.where(heard, 1 / gain, 0.0)

    def observe_for_search(self) -> None:
        """The same of all groups, with what searches look at besides."""
        stride = max(1, self.block.num_tokens // SEARCH_TOKENS)
        names = [group[0] for group in self.groups]
        observers = {
            name: (Hessian(name), AbsMax(name), MeanAbs(name), EveryNth(name, stride))
            for name in names
        }
        self.block.observe(observers)
        for group in self.groups:
            hessian, peak, mean_abs, sample = observers[group[0]]
            inputs = SearchInputs(
                hessian.result(), peak.result(), hessian.tokens, mean_abs.result(), sample.result()
            )
            self.inputs.update(dict.fromkeys(group, inputs))

    def searched(self, name: str) -> SearchInputs:
        """A linear's inputs, gathered by :meth:`observe_for_search`."""
        inputs = self.inputs[name]
        assert isinstance(inputs, SearchInputs)
        return inputs

    def fold(self, pair: SmoothingPair, scales: Tensor) -> None:
        """Divide a pair's source by ``scales`` [source channels], multiply its targets' columns."""
        scales = self.spread(pair, self._divide_source(pair.source, scales))
        self.inputs[pair.targets[0]].divide(scales)
        for target in pair.targets:
            weight = self.linear(target).weight
            weight.copy_(smoothing.multiply_columns(weight, scales))

    def spread(self, pair: SmoothingPair, scales: Tensor) -> Tensor:
        """Scales of the source's channels as those of the targets' inputs."""
        if not pair.shares_heads:
            return scales
        num_channels = self.linear(pair.targets[0]).in_features
        return smoothing.spread_over_query_group(scales, self.head_dim, num_channels)

    def tie(self, pair: SmoothingPair, per_input: Tensor, how: smoothing.Tie) -> Tensor:
        """A statistic of the targets' input channels as one of the source's channels."""
        if not pair.shares_heads:
            return per_input
        return smoothing.tie_over_query_group(per_input, self.head_dim, self.value_channels, how)

    def _divide_source(self, name: str, scales: Tensor) -> Tensor:
        """Fold into a linear or a norm; returns the scales the stored source really divides by."""
        source = self.block.module.get_submodule(name)
        if isinstance(source, nn.Linear):
            weight, bias = smoothing.divide_rows(source.weight, source.bias, scales)
            source.weight.copy_(weight)
            if bias is not None:
                source.bias.copy_(bias)
            return scales
        weight, exact = smoothing.divide_norm(
            source.get_parameter("weight"), scales, self.family.norm_offset, self.dtype
        )
        source.get_parameter("weight").copy_(weight)
        return exact

    def store_changes(self) -> dict[str, Tensor]:
        """What is no quantized weight, rounded to the stored dtype, in the block and returned."""
        quantized = {f"{name}.weight" for name in self.schemes}
        changed = {}
        for name, tensor in self.block.module.state_dict().items():
            if name not in quantized:
                full_name = f"{self.block.prefix}.{name}"
                changed[full_name] = to_stored(full_name, tensor, self.dtype).cpu()
                tensor.copy_(changed[full_name])
        return changed
