"""Native linear layers against float64 products, at every instruction set this machine has."""

from __future__ import annotations

import ctypes

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from qtool.formats import affine
from qtool.formats.scheme import WeightScheme, weight_scheme
from qtool.formats.tensor import QuantizedTensor
from qtool.runtime.kernels.cpu.native_ops import (
    Compute,
    NativeLinear,
    eight_bits,
    kernel_group,
    unsupported,
)
from support.native import LEVELS, native_at

SCHEMES = [
    weight_scheme(4, False, 64),
    weight_scheme(4, True, 128),
    weight_scheme(4, False, 16),
    weight_scheme(4, False, 256),
    weight_scheme(4, True, 24),
    weight_scheme(4, False, None),
    weight_scheme(8, True, 64),
    weight_scheme(8, True, None),
    WeightScheme(4, False, "tensor", None),
]
COMPUTES: tuple[Compute, ...] = ("int8", "bf16", "fp32")
# Relative to a float64 product of the activations as the kernel rounds them: what is left is
# float32 arithmetic across groups.
BOUND = 1e-6


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _quantized(
    scheme: WeightScheme, rows: int, columns: int, dtype: torch.dtype = torch.bfloat16
) -> QuantizedTensor:
    weight = _random(rows, columns, seed=rows)
    scales, zeros = affine.choose_grid(weight, scheme, dtype)
    return QuantizedTensor(affine.quantize(weight, scales, zeros, scheme), scales, zeros, scheme)


def _as_computed(x: Tensor, weight: QuantizedTensor | Tensor, compute: Compute) -> Tensor:
    """Float64 activations after the rounding that ``compute`` stands for."""
    if compute == "bf16":
        return x.bfloat16().double()
    if compute == "fp32":
        return x.double()
    assert isinstance(weight, QuantizedTensor)
    scheme = weight.scheme
    group = 64
    if scheme.strategy == "group":
        group = kernel_group(scheme.block_shape(weight.shape)[1]) or 0
    padded = torch.nn.functional.pad(x.float(), (0, -x.shape[1] % group))
    groups = padded.view(x.shape[0], -1, group)
    most = groups.abs().amax(-1, keepdim=True)
    # Not ``127 / most``, which torch computes as a reciprocal and a product, rounded twice.
    inverse = torch.where(most > 0, torch.full_like(most, 127) / most, 0)
    rounded = (groups * inverse).round().double() * (most / 127).double()
    return rounded.view(x.shape[0], -1)[:, : x.shape[1]]


def _error(out: Tensor, expected: Tensor) -> float:
    return float((out.double() - expected).norm() / expected.norm().clamp(min=1e-30))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("compute", COMPUTES)
@pytest.mark.parametrize("scheme", SCHEMES, ids=WeightScheme.describe)
def test_every_number_of_rows_gives_the_float64_product(
    level: str, compute: Compute, scheme: WeightScheme
) -> None:
    columns = 768 if scheme.strategy == "group" else 333
    weight = _quantized(scheme, 71, columns)
    bias = _random(71, seed=3)
    linear = NativeLinear(native_at(level), weight, bias, compute)
    dense = weight.dequantize().double().t()
    for rows in (*range(1, 15), 25, 385):
        x = _random(rows, columns, seed=rows)
        expected = _as_computed(x, weight, compute) @ dense + bias.double()
        assert _error(linear(x), expected) < BOUND, rows


