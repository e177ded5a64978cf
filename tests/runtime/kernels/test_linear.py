"""Linear layers of every back end against a float64 product of the dequantized weight."""

from __future__ import annotations

import pytest
import torch

from qtool.errors import UsageError
from qtool.formats import affine
from qtool.formats.scheme import WeightScheme, weight_scheme
from qtool.formats.tensor import QuantizedTensor
from qtool.runtime.kernels import select_backend
from qtool.runtime.kernels.cpu.torch_ops import INT4_MAX_ROWS, Int4Linear

CPU = torch.device("cpu")
SCHEMES = [
    weight_scheme(4, False, 32),
    weight_scheme(4, True, 64),
    weight_scheme(4, False, 128),
    weight_scheme(4, False, None),
    weight_scheme(4, False, 16),
    weight_scheme(8, True, 64),
    weight_scheme(8, True, None),
    WeightScheme(4, False, "tensor", None),
]
# Float64 product of the rounded operands; what remains is accumulation and the output's rounding.
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 8e-3}


def _make(scheme: WeightScheme, rows: int, columns: int) -> QuantizedTensor:
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows))
    scales, zeros = affine.choose_grid(weight, scheme, torch.bfloat16)
    return QuantizedTensor(affine.quantize(weight, scales, zeros, scheme), scales, zeros, scheme)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("scheme", SCHEMES, ids=WeightScheme.describe)
@pytest.mark.parametrize("num_rows", [1, 3, 17, INT4_MAX_ROWS, INT4_MAX_ROWS + 1])
@pytest.mark.parametrize("bias", [False, True])
def test_quantized_linear_equals_the_dequantized_product(
    backend: str, dtype: torch.dtype, scheme: WeightScheme, num_rows: int, bias: bool
) -> None:
    weight = _make(scheme, 48, 128)
    generator = torch.Generator().manual_seed(num_rows)
    x = torch.randn(num_rows, 128, generator=generator).to(dtype)
    offset = torch.randn(48, generator=generator).to(dtype) if bias else None
    linear = select_backend(backend, CPU, dtype).backend.linear(weight, offset)
    expected = x.double() @ weight.dequantize().double().t()
    if offset is not None:
        expected += offset.double()
    out = linear(x)
    assert out.dtype == dtype and out.shape == (num_rows, 48)
    assert float((out - expected).norm() / expected.norm()) < BOUNDS[dtype]


def test_four_bits_stay_packed_where_the_kernel_is_fast() -> None:
    backend = select_backend("cpu", CPU, torch.bfloat16).backend
    weight = _make(SCHEMES[0], 64, 128)
    assert isinstance(backend.linear(weight, None), Int4Linear)
    # 24 rows are not a multiple of 16, groups of 16 are not in torch's kernel: dense, and right.
    assert not isinstance(backend.linear(_make(SCHEMES[0], 24, 128), None), Int4Linear)
    assert not isinstance(backend.linear(_make(SCHEMES[4], 64, 128), None), Int4Linear)
    wide = select_backend("cpu", CPU, torch.float32)
    assert not isinstance(wide.backend.linear(weight, None), Int4Linear)
    assert "held dense in torch.float32" in wide.notes[0]


def test_unknown_and_impossible_back_ends_are_refused() -> None:
    with pytest.raises(UsageError, match="'cuda' ?: ?known are|known are auto, reference, cpu"):
        select_backend("cuda", CPU, torch.float32)
    with pytest.raises(UsageError, match="backend cpu on device cuda"):
        select_backend("cpu", torch.device("cuda"), torch.float32)
