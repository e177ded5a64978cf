"""Linear layers on native code: packed once, activations quantized as they come, or exact.

What computes (:data:`COMPUTE`):

``int8``
    Activations are rounded to 8 bits with a scale for each token and group; products are integers.
    About 1% of noise in each layer's output.
``bf16``, ``fp32``
    Activations keep their 16 or 32 bits; weights are dequantized in registers.

A row's result has the same bits in any company, whatever the level and the number of threads.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from qtool.formats import affine
from qtool.formats.scheme import weight_scheme
from qtool.formats.tensor import QuantizedTensor
from qtool.runtime.kernels.backend import LinearOp
from qtool.runtime.kernels.cpu.build import Native
from qtool.runtime.kernels.reference import tensor_bytes

Compute = Literal["int8", "bf16", "fp32"]
COMPUTE: tuple[Compute, ...] = ("int8", "bf16", "fp32")

# Group sizes are multiples of this; the kernels read 8 neighbours at a time.
GROUP_MULTIPLE = 8
# Largest group of the kernels; a wider one of the checkpoint is cut, its scales repeated.
MAX_GROUP = 128
# Activations of a weight with one scale a row share a scale in runs of this many.
ROW_GROUP = 64
# Columns of a packed block, BLOCK_COLUMNS of native/gemm.h.
BLOCK = 32
ALIGNMENT = 64

_SCALE_TYPES = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2}
_VALUE_TYPES = {torch.float32: 0, torch.bfloat16: 1}


class LinearStruct(ctypes.Structure):
    """``struct Linear`` of native/gemm.h."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("block_bytes", ctypes.c_int64),
        ("n", ctypes.c_int32),
        ("k", ctypes.c_int32),
        ("padded_k", ctypes.c_int32),
        ("group", ctypes.c_int32),
        ("bits", ctypes.c_int32),
        ("compute", ctypes.c_int32),
        ("scale_type", ctypes.c_int32),
        ("scale_groups", ctypes.c_int32),
        ("asymmetric", ctypes.c_int32),
        ("steps_offset", ctypes.c_int32),
    )


def unsupported(weight: QuantizedTensor) -> str | None:
    """Why no native kernel takes a weight, or ``None``."""
    if weight.scheme.type == "float" or weight.scheme.activations is not None:
        return f"{weight.scheme.describe()} runs on torch"
    if weight.scheme.bits == 8 and not weight.scheme.symmetric:
        return "8-bit codes less their zero do not fit 8 bits"
    width = weight.scheme.block_shape(weight.shape)[1]
    if weight.scheme.strategy == "group" and kernel_group(width) is None:
        return f"groups of {width} are no multiple of {GROUP_MULTIPLE}"
    return None


def kernel_group(width: int) -> int | None:
    """The widest group a kernel takes that divides ``width``; ``None`` without one."""
    fitting = range(MAX_GROUP, GROUP_MULTIPLE - 1, -GROUP_MULTIPLE)
    return next((group for group in fitting if width % group == 0), None)


def eight_bits(weight: Tensor) -> QuantizedTensor:
    """A dense weight, such as a head, rounded to 8 bits: symmetric, in groups of 64.

    Where 64 does not divide the row, a scale a row. On SmolLM2-135M's embedding the error is 0.7%
    in groups and 1.2% in rows; groups are 3% larger.
    """
    width = ROW_GROUP if weight.shape[1] % ROW_GROUP == 0 else None
    scheme = weight_scheme(8, True, width)
    scales, zeros = affine.choose_grid(weight, scheme, torch.float16)
    codes = affine.quantize(weight, scales, zeros, scheme)
    return QuantizedTensor(codes, scales, zeros, scheme)