@given(
    level=st.sampled_from(LEVELS),
    compute=st.sampled_from(COMPUTES),
    bits=st.sampled_from((4, 8)),
    rows=st.integers(1, 40),
    features=st.integers(1, 130),
    columns=st.integers(1, 300),
)
def test_ragged_shapes_give_the_float64_product(
    level: str, compute: Compute, bits: int, rows: int, features: int, columns: int
) -> None:
    weight = _quantized(weight_scheme(bits, bits == 8, None), features, columns)
    linear = NativeLinear(native_at(level), weight, None, compute)
    x = _random(rows, columns, seed=rows)
    expected = _as_computed(x, weight, compute) @ weight.dequantize().double().t()
    assert _error(linear(x), expected) < BOUND


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    ("compute", "dtype"),
    [
        ("fp32", torch.float32),
        ("fp32", torch.bfloat16),
        ("bf16", torch.bfloat16),
    ],
)
def test_dense_weights_give_the_float64_product(
    level: str, compute: Compute, dtype: torch.dtype
) -> None:
    weight = _random(45, 203).to(dtype)
    linear = NativeLinear(native_at(level), weight, None, compute)
    for rows in (1, 7, 30):
        x = _random(rows, 203, seed=rows)
        expected = _as_computed(x, weight, compute) @ weight.double().t()
        assert _error(linear(x), expected) < BOUND


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_scales_of_any_dtype_keep_every_bit(level: str, dtype: torch.dtype) -> None:
    weight = _quantized(SCHEMES[0], 40, 128, dtype)
    # Half of the smallest normal float16: subnormal there.
    tiny = QuantizedTensor(weight.codes, weight.scales * 2.0**-15, weight.zeros, weight.scheme)
    x = _random(3, 128)
    for each in (weight, tiny):
        out = NativeLinear(native_at(level), each, None, "fp32")(x)
        assert _error(out, x.double() @ each.dequantize().double().t()) < BOUND


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("compute", COMPUTES)
def test_a_row_has_the_same_bits_in_any_company_and_any_chunk(level: str, compute: Compute) -> None:
    weight = _quantized(SCHEMES[0], 96, 256)
    linear = NativeLinear(native_at(level), weight, None, compute)
    x = _random(400, 256)
    whole = linear(x)
    for sizes in ([1] * 30, [2, 3, 5, 7, 11, 12, 13, 24, 25], [399, 1]):
        start = 0
        for size in sizes:
            assert torch.equal(linear(x[start : start + size]), whole[start : start + size]), size
            start += size


@pytest.mark.skipif("amx" not in LEVELS, reason="needs a matrix unit")
@pytest.mark.parametrize(
    "scheme",
    [weight_scheme(4, False, 64), weight_scheme(4, True, 32), weight_scheme(8, True, 128),
     weight_scheme(4, False, 72), weight_scheme(8, True, None)],
    ids=WeightScheme.describe,
)  # fmt: skip
def test_the_matrix_unit_gives_the_bits_of_the_vector_tiles(scheme: WeightScheme) -> None:
    columns = 1000 if scheme.strategy == "channel" else 9 * 128
    weight = _quantized(scheme, 71, columns)
    bias = _random(71, seed=3)
    with_tiles = NativeLinear(native_at("amx"), weight, bias, "int8")
    without = NativeLinear(native_at("avx512"), weight, bias, "int8")
    for rows in (*range(1, 35), 193, 400):
        x = _random(rows, columns, seed=rows)
        assert torch.equal(with_tiles(x), without(x)), rows


@pytest.mark.parametrize("level", LEVELS)
def test_a_library_says_what_it_computes_with(level: str) -> None:
    library = native_at(level).library
    assert library is not None
    library.qt_level.restype = ctypes.c_char_p
    assert library.qt_level().decode() == level


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("bits", [0x7FFFFFFF, 0x7F800001, -1, -0x7FFFFF])
def test_every_nan_stays_one_through_bfloat16(level: str, bits: int) -> None:
    """Rounding a mantissa of ones carries into the sign: a NaN would become -0."""
    linear = NativeLinear(native_at(level), torch.eye(32).bfloat16(), None, "bf16")
    x = torch.ones(2, 32)
    x[0] = torch.full((32,), bits, dtype=torch.int32).view(torch.float32)
    assert bool(linear(x)[0].isnan().all()) and torch.equal(linear(x)[1], x[1])
    assert bool(linear(x.bfloat16())[0].isnan().all())


