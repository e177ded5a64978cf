"""Linear layers over packed weights: which kernel, which tiles, what memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from qtool.formats.scheme import BLOCK_SIZE, ActivationScheme
from qtool.formats.tensor import QuantizedTensor
from qtool.runtime.kernels.backend import LinearOp, RoundedRows, Rows, Stream
from qtool.runtime.kernels.triton.byte_gemm import byte_gemm
from qtool.runtime.kernels.triton.config import (
    BUCKETS,
    LONG_PROMPT,
    GemmShape,
    Tiles,
    TileTable,
    bucket_of,
    select_config,
    shape_of,
)
from qtool.runtime.kernels.triton.dequantize import dequantize
from qtool.runtime.kernels.triton.gated import gated_rows
from qtool.runtime.kernels.triton.launch import Workspace, result_like
from qtool.runtime.kernels.triton.layout import (
    GATE_ROWS,
    Codes,
    PackedWeight,
    gate_up_order,
    pack,
)
from qtool.runtime.kernels.triton.norm import rms_norm_rounded
from qtool.runtime.kernels.triton.round_input import MAX_GATED, Gate, round_input
from qtool.runtime.kernels.triton.routing import Routed
from qtool.runtime.kernels.triton.target import Target
from qtool.runtime.kernels.triton.weight_gemm import weight_gemm


@dataclass(frozen=True, slots=True)
class Place:
    """Where linears run: the GPU, its tuned tiles, and the memory they share."""

    target: Target
    workspace: Workspace
    table: TileTable | None = None


class PackedLinear(LinearOp):
    """``x @ weight.T + bias`` for a packed weight; its configurations are chosen at load."""

    def __init__(
        self, weight: PackedWeight, bias: Tensor | None, dtype: torch.dtype, place: Place
    ) -> None:
        self.weight, self.dtype = weight, dtype
        self.gates = weight.gate_up
        if bias is not None and self.gates:
            bias = bias[gate_up_order(len(bias)).to(bias.device)]
        self._bias, self._place = bias, place
        self.num_bytes = weight.num_bytes + (0 if bias is None else bias.nbytes)
        self.kernel = f"triton {weight.codes.value} x {str(dtype).removeprefix('torch.')}"
        shape = self.shape
        self.configs: dict[int, Tiles | None] = {
            bucket: select_config(place.target, shape, bucket, place.table)
            for bucket in (*BUCKETS, LONG_PROMPT)
        }
        for bucket, tiles in self.configs.items():
            self.choose(bucket, tiles)

    @property
    def shape(self) -> GemmShape:
        """What decides about its tiles."""
        return shape_of(self.weight)

    def choose(self, bucket: int, tiles: Tiles | None) -> None:
        """Take these tiles for a bucket, and make room for them; not while serving."""
        self.configs[bucket] = tiles
        if tiles is not None and bucket != LONG_PROMPT:
            self._place.workspace.reserve(self.weight.padded[0], bucket, tiles)

    def __call__(self, x: Tensor) -> Tensor:
        tiles = self.configs[bucket_of(x.shape[0])]
        if tiles is None:
            dense = dequantize(self.weight, x.dtype)
            bias = None if self._bias is None else self._bias.to(x.dtype)
            return self._gated(functional.linear(x, dense, bias))
        out = result_like(x, self._width, x.dtype)
        self.multiply(x, out, tiles)
        return out.to(x.dtype)

    @property
    def _width(self) -> int:
        """Columns of a result."""
        return self.weight.shape[0] // 2 if self.gates else self.weight.shape[0]

    def _gated(self, out: Tensor) -> Tensor:
        """What the vendor's GEMM gave, gated if it is a gate and its up projection."""
        if not self.gates:
            return out
        gate, up = out.unflatten(1, (-1, 2, GATE_ROWS)).float().unbind(2)
        gated: Tensor = functional.silu(gate) * up
        return gated.flatten(1).to(out.dtype)

    def gated(self, gate_up: Tensor, *, gelu: bool) -> Rows:
        """A gate and its up projection [M, 2 * K], gated for this linear."""
        return gated_rows(gate_up, gelu=gelu)

    def multiply(self, x: Rows, out: Tensor, tiles: Tiles, routed: Routed | None = None) -> None:
        """``out = x @ weight.T + bias`` in these tiles; if routed, of all experts' weights."""
        assert isinstance(x, Tensor), "rounded for another linear"
        padding = self.weight.padded[1] - x.shape[1]
        x = functional.pad(x, (0, padding)) if padding else x.contiguous()
        weight_gemm(
            x,
            self.weight,
            out,
            tiles,
            self._place.workspace,
            bias=self._bias,
            routed=routed,
            asm=self._place.target.is_nvidia,
        )

    def why_alone(self) -> str | None:
        """What keeps it from running with other experts' linears at once, or ``None``."""
        return None if self._bias is None else "it has a bias"

    def warm_up(self) -> None:
        """Compile every configuration of its product."""
        for tokens in self.warm_up_tokens():
            self.idle_call(tokens)()

    def idle_call(self, tokens: int) -> Callable[[], object]:
        """A product of so many rows of zeros, for warm-up and timing."""
        x = torch.zeros(
            tokens, self.weight.shape[1], dtype=self.dtype, device=self.weight.words.device
        )
        return lambda: self(x)

    def warm_up_tokens(self) -> Iterator[int]:
        """One number of tokens for each different configuration."""
        seen: set[Tiles | None] = set()
        for bucket, tiles in self.configs.items():
            if tiles not in seen:
                seen.add(tiles)
                yield bucket


