"""The GPU back end: Triton for quantized linears, norms, gates, and attention over its own pages.

Plain weights are multiplied by the vendor's GEMM. What has no packed form (odd groups, scales of
more than 20 bits, float32) is held dense, and says so in its kernel's name.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from qtool.formats.tensor import QuantizedTensor
from qtool.runtime.kernels.backend import ExpertsOp, FusedCache, LinearOp, PageForm, Rows, Stream
from qtool.runtime.kernels.cpu.torch_ops import DenseLinear
from qtool.runtime.kernels.reference import (
    ReferenceBackend,
    RoundedInputLinear,
    dense_weight,
    rounds_input,
)
from qtool.runtime.kernels.triton.attention_config import why_not_attention
from qtool.runtime.kernels.triton.config import TileTable
from qtool.runtime.kernels.triton.experts import PackedExperts, why_apart
from qtool.runtime.kernels.triton.gated import gated
from qtool.runtime.kernels.triton.kv_pages import FEW_ROWS, PlanCache, TritonPages
from qtool.runtime.kernels.triton.launch import Workspace, is_interpreted
from qtool.runtime.kernels.triton.layout import GATE_ROWS, pack, why_not_packable
from qtool.runtime.kernels.triton.linear import (
    PackedLinear,
    Place,
    RoundedLinear,
    added_to,
    result_like,
)
from qtool.runtime.kernels.triton.norm import norm_heads, rms_norm
from qtool.runtime.kernels.triton.target import Target
from qtool.runtime.kernels.triton.tuning import TunedFor, minor_version


def tuned_for(device: torch.device) -> TunedFor:
    """What tiles measured on a device hold for."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return TunedFor(name, minor_version(triton.__version__))


