"""The CPU back end on native code: quantized weights stay packed, at any group size and width.

What no native kernel takes runs on torch, as in :mod:`.torch_ops`: plain weights under int8
computation (they would have to be quantized), odd group sizes, float16.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from qtool.formats.tensor import QuantizedTensor
from qtool.runtime.kernels.backend import LinearOp
from qtool.runtime.kernels.cpu.build import Native
from qtool.runtime.kernels.cpu.memory import Arena
from qtool.runtime.kernels.cpu.native_ops import (
    COMPUTE,
    Compute,
    NativeLinear,
    eight_bits,
    unsupported,
)
from qtool.runtime.kernels.cpu.torch_ops import CpuBackend


def resolve_compute(asked: str, dtype: torch.dtype, quantized: bool) -> Compute:
    """``auto`` is int8 where weights are quantized and the user did not ask for a wide dtype."""
    if asked in COMPUTE:
        return asked
    return "int8" if quantized and dtype == torch.bfloat16 else "fp32"


class NativeBackend(CpuBackend):
    """Native linears, torch for the rest.

    Args:
        native: a loaded library.
        compute: what products are computed in.
    """

    name = "cpu (native)"
    attention_kernel = "native, paged, inside the step"
    norm_kernel = "native, inside the step"

    def __init__(
        self, device: torch.device, dtype: torch.dtype, native: Native, compute: Compute
    ) -> None:
        super().__init__(device, dtype)
        self.native, self.compute = native, compute
        # The loader asks for operations in the order in which a step runs them.
        self._arena = Arena()

    @property
    def library(self) -> ctypes.CDLL:
        """The native functions."""
        assert self.native.library is not None
        return self.native.library

    def linear(self, weight: Tensor | QuantizedTensor, bias: Tensor | None) -> LinearOp:
        if isinstance(weight, QuantizedTensor):
            if unsupported(weight) is not None:
                return super().linear(weight, bias)
            return self._packed(weight, bias, self.compute)
        if self.compute == "int8":
            return super().linear(weight, bias)
        return self._packed(_dense(weight, self.compute), bias, self.compute)

    def router(self, weight: Tensor) -> LinearOp:
        return CpuBackend(self.device, torch.float32).linear(weight, None)

    def head(self, weight: Tensor | QuantizedTensor) -> LinearOp:
        """A plain head is rounded to 8 bits where activations are, and exact otherwise."""
        if isinstance(weight, QuantizedTensor):
            if unsupported(weight) is not None:
                return CpuBackend(self.device, torch.float32).linear(weight, None)
            return self._packed(weight, None, self.compute)
        if self.compute == "int8":
            return self._packed(eight_bits(weight), None, "int8")
        return self._packed(_dense(weight, "fp32"), None, "fp32")

    def _packed(
        self, weight: QuantizedTensor | Tensor, bias: Tensor | None, compute: Compute
    ) -> NativeLinear:
        return NativeLinear(self.native, weight, bias, compute, self._arena.take)


def _dense(weight: Tensor, compute: Compute) -> Tensor:
    """bfloat16 stays: exact in both, and half the bytes to read."""
    keep = compute == "bf16" or weight.dtype == torch.bfloat16
    return weight.to(torch.bfloat16 if keep else torch.float32)