class NativeLinear(LinearOp):
    """``x @ weight.T + bias``, the weight packed for the kernels.

    Args:
        native: a loaded library.
        weight: quantized as :func:`unsupported` allows, or dense: bfloat16 for ``bf16`` and
            ``fp32`` computation, float32 for ``fp32``.
        bias: [out_features] or ``None``.
        compute: one of :data:`COMPUTE`.
        take: gives memory for the packed weight, uint8 of the size asked for at a cache line.

    Attributes:
        handle: address of ``struct Linear``, valid as long as this object lives.
    """

    def __init__(
        self,
        native: Native,
        weight: QuantizedTensor | Tensor,
        bias: Tensor | None,
        compute: Compute = "int8",
        take: Callable[[int], Tensor] | None = None,
    ) -> None:
        assert native.library is not None, native.reason
        self._library = native.library
        self._struct = LinearStruct(
            n=weight.shape[0], k=weight.shape[1], compute=COMPUTE.index(compute)
        )
        self.handle = ctypes.addressof(self._struct)
        codes, scales, zeros = self._describe(weight)
        size = native_size(native.library, self._struct)
        if not size:
            raise ValueError(f"no native kernel computes {weight.shape} in {compute}")
        self._packed = (take or _aligned)(size)
        self._struct.data = self._packed.data_ptr()
        self._library.qt_linear_pack(
            ctypes.c_void_p(self.handle),
            _address(codes),
            _address(scales),
            _address(zeros),
            ctypes.c_void_p(self._packed.data_ptr()),
        )
        self._interleaved = False
        self._bias = None if bias is None else _padded(bias)
        self._struct.bias = None if self._bias is None else self._bias.data_ptr()
        self.num_bytes = tensor_bytes(self._packed, self._bias)
        self.kernel = f"native {compute} ({native.level})"

    def _describe(
        self, weight: QuantizedTensor | Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Fill in the struct's form of the weight; codes, scales and zeros to pack."""
        struct = self._struct
        struct.scale_groups = 1
        if isinstance(weight, Tensor):
            struct.bits, struct.group = 8 * weight.element_size(), ROW_GROUP
            return weight.contiguous(), None, None
        scheme = weight.scheme
        width = scheme.block_shape(weight.shape)[1]
        struct.bits, struct.asymmetric = scheme.bits, not scheme.symmetric
        scales, zeros = weight.scales, weight.zeros
        if scheme.strategy == "group":
            struct.group = kernel_group(width)
            scales = scales.repeat_interleave(width // struct.group, dim=1)
            zeros = zeros.repeat_interleave(width // struct.group, dim=1)
            struct.scale_groups = scales.shape[1]
        else:
            struct.group = ROW_GROUP
            scales, zeros = scales.expand(struct.n, 1), zeros.expand(struct.n, 1)
        struct.scale_type = _SCALE_TYPES[scales.dtype]
        return weight.codes.contiguous(), scales.contiguous(), zeros.contiguous()

    def interleave_halves(self) -> None:
        """Let a block of :data:`BLOCK` columns of the first half of out_features, a multiple of it,
        be followed by its counterpart of the second half. Results keep their order.
        """
        assert self._struct.n % (2 * BLOCK) == 0 and not self._interleaved
        self._packed.copy_(_interleaved(self._packed, self._struct.block_bytes))
        if self._bias is not None:
            self._bias = _interleaved(self._bias, BLOCK)
            self._struct.bias = self._bias.data_ptr()
        self._interleaved = True

    def __call__(self, x: Tensor) -> Tensor:
        if x.dtype not in _VALUE_TYPES:
            return self(x.float()).to(x.dtype)
        x = x if x.stride(1) == 1 else x.contiguous()
        rows = x.shape[0]
        out = torch.empty(rows, self._struct.n, dtype=x.dtype)
        handle = ctypes.c_void_p(self.handle)
        workspace = _aligned(self._library.qt_linear_workspace(handle, ctypes.c_int64(rows)))
        dtype = ctypes.c_int32(_VALUE_TYPES[x.dtype])
        self._library.qt_linear_run(
            handle,
            ctypes.c_void_p(x.data_ptr()),
            dtype,
            ctypes.c_int64(x.stride(0)),
            ctypes.c_void_p(out.data_ptr()),
            dtype,
            ctypes.c_int64(out.stride(0)),
            ctypes.c_int64(rows),
            ctypes.c_void_p(workspace.data_ptr()),
        )
        return out.view(rows, -1, 2, BLOCK).transpose(1, 2).flatten(1) if self._interleaved else out


def native_size(library: ctypes.CDLL, struct: LinearStruct) -> int:
    """Bytes of the packed weight; fills in the struct's layout. 0: there is no kernel for it."""
    library.qt_linear_layout.restype = ctypes.c_int64
    library.qt_linear_workspace.restype = ctypes.c_int64
    return int(library.qt_linear_layout(ctypes.byref(struct)))


def _aligned(size: int) -> Tensor:
    """Uninitialized bytes that start at a cache line."""
    memory = torch.empty(size + ALIGNMENT, dtype=torch.uint8)
    return memory[-memory.data_ptr() % ALIGNMENT :][:size]


def _padded(bias: Tensor) -> Tensor:
    """Float32 with zeros up to whole blocks of 32 columns."""
    return torch.nn.functional.pad(bias.float(), (0, -bias.shape[0] % BLOCK)).contiguous()


def _interleaved(x: Tensor, width: int) -> Tensor:
    """Runs of ``width`` items of the first half of ``x`` and of the second in turn."""
    return x.view(2, -1, width).transpose(0, 1).flatten()


def _address(tensor: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())
