"""Statistics of a module's input: small pure objects with ``update(x)`` and ``result()``.

An observer takes activations [tokens, features] of any floating dtype and gathers in float32;
means are running means, so nothing grows with the number of tokens. Results do not depend on
how tokens are split into updates, beyond rounding. Tokens are never padding; see
:mod:`qtool.calibration.data`.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from qtool.errors import CalibrationError

# Rows of a second moment that are computed together: with 256 a moment of 1536 features took .73 of
# the time of the whole product on one core, with 128 and 512 .8.
STRIP = 256


class Observer(Protocol):
    """Gathers one statistic of the input of the module ``name``."""

    def update(self, x: Tensor) -> None:
        """Take activations [tokens, features]; CalibrationError if one is not finite."""
        ...

    def result(self) -> Tensor:
        """The statistic of all tokens so far; CalibrationError if there were none."""
        ...


class _Statistic:
    """Counts tokens and guards against input nothing can be learned from."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.tokens = 0
        self._value: Tensor | None = None

    def _refuse_non_finite(self, statistic: Tensor) -> None:
        """What was gathered from a batch is finite only if the batch is.

        Looking at the statistic, which is small, costs nothing; looking at every activation took
        a sixth of GPTQ's time.
        """
        if not statistic.isfinite().all():
            raise CalibrationError(
                f"the input of {self.name} holds NaN or infinity on calibration token "
                f"{self.tokens} or soon after; the model overflows on this text, or its weights "
                "are damaged"
            )

    def result(self) -> Tensor:
        if self._value is None:
            raise CalibrationError(f"{self.name} saw no calibration token; give a longer text")
        return self._value


class _RunningMean(_Statistic):
    """Token-weighted mean of a per-batch mean."""

    def _merge(self, batch_mean: Tensor, count: int) -> None:
        self._refuse_non_finite(batch_mean.sum(-1) if batch_mean.ndim == 2 else batch_mean)
        self.tokens += count
        if self._value is None:
            self._value = batch_mean
        else:
            self._value.lerp_(batch_mean, count / self.tokens)


class MeanAbs(_RunningMean):
    """Mean of \\|x\\| per feature, [features]: AWQ's measure of a channel's importance."""

    def update(self, x: Tensor) -> None:
        """Take activations [tokens, features]."""
        x = x.detach().float()
        if x.shape[0]:
            self._merge(x.abs().mean(0), x.shape[0])


class Hessian(_RunningMean):
    """Second moment ``X^T X / tokens`` of the input, [features, features].

    The output error of a weight change dW is ``tr(dW H dW^T)`` per token (GPTQ, section 3,
    uses 2 X^T X; the factor changes no argument of a minimum).
    """

    def update(self, x: Tensor) -> None:
        """Take activations [tokens, features]."""
        x = x.detach().float()
        if x.shape[0]:
            self._merge(_gram(x).div_(x.shape[0]), x.shape[0])


def _gram(x: Tensor) -> Tensor:
    """``X^T X`` of x [tokens, K], from the half at and above the diagonal, a strip at a time."""
    features = x.shape[1]
    product = x.new_empty(features, features)
    for start in range(0, features, STRIP):
        end = min(start + STRIP, features)
        product[start:end, start:] = x[:, start:end].T @ x[:, start:]
        product[end:, start:end] = product[start:end, end:].T
    return product


class CrossMoment(_RunningMean):
    """Moment ``Y^T X / tokens`` of a quantity y with the input x, [features of y, of x].

    With :class:`Hessian` it gives the weight that best predicts y from x (normal equations).
    """

    def update_pair(self, x: Tensor, y: Tensor) -> None:
        """Take activations x [tokens, features of x] and y [tokens, features of y]."""
        if x.shape[0]:
            self._merge((y.T @ x).div_(x.shape[0]), x.shape[0])


class AbsMax(_Statistic):
    """Largest \\|x\\| per feature, [features]."""

    def update(self, x: Tensor) -> None:
        """Take activations [tokens, features]."""
        x = x.detach().float()
        if x.shape[0]:
            peak = x.abs().amax(0)
            self._refuse_non_finite(peak)
            self.tokens += x.shape[0]
            self._value = peak if self._value is None else torch.maximum(self._value, peak)


class EveryNth:
    """Every n-th token itself, [tokens / n, features]: a sample spread over the whole text."""

    def __init__(self, name: str, n: int) -> None:
        self.name = name
        self.tokens = 0
        self._n = n
        self._rows: list[Tensor] = []

    def update(self, x: Tensor) -> None:
        """Take activations [tokens, features]."""
        # Clone: a view would keep the whole batch alive.
        self._rows.append(x[-self.tokens % self._n :: self._n].detach().float().clone())
        self.tokens += x.shape[0]

    def result(self) -> Tensor:
        """The sampled rows; empty if there were none."""
        return torch.cat(self._rows)


class MinMax(_Statistic):
    """Smallest and largest value per feature, [2, features]."""

    def update(self, x: Tensor) -> None:
        """Take activations [tokens, features]."""
        x = x.detach().float()
        if x.shape[0]:
            low, high = x.amin(0), x.amax(0)
            self._refuse_non_finite(low + high)
            self.tokens += x.shape[0]
            if self._value is not None:
                low = torch.minimum(low, self._value[0])
                high = torch.maximum(high, self._value[1])
            self._value = torch.stack((low, high))
