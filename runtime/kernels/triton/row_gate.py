"""Kernels without a matrix product, for the gate: what works row by row, and what sorts.

Memory bounds them, so nothing is counted; they must compile everywhere, use no stack, and fit in
shared memory. Shapes are those of a decoder of 8B, and of a mixture of 128 experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import triton

from qtool.formats.scheme import BLOCK_SIZE, ActivationScheme
from qtool.runtime.kernels.triton import (
    attention_plan,
    dequantize,
    gated,
    norm,
    round_input,
    routing,
)
from qtool.runtime.kernels.triton.aot import Compiled, compile_kernel, pointer
from qtool.runtime.kernels.triton.config import GemmShape
from qtool.runtime.kernels.triton.target import Target

HIDDEN, WIDTH, HEAD, HEADS, KV_HEADS = 4096, 14336, 128, 32, 8
EXPERTS, TOP_K = 128, 8
FLOAT, HALF = torch.float32, torch.bfloat16
INT8 = ActivationScheme("int", "token")
FP8_BLOCKS = ActivationScheme("float", "group")


@dataclass(frozen=True, slots=True)
class RowCase:
    """A kernel by name.

    Attributes:
        arguments: Triton's types; pointers that are missing are ``None``.
        constants: compile-time parameters.
        num_warps, num_stages: as Triton means them.
    """

    name: str
    kernel: Any
    arguments: Mapping[str, str]
    constants: Mapping[str, Any]
    num_warps: int = 4
    num_stages: int = 3


def compile_row(case: RowCase, target: Target) -> Compiled:
    """Machine code of a kernel."""
    return compile_kernel(case.kernel, case.arguments, case.constants, target, case)


def row_cases(shapes: Mapping[str, GemmShape]) -> Iterator[RowCase]:
    """All of them.

    Args:
        shapes: weights to dequantize, by name.
    """
    yield from _norms()
    yield from _others()
    yield from _routing()
    yield _splits()
    for name, shape in shapes.items():
        yield _dequantize(name, shape)


def _norms() -> Iterator[RowCase]:
    plain = {"x_ptr": HALF, "stream_ptr": FLOAT, "weight_ptr": FLOAT, "out_ptr": HALF}
    codes = plain | {"out_ptr": torch.int8, "scales_ptr": FLOAT}
    yield _norm("norm", plain, norm.norm_constants(HIDDEN))
    yield _norm("norm, INT8", codes, norm.norm_constants(HIDDEN, HIDDEN, INT8, dtype=HALF))
    yield _norm(
        "norm, FP8 blocks",
        codes | {"out_ptr": torch.uint8},
        norm.norm_constants(HIDDEN, HIDDEN, FP8_BLOCKS, dtype=HALF),
    )
    yield _norm(
        "norm, FP8 as float16",
        codes | {"out_ptr": torch.float16},
        norm.norm_constants(HIDDEN, HIDDEN, FP8_BLOCKS, as_values=True, dtype=HALF),
    )
    yield _norm("norm on both sides", plain | {"x_weight_ptr": FLOAT}, norm.norm_constants(HIDDEN))
    heads = {f"{x}{part}": HALF for x in "qk" for part in ("_ptr", "_out_ptr")}
    weights = {"q_weight_ptr": FLOAT, "k_weight_ptr": FLOAT}
    yield RowCase(
        "norms of heads",
        norm.norm_heads_kernel,
        _pointers(heads | weights) | {"q_stride": "i32", "k_stride": "i32", "eps": "fp32"},
        {"H": HEADS, "KV": KV_HEADS, "D": HEAD, "BLOCK": HEAD},
        num_warps=1,
    )


def _norm(name: str, pointers: Mapping[str, torch.dtype], constants: Mapping[str, Any]) -> RowCase:
    arguments = _pointers(pointers) | {"eps": "fp32"}
    warps = round_input.warps_for(constants["BLOCK"])
    return RowCase(name, norm.rms_norm_kernel, arguments, constants, warps)


def _others() -> Iterator[RowCase]:
    for name, scheme, stored in (
        ("INT8", INT8, torch.int8),
        ("FP8 blocks", FP8_BLOCKS, torch.uint8),
    ):
        span = BLOCK_SIZE if scheme.strategy == "group" else WIDTH
        block = triton.next_power_of_2(span)
        yield RowCase(
            f"rounding, {name}",
            round_input.round_input_kernel,
            _pointers({"x_ptr": HALF, "codes_ptr": stored, "scales_ptr": FLOAT}) | {"K": "i32"},
            {
                "PADDED": WIDTH,
                "SPAN": span,
                "BLOCK": block,
                "STEPS": scheme.steps,
                "IS_FLOAT": scheme.type == "float",
                "AS_VALUES": False,
            },
            round_input.warps_for(block),
        )
    for gelu in (False, True):
        yield RowCase(
            "gelu and multiply" if gelu else "silu and multiply",
            gated.gated_kernel,
            _pointers({"gate_up_ptr": HALF, "out_ptr": HALF}) | {"K": "i32"},
            {"GELU": gelu, "SIZE": gated.BLOCK},
        )


def _routing() -> Iterator[RowCase]:
    tables = {"chosen_ptr": torch.int64, "order_ptr": torch.int32, "blocks_ptr": torch.int32}
    yield RowCase(
        "experts, sorted",
        routing.route_kernel,
        _pointers(tables) | {"S": "i32", "num_blocks": "i32"},
        routing.route_constants(EXPERTS, 16),
    )
    yield RowCase(
        "experts, added",
        routing.combine_kernel,
        _pointers({"parts_ptr": FLOAT, "out_ptr": FLOAT}) | {"K": "i32"},
        {"TOP_K": TOP_K, "SIZE": routing.WIDTH},
    )


def _splits() -> RowCase:
    tables = {"tiles_ptr": torch.int32, "splits_ptr": torch.int32, "work_ptr": torch.int32}
    numbers = dict.fromkeys(("num_tiles", "num_items", "budget", "least"), "i32")
    constants = {"FIXED": False, "WINDOW": 4096, "PAGE": 64, "BLOCK": attention_plan.BLOCK}
    kernel = attention_plan.plan_splits_kernel
    return RowCase("attention, contexts split", kernel, _pointers(tables) | numbers, constants)


def _dequantize(name: str, shape: GemmShape) -> RowCase:
    pointers = {"words_ptr": torch.int16, "scales_ptr": torch.int32, "out_ptr": HALF}
    return RowCase(
        f"dequantize, {name}",
        dequantize.dequantize_kernel,
        _pointers(pointers) | {"N": "i32", "K": "i32"},
        dequantize.constants(shape),
    )


def _pointers(dtypes: Mapping[str, torch.dtype]) -> dict[str, str]:
    return {name: pointer(dtype) for name, dtype in dtypes.items()}