class TritonBackend(ReferenceBackend):
    """See the module's text.

    Args:
        target: the GPU.
        table: tiles that ``qtool tune`` found, or ``None``.
    """

    name = "triton"
    norm_kernel = "triton"
    fused_kernel = "triton paged"
    block_size = 64

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        target: Target,
        table: TileTable | None = None,
    ) -> None:
        super().__init__(device, dtype)
        self.target, self._place = target, Place(target, Workspace.on(device), table)
        self._packed: list[PackedLinear] = []
        self._experts: list[PackedExperts] = []
        self._plans = PlanCache(target)

    def linear(self, weight: Tensor | QuantizedTensor, bias: Tensor | None) -> LinearOp:
        bias = None if bias is None else bias.to(self.device)
        if isinstance(weight, QuantizedTensor):
            return self._quantized(weight.to(self.device), bias)
        dense = weight.to(self.device, self.dtype).contiguous()
        return DenseLinear(dense, None if bias is None else bias.to(self.dtype))

    def gate_up(
        self, weight: Tensor | QuantizedTensor, bias: Tensor | None, activation: str
    ) -> LinearOp:
        """SiLU and the product are part of the GEMM's end, for packed weights in turns of eight.

        Not for FP8 in blocks: their kernel has one scale for all rows of a tile.
        """
        if (
            isinstance(weight, QuantizedTensor)
            and activation == "silu"
            and weight.scheme.strategy != "block"
            and weight.shape[0] % (2 * GATE_ROWS) == 0
        ):
            bias = None if bias is None else bias.to(self.device)
            return self._quantized(weight.to(self.device), bias, gate_up=True)
        return self.linear(weight, bias)

    def _quantized(
        self, weight: QuantizedTensor, bias: Tensor | None, *, gate_up: bool = False
    ) -> LinearOp:
        if reason := self._why_dense(weight):
            return self._held_dense(weight, bias, reason)
        operation: PackedLinear
        if rounds_input(weight):
            operation = RoundedLinear(weight, bias, self.dtype, self._place, gate_up=gate_up)
        else:
            operation = PackedLinear(pack(weight, gate_up=gate_up), bias, self.dtype, self._place)
        self._packed.append(operation)
        return operation

    def experts(
        self,
        gate_up: Sequence[LinearOp],
        down: Sequence[LinearOp],
        activation: str,
        top_k: int,
    ) -> ExpertsOp | None:
        """For packed weights without biases or scales of their own for inputs."""
        up = [op for op in gate_up if isinstance(op, PackedLinear)]
        out = [op for op in down if isinstance(op, PackedLinear)]
        if reason := why_apart(gate_up) or why_apart(down):
            for linear in (*gate_up, *down):  # for the load plan
                linear.obstacle = linear.obstacle or f"one expert after another: {reason}"
            return None
        operation = PackedExperts(up, out, activation, top_k, self._place)
        # They are not called one by one, so they are neither compiled nor tuned so.
        self._packed = [op for op in self._packed if op not in {*up, *out}]
        self._experts.append(operation)
        return operation

    def _why_dense(self, weight: QuantizedTensor) -> str | None:
        """What keeps a weight from the kernels, or ``None``."""
        if self.dtype not in (torch.float16, torch.bfloat16):
            return f"computing in {self.dtype}"
        return why_not_packable(weight)

    def _held_dense(self, weight: QuantizedTensor, bias: Tensor | None, reason: str) -> LinearOp:
        operation: LinearOp
        if rounds_input(weight):
            operation = RoundedInputLinear(weight, bias)
        else:
            bias = None if bias is None else bias.to(self.dtype)
            operation = DenseLinear(dense_weight(weight, self.dtype).contiguous(), bias)
        operation.kernel = f"{operation.kernel}, held dense: {reason}"
        return operation

    def head(self, weight: Tensor | QuantizedTensor) -> LinearOp:
        return self._in_float32(weight)

    def router(self, weight: Tensor) -> LinearOp:
        return self._in_float32(weight)

    def why_not_fused(self, form: PageForm, head_dim: int, block_size: int) -> str | None:
        return why_not_attention(form, head_dim, block_size, self.dtype)

    def fused_cache(
        self,
        form: PageForm,
        shape: tuple[int, int, int, int],
        *,
        tails: Tensor | None = None,
        scales: tuple[Tensor, Tensor] | None = None,
    ) -> FusedCache:
        return TritonPages(
            form, shape, self.dtype, self.device, self.target, self._place.workspace, self._plans,
            tails=tails, scales=scales,
        )  # fmt: skip

    def _in_float32(self, weight: Tensor | QuantizedTensor) -> LinearOp:
        return TritonBackend(self.device, torch.float32, self.target).linear(weight, None)

    @property
    def packed(self) -> tuple[PackedLinear, ...]:
        """The linears that run on its GEMM kernels."""
        return tuple(self._packed)

    @property
    def tuned_for(self) -> TunedFor:
        """What measured tiles hold for here."""
        return tuned_for(self.device)

    def warm_up(self) -> None:
        """Compile every configuration of every packed weight; the interpreter compiles nothing."""
        if is_interpreted():
            return
        for operation in self._packed:
            operation.warm_up()
        for experts in self._experts:
            experts.warm_up()

    @property
    def warm_up_rows(self) -> tuple[int, ...]:
        """A step of one row, and one whose rows are written and attended to in large tiles."""
        return () if is_interpreted() else (1, FEW_ROWS + 1)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out = torch.empty_like(x)
        rms_norm(x.contiguous(), weight, eps, out)
        return out

    def norm_for(
        self, reader: LinearOp | None, stream: Stream, weight: Tensor, eps: float
    ) -> tuple[Tensor, Rows]:
        """One launch: the addition, what comes before it, the norm and, for 8 bits, rounding."""
        if isinstance(reader, RoundedLinear):
            return stream.rows, reader.norm(stream, weight, eps)
        x, rows = added_to(stream)
        out = result_like(x, x.shape[1], self.dtype)
        rms_norm(x, weight, eps, out, rows, stream.update_norm)
        return stream.rows, out.to(self.dtype)

    def norm_heads(
        self, q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        outs = [result_like(x, x.shape[1] * x.shape[2], x.dtype).view(x.shape) for x in (q, k)]
        norm_heads(q, k, q_weight, k_weight, eps, *outs)
        return outs[0].to(q.dtype), outs[1].to(k.dtype)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return self._gated(gate_up, gelu=False)

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        return self._gated(gate_up, gelu=True)

    def _gated(self, gate_up: Tensor, *, gelu: bool) -> Tensor:
        out = result_like(gate_up, gate_up.shape[1] // 2, gate_up.dtype)
        gated(gate_up.contiguous(), out, gelu=gelu)
        return out.to(gate_up.dtype)
