"""The CPU back end on native code: quantized weights stay packed, at any group size and width.

What no native kernel takes runs on torch: plain weights under int8 computation (they would have to
be quantized), odd group sizes, float16. That is :mod:`.torch_ops`, or the reference's row tiles
where results may not depend on the batch; native linears never do.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch
from torch import Tensor

from qtool.formats.tensor import QuantizedTensor
from qtool.runtime.kernels.backend import AttentionLayout, AttentionScope, Backend, LinearOp
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


class NativeBackend(Backend):
    """Native linears, torch for the rest.

    Args:
        native: a loaded library.
        compute: what products are computed in.
        plain: what runs the rest.
    """

    name = "cpu (native)"
    attention_kernel = "native, paged, inside the step"
    norm_kernel = "native, inside the step"

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        native: Native,
        compute: Compute,
        plain: Callable[[torch.device, torch.dtype], Backend] = CpuBackend,
    ) -> None:
        super().__init__(device, dtype)
        self.native, self.compute = native, compute
        self.plain = plain(device, dtype)
        # The loader asks for operations in the order in which a step runs them.
        self._arena = Arena()

    @property
    def library(self) -> ctypes.CDLL:
        """The native functions."""
        assert self.native.library is not None
        return self.native.library

    def linear(self, weight: Tensor | QuantizedTensor, bias: Tensor | None) -> LinearOp:
        if isinstance(weight, QuantizedTensor):
            if (obstacle := unsupported(weight)) is not None:
                return self._on_torch(self.plain.linear(weight, bias), obstacle)
            return self._packed(weight, bias, self.compute)
        if self.compute == "int8":
            obstacle = "it is not quantized, and int8 products would round it"
            return self._on_torch(self.plain.linear(weight, bias), obstacle)
        return self._packed(_dense(weight, self.compute), bias, self.compute)

    def router(self, weight: Tensor) -> LinearOp:
        return self.plain.router(weight)

    def head(self, weight: Tensor | QuantizedTensor) -> LinearOp:
        """A plain head is rounded to 8 bits where activations are, and exact otherwise."""
        if isinstance(weight, QuantizedTensor):
            if (obstacle := unsupported(weight)) is not None:
                return self._on_torch(self.plain.head(weight), obstacle)
            return self._packed(weight, None, self.compute)
        if self.compute == "int8":
            return self._packed(eight_bits(weight), None, "int8")
        return self._packed(_dense(weight, "fp32"), None, "fp32")

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self.plain.rms_norm(x, weight, eps)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return self.plain.silu_mul(gate_up)

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        return self.plain.gelu_mul(gate_up)

    def attention(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        layout: AttentionLayout,
        scope: AttentionScope,
    ) -> Tensor:
        return self.plain.attention(q, keys, values, layout, scope)

    def _on_torch(self, linear: LinearOp, obstacle: str) -> LinearOp:
        linear.obstacle = obstacle
        return linear

    def _packed(
        self, weight: QuantizedTensor | Tensor, bias: Tensor | None, compute: Compute
    ) -> NativeLinear:
        return NativeLinear(self.native, weight, bias, compute, self._arena.take)


def _dense(weight: Tensor, compute: Compute) -> Tensor:
    """bfloat16 stays: exact in both, and half the bytes to read."""
    keep = compute == "bf16" or weight.dtype == torch.bfloat16
    return weight.to(torch.bfloat16 if keep else torch.float32)
