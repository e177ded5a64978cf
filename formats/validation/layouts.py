"""Which tensors a quantized linear consists of, layout by layout: one table, N x K weights.

docs/layouts.md has the bits. A linear of N outputs and K inputs has G groups a row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from qtool.formats.reader import TensorEntry
from qtool.formats.validation.claim import Claim

Shape = tuple[int, ...]
Tensors = Mapping[str, TensorEntry]

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
FLOAT8 = (torch.float8_e4m3fn,)
INT32 = (torch.int32,)
ONE: tuple[Shape, ...] = ((), (1,))

# Any of these beside a weight means that it is quantized.
QUANTIZED_PARTS = frozenset(
    ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx")
    + ("weight_scale_inv", "input_scale", "activation_scale")
    + ("qweight", "qzeros", "scales", "g_idx")
)

# Scales of the cache, under the names of any tool, may hang on a projection.
CACHE_PARTS = frozenset(
    ("k_scale", "v_scale", "q_scale", "output_scale", "k_zero_point", "v_zero_point")
)


@dataclass(frozen=True, slots=True)
class Expected:
    """One tensor of a linear.

    Attributes:
        names: how tools call it; the first is ours.
        dtypes, shapes: any of which it may have.
        needed: whether it must be there.
    """

    names: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    shapes: tuple[Shape, ...]
    needed: bool = True


@dataclass(frozen=True, slots=True)
class Layout:
    """A way to store a linear.

    Attributes:
        main: the tensor that holds the codes, in two dimensions.
        size: N and K from the shape of the main tensor.
        parts: all its tensors, for a claim and N, K.
    """

    main: str
    size: Callable[[Shape, Claim], tuple[int, int]]
    parts: Callable[[Claim, int, int], tuple[Expected, ...]]


def words(count: int, bits: int) -> int:
    """32-bit words that hold ``count`` codes."""
    return -(-count * bits // 32)


def linear_size(tensors: Tensors, claim: Claim) -> tuple[int, int] | None:
    """N and K of a linear, from headers; ``None`` where the codes are missing or no matrix."""
    layout = LAYOUTS.get(claim.layout)
    entry = None if layout is None else tensors.get(layout.main)
    if layout is None or entry is None or len(entry.shape) != 2:
        return None
    return layout.size(entry.shape, claim)


def expected_tensors(claim: Claim, n: int, k: int) -> tuple[Expected, ...]:
    """All tensors of a linear, its bias and what may hang on it included."""
    bias = Expected(("bias",), FLOATS, ((n,),), needed=False)
    return (*LAYOUTS[claim.layout].parts(claim, n, k), bias)


def _packed(claim: Claim, n: int, k: int) -> tuple[Expected, ...]:
    grid = claim.grid_shape((n, k))
    parts = [
        Expected(("weight_packed",), INT32, ((n, words(k, claim.bits)),)),
        Expected(("weight_scale",), FLOATS, (grid,)),
        Expected(("weight_shape",), (torch.int64, torch.int32), ((2,),)),
        Expected(("weight_g_idx",), INT32, ((k,),), needed=False),
    ]
    if not claim.symmetric:
        shape = (words(grid[0], claim.bits), grid[1])
        parts.append(Expected(("weight_zero_point",), INT32, (shape,)))
    return tuple(parts)


def _plain(claim: Claim, n: int, k: int) -> tuple[Expected, ...]:
    codes = FLOAT8 if claim.type == "float" else (torch.int8,)
    grid = claim.grid_shape((n, k))
    scales = ONE if claim.strategy == "tensor" else (grid,)
    return (
        Expected(("weight",), codes, ((n, k),)),
        Expected(("weight_scale",), FLOATS, scales),
        Expected(("weight_zero_point",), (torch.int8,), (*scales, grid), needed=False),
        *_input_scale(claim),
        Expected(("input_zero_point",), (torch.int8,), ONE, needed=False),
    )


def _input_scale(claim: Claim) -> tuple[Expected, ...]:
    names = ("input_scale", "activation_scale")
    return (Expected(names, FLOATS, ONE),) if claim.static_input else ()


def _awq(claim: Claim, n: int, k: int) -> tuple[Expected, ...]:
    groups = claim.grid_shape((n, k))[1]
    halves = (torch.float16, torch.bfloat16)
    return (
        Expected(("qweight",), INT32, ((k, words(n, claim.bits)),)),
        Expected(("qzeros",), INT32, ((groups, words(n, claim.bits)),)),
        Expected(("scales",), halves, ((groups, n),)),
    )


def _gptq(claim: Claim, n: int, k: int) -> tuple[Expected, ...]:
    groups = claim.grid_shape((n, k))[1]
    return (
        Expected(("qweight",), INT32, ((words(k, claim.bits), n),)),
        Expected(("qzeros",), INT32, ((groups, words(n, claim.bits)),)),
        Expected(("scales",), FLOATS, ((groups, n),)),
        Expected(("g_idx",), INT32, ((k,),), needed=False),
    )


def _fp8_block(claim: Claim, n: int, k: int) -> tuple[Expected, ...]:
    scales = (torch.float32, torch.bfloat16)
    return (
        Expected(("weight",), FLOAT8, ((n, k),)),
        Expected(("weight_scale_inv",), scales, (claim.grid_shape((n, k)),)),
    )


def _fp8_tensor(claim: Claim, n: int, k: int) -> tuple[Expected, ...]:
    return (
        Expected(("weight",), FLOAT8, ((n, k),)),
        Expected(("weight_scale", "weight_scale_inv"), FLOATS, ONE),
        *_input_scale(claim),
    )


def _fbgemm(claim: Claim, n: int, k: int) -> tuple[Expected, ...]:
    return (
        Expected(("weight",), FLOAT8, ((n, k),)),
        Expected(("weight_scale",), FLOATS, ((n, 1),)),
        Expected(("input_scale_ub",), FLOATS, ONE, needed=False),
    )


def _of_matrix(shape: Shape, claim: Claim) -> tuple[int, int]:
    return shape[0], shape[1]


_PLAIN = Layout("weight", _of_matrix, _plain)

LAYOUTS: Mapping[str, Layout] = {
    "pack-quantized": Layout(
        "weight_packed", lambda shape, claim: (shape[0], shape[1] * 32 // claim.bits), _packed
    ),
    "int-quantized": _PLAIN,
    "float-quantized": _PLAIN,
    "naive-quantized": _PLAIN,
    "awq": Layout("qweight", lambda shape, claim: (shape[1] * 32 // claim.bits, shape[0]), _awq),
    "gptq": Layout("qweight", lambda shape, claim: (shape[1], shape[0] * 32 // claim.bits), _gptq),
    "fp8-block": Layout("weight", _of_matrix, _fp8_block),
    "fp8-tensor": Layout("weight", _of_matrix, _fp8_tensor),
    "fbgemm": Layout("weight", _of_matrix, _fbgemm),
    "modelopt": Layout("weight", _of_matrix, _fp8_tensor),
}
