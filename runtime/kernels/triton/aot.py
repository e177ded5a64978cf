"""Kernels compiled for a GPU that is not there.

Triton and its ptxas need no driver to make machine code. What the launcher would otherwise say
about arguments (their types, and that pointers are multiples of 16) is said here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from qtool.errors import UsageError
from qtool.runtime.kernels.triton import byte_gemm, weight_gemm
from qtool.runtime.kernels.triton.config import GemmShape, Tiles
from qtool.runtime.kernels.triton.launch import is_interpreted
from qtool.runtime.kernels.triton.layout import Codes
from qtool.runtime.kernels.triton.target import Target

# Triton's names of dtypes, a pointer's behind a star.
TYPES: Mapping[torch.dtype, str] = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.uint8: "u8",
    torch.int8: "i8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.float8_e4m3fn: "fp8e4nv",
}


class Launch(Protocol):
    """How a kernel is launched, as Triton means it; :class:`.config.Tiles` says so too."""

    @property
    def num_warps(self) -> int: ...
    @property
    def num_stages(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Compiled:
    """A kernel's code.

    Attributes:
        shared: bytes of shared memory a program uses.
        cubin: machine code, on NVIDIA.
        assembly: text, on AMD.
    """

    shared: int
    cubin: bytes | None
    assembly: str | None


def compile_kernel(
    kernel: Any,
    arguments: Mapping[str, str],
    constants: Mapping[str, Any],
    target: Target,
    launch: Launch,
    max_registers: int | None = None,
) -> Compiled:
    """Machine code of one form of a kernel.

    Args:
        arguments: Triton's type of each argument; pointers are taken to be aligned to 16 bytes.
            Those that are missing here and in ``constants`` are ``None``.
        constants: compile-time parameters.
        max_registers: of a thread, on NVIDIA; ``None`` leaves it to ptxas.

    Raises:
        UsageError: the interpreter is on, which compiles nothing.
    """
    if is_interpreted():
        raise UsageError("TRITON_INTERPRET is set: the interpreter compiles nothing; unset it")
    names = list(kernel.arg_names)
    absent = {name: None for name in names if name not in arguments and name not in constants}
    constexprs = {**constants, **absent}
    signature = {name: arguments.get(name, "constexpr") for name in names}
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(names)
        if signature[name].startswith("*") or name == "N"
    }
    gpu = GPUTarget("cuda", target.capability, 32)
    if not target.is_nvidia:
        gpu = GPUTarget("hip", target.arch, 64)
    source = ASTSource(kernel, signature, constexprs, aligned)
    # Fused multiply-adds are Triton's default until 3.10; said here so that counts stay.
    options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages}
    if max_registers is not None:
        options["maxnreg"] = max_registers
    code = triton.compile(source, target=gpu, options=options | {"enable_fp_fusion": True})
    return Compiled(int(code.metadata.shared), code.asm.get("cubin"), code.asm.get("amdgcn"))


def pointer(dtype: torch.dtype) -> str:
    """Triton's type of a tensor's memory."""
    return f"*{TYPES[dtype]}"


def compile_gemm(
    target: Target,
    shape: GemmShape,
    tiles: Tiles,
    dtype: torch.dtype,
    *,
    gated: bool = False,
    experts: bool = False,
) -> Compiled:
    """A GEMM as its wrapper would launch it, without bias or residual.

    Args:
        dtype: of activations, or for 8-bit products of the result.
        gated: whether rows are a gate and its up projection.
        experts: for the rows that each expert of a mixture has.
    """
    pointers = {
        "scales_ptr": torch.int32,
        "out_ptr": dtype,
        "partials_ptr": torch.float32,
        "locks_ptr": torch.int32,
    }
    slots = 8 if gated and experts else 1
    if experts:
        pointers |= {"order_ptr": torch.int32, "blocks_ptr": torch.int32}
    if shape.is_bytes:
        code = torch.int8 if shape.codes is Codes.INT8_BYTES else torch.float8_e4m3fn
        pointers |= {"x_ptr": code, "words_ptr": code, "token_scales_ptr": torch.float32}
        kernel: Any = byte_gemm.byte_gemm_kernel
        asm = target.is_nvidia and target.capability < 90
        constants = byte_gemm.constants(shape, tiles, gated=gated, slots=slots, asm=asm)
    else:
        pointers |= {"x_ptr": dtype, "words_ptr": torch.int16}
        if shape.token_steps:
            pointers["token_scales_ptr"] = torch.float32
        if shape.zeros == "rows":
            pointers["zeros_ptr"] = torch.int32
        kernel = weight_gemm.weight_gemm_kernel
        constants = weight_gemm.constants(
            shape,
            tiles,
            dtype,
            gated=gated,
            token_steps=shape.token_steps,
            slots=slots,
            asm=target.is_nvidia,
        )
    arguments = {name: pointer(kind) for name, kind in pointers.items()}
    arguments |= dict.fromkeys(("M", "N", "steps"), "i32")
    return compile_kernel(kernel, arguments, constants, target, tiles)