class RoundedLinear(PackedLinear):
    """The same with the input rounded to 8 bits: W8A8 and FP8.

    Where the GPU multiplies the codes, they are multiplied. FP8 below sm_89 multiplies their
    values in float16, which holds e4m3 exactly, and scales tokens afterwards: the same result.
    """

    def __init__(
        self,
        weight: QuantizedTensor,
        bias: Tensor | None,
        dtype: torch.dtype,
        place: Place,
        *,
        gate_up: bool = False,
    ) -> None:
        assert weight.scheme.activations is not None
        as_bytes = multiplies_codes(weight, place.target)
        super().__init__(pack(weight, as_bytes=as_bytes, gate_up=gate_up), bias, dtype, place)
        self._scheme: ActivationScheme = weight.scheme.activations
        self._static = None if weight.input_scale is None else weight.input_scale.float()
        kind = "INT8" if self._scheme.type == "int" else "FP8"
        way = "static" if self._static is not None else f"per {self._scheme.strategy}"
        self.kernel = f"triton {kind} x {kind}, inputs {way}"

    @property
    def shape(self) -> GemmShape:
        in_16_bits = self.weight.codes is Codes.FP8
        return replace(super().shape, token_steps=in_16_bits and self.weight.grouped)

    def __call__(self, x: Tensor) -> Tensor:
        return self.read(self._rounded(x.contiguous()))

    def read(self, rows: Rows) -> Tensor:
        if isinstance(rows, Tensor):
            return self(rows)
        tiles = self.configs[bucket_of(rows.codes.shape[0])]
        if tiles is None:
            return self._multiply_dense(rows)
        out = result_like(rows.codes, self._width, self.dtype)
        self.multiply_rounded(rows, out, tiles)
        return out.to(self.dtype)

    def _multiply_dense(self, x: RoundedRows) -> Tensor:
        dense = dequantize(self.weight, x.codes.dtype)
        out = functional.linear(x.codes[:, : self.weight.shape[1]], dense).float()
        out *= x.scales[:, None]
        return self._gated(out if self._bias is None else out + self._bias).to(self.dtype)

    def norm(self, stream: Stream, weight: Tensor, eps: float) -> RoundedRows:
        """A stream's update added in place, the sum normed, and rounded for this linear."""
        x, rows = added_to(stream)
        return rms_norm_rounded(
            x,
            weight,
            eps,
            self._scheme,
            self.weight.padded[1],
            stream=rows,
            x_weight=stream.update_norm,
            static=self._static,
            as_values=self._as_values,
            dtype=self.dtype,
        )

    @property
    def _as_values(self) -> torch.dtype | None:
        """What e4m3 is multiplied in where the GPU does not know it."""
        return torch.float16 if self.weight.codes is Codes.FP8 else None

    def _rounded(self, x: Tensor, gate: Gate | None = None) -> RoundedRows:
        return round_input(
            x,
            self._scheme,
            self.weight.padded[1],
            static=self._static,
            as_values=self._as_values,
            gate=gate,
        )

    def gated(self, gate_up: Tensor, *, gelu: bool) -> Rows:
        """Gated and rounded in one launch, where that is a program a row at most."""
        if self._scheme.strategy != "group" and self.weight.padded[1] > MAX_GATED:
            return gated_rows(gate_up, gelu=gelu)
        return self._rounded(gate_up.contiguous(), gate="gelu" if gelu else "silu")

    def idle_call(self, tokens: int) -> Callable[[], object]:
        columns, words = self.weight.padded[1], self.weight.words
        dtype = self._as_values or words.dtype
        codes = torch.zeros(tokens, columns, device=words.device).to(dtype)
        scales = (columns // BLOCK_SIZE, tokens) if self.weight.grouped else (tokens,)
        rows = RoundedRows(codes, torch.ones(scales, device=words.device))
        return lambda: self.read(rows)

    def multiply(self, x: Rows, out: Tensor, tiles: Tiles, routed: Routed | None = None) -> None:
        rows = self._rounded(x.contiguous()) if isinstance(x, Tensor) else x
        self.multiply_rounded(rows, out, tiles, routed)

    def why_alone(self) -> str | None:
        return super().why_alone() or (None if self._static is None else "its input has a scale")

    def multiply_rounded(
        self, x: RoundedRows, out: Tensor, tiles: Tiles, routed: Routed | None = None
    ) -> None:
        """``out = x @ weight.T + bias`` in these tiles, x rounded already."""
        target, workspace = self._place.target, self._place.workspace
        if self.weight.codes is Codes.FP8:
            weight_gemm(
                x.codes,
                self.weight,
                out,
                tiles,
                workspace,
                bias=self._bias,
                token_scales=x.scales,
                routed=routed,
                asm=target.is_nvidia,
            )
        else:
            old = target.is_nvidia and target.capability < 90
            byte_gemm(
                x.codes,
                x.scales,
                self.weight,
                out,
                tiles,
                workspace,
                bias=self._bias,
                routed=routed,
                asm=old,
            )


def multiplies_codes(weight: QuantizedTensor, target: Target) -> bool:
    """Whether a GPU multiplies 8-bit codes of this type; all here multiply integers."""
    return weight.scheme.type == "int" or target.has_fp8


def added_to(stream: Stream) -> tuple[Tensor, Tensor | None]:
    """(x, rows) as the kernels' norms take a stream: x is added to rows, where there are any."""
    if stream.update is None:
        return stream.rows, None
    return stream.update.contiguous(), stream.rows