@pytest.mark.parametrize("level", LEVELS)
def test_the_number_of_threads_does_not_change_a_bit(level: str) -> None:
    native = native_at(level)
    assert native.library is not None
    linear = NativeLinear(native, _quantized(SCHEMES[0], 300, 256), None, "int8")
    x = _random(9, 256)
    results = []
    for threads in (1, 2, 3, 5):
        assert native.library.qt_pool_start(threads) == threads
        results.append(linear(x))
    native.library.qt_pool_start(2)
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("compute", COMPUTES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_nothing_beside_the_rows_is_read_or_written(
    level: str, compute: Compute, dtype: torch.dtype
) -> None:
    """Rows lie in a field of NaN; the last of them ends where the memory does."""
    weight = _quantized(weight_scheme(4, False, None), 37, 101)
    linear = NativeLinear(native_at(level), weight, None, compute)
    field = torch.full((9, 150), torch.nan, dtype=dtype)
    x = _random(5, 101).to(dtype)
    inside = field[4:, 49:]
    inside.copy_(x)
    out = linear(inside)
    assert torch.equal(out, linear(x)) and out.dtype == dtype
    assert bool(field[:4].isnan().all() and field[4:, :49].isnan().all())


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("compute", COMPUTES)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_value_that_is_not_finite_spoils_its_own_row_only(
    level: str, compute: Compute, value: float
) -> None:
    linear = NativeLinear(native_at(level), _quantized(SCHEMES[0], 64, 128), None, compute)
    x = _random(14, 128)
    spoilt = x.clone()
    spoilt[6, 77] = value
    out = linear(spoilt)
    assert not bool(out[6].isfinite().any())
    others = [row for row in range(14) if row != 6]
    assert torch.equal(out[others], linear(x)[others])


@pytest.mark.parametrize("level", LEVELS)
def test_zeros_and_the_smallest_numbers_give_zeros_and_small_numbers(level: str) -> None:
    linear = NativeLinear(native_at(level), _quantized(SCHEMES[0], 64, 128), None, "int8")
    x = torch.zeros(3, 128)
    x[1] = 1e-42
    x[2, 0] = 1e-20
    out = linear(x)
    assert bool((out[0] == 0).all()) and bool(out.isfinite().all())
    assert 0 < float(out[2].abs().max()) < 1e-19


@pytest.mark.parametrize("level", LEVELS)
def test_the_extremes_of_codes_and_activations_do_not_overflow(level: str) -> None:
    """Every product at its largest: the sums would saturate 16 bits."""
    for scheme in (weight_scheme(4, False, 128), weight_scheme(8, True, 128)):
        for code in (0, scheme.max_code):
            shape = (32, 128)
            codes = torch.full(shape, code, dtype=torch.uint8)
            zero = scheme.max_code - code if not scheme.symmetric else scheme.symmetric_zero
            zeros = torch.full((32, 1), zero, dtype=torch.uint8)
            weight = QuantizedTensor(codes, torch.ones(32, 1), zeros, scheme)
            linear = NativeLinear(native_at(level), weight, None, "int8")
            for sign in (-1.0, 1.0):
                x = torch.full((2, 128), sign)
                expected = x.double() @ weight.dequantize().double().t()
                assert _error(linear(x), expected) < BOUND


@pytest.mark.parametrize("level", LEVELS)
def test_float16_activations_are_computed_as_float32(level: str) -> None:
    linear = NativeLinear(native_at(level), _quantized(SCHEMES[0], 64, 128), None, "fp32")
    x = _random(3, 128).half()
    assert torch.equal(linear(x), linear(x.float()).half())


def test_all_levels_give_int8_results_that_differ_by_rounding_only() -> None:
    weight, x = _quantized(SCHEMES[0], 64, 512), _random(5, 512)
    outs = [NativeLinear(native_at(level), weight, None, "int8")(x) for level in LEVELS]
    assert all(_error(out, outs[0].double()) < BOUND for out in outs)


def test_int8_activations_cost_about_one_percent() -> None:
    weight, x = _quantized(SCHEMES[0], 256, 512), _random(16, 512)
    out = NativeLinear(native_at(LEVELS[0]), weight, None, "int8")(x)
    assert 0.002 < _error(out, x.double() @ weight.dequantize().double().t()) < 0.012


def test_a_head_of_8_bits_is_within_one_percent() -> None:
    head = _random(100, 192)
    weight = eight_bits(head)
    assert weight.scheme == weight_scheme(8, True, 64)
    assert _error(weight.dequantize(), head.double()) < 0.01
    assert eight_bits(_random(10, 100)).scheme == weight_scheme(8, True, None)


def test_weights_are_held_once_at_their_own_size() -> None:
    weight = _quantized(weight_scheme(4, False, 64), 576, 1536)
    linear = NativeLinear(native_at(LEVELS[0]), weight, None, "int8")
    # 4 bits, and 16 + 8 for the scale and zero of 64.
    assert linear.num_bytes == 576 * 1536 * (4 + 24 / 64) / 8
    assert linear.kernel == f"native int8 ({LEVELS[0]})"


def test_groups_that_no_kernel_takes_are_named() -> None:
    assert unsupported(_quantized(weight_scheme(4, True, 20), 8, 40)) == (
        "groups of 20 are no multiple of 8"
    )
    assert unsupported(_quantized(weight_scheme(4, True, 24), 8, 48)) is None
    assert [kernel_group(width) for width in (8, 64, 128, 256, 144, 12)] == [
        8,
        64,
        128,
        128,
        72,
        None,
    ]
    with pytest.raises(ValueError, match="no native kernel computes"):
        NativeLinear(native_at(LEVELS[0]), _random(4, 8), None, "int8")
