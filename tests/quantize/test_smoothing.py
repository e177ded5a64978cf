"""Folding moves scales and changes no function."""

from __future__ import annotations

import pytest
import torch

from qtool.quantize import smoothing

HEAD_DIM = 4


def _generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_tying_is_the_mean_over_the_query_heads_of_a_group() -> None:
    per_query = torch.arange(6 * HEAD_DIM, dtype=torch.float32)
    tied = smoothing.tie_over_query_group(per_query, HEAD_DIM, 2 * HEAD_DIM)
    expected = [
        sum(float(per_query[(3 * kv + query) * HEAD_DIM + channel]) for query in range(3)) / 3
        for kv in range(2)
        for channel in range(HEAD_DIM)
    ]
    assert tied.tolist() == expected


def test_spreading_follows_the_order_in_which_transformers_repeats_heads() -> None:
    from transformers.models.llama.modeling_llama import repeat_kv

    per_value = torch.randn(2 * HEAD_DIM, generator=_generator())
    repeated = repeat_kv(per_value.reshape(1, 2, 1, HEAD_DIM), 3).flatten()
    assert torch.equal(
        smoothing.spread_over_query_group(per_value, HEAD_DIM, 6 * HEAD_DIM), repeated
    )


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_targets_undo_a_norm_exactly_even_when_its_storage_rounds(
    offset: float, dtype: torch.dtype
) -> None:
    gain = torch.randn(32, generator=_generator()).to(dtype).float()
    gain[3] = -offset
    weight = torch.randn(8, 32, generator=_generator(1))
    x = torch.randn(5, 32, generator=_generator(2))
    scales = torch.rand(32, generator=_generator(3)) * 3 + 0.2
    folded, exact = smoothing.divide_norm(gain, scales, offset, dtype)
    assert torch.equal(folded, folded.to(dtype).float())
    assert (exact > 0).all() and exact.isfinite().all()
    after = (x * (offset + folded)) @ smoothing.multiply_columns(weight, exact).T
    torch.testing.assert_close(after, (x * (offset + gain)) @ weight.T, rtol=1e-4, atol=1e-4)


def test_scales_of_one_leave_a_norm_bit_for_bit_alone() -> None:
    gain = torch.randn(64, generator=_generator()).bfloat16().float()
    for offset in (0.0, 1.0):
        folded, exact = smoothing.divide_norm(gain, torch.ones(64), offset, torch.bfloat16)
        assert torch.equal(folded, gain)
        assert torch.equal(exact, torch.ones(64))


def test_rows_are_divided_with_their_bias() -> None:
    weight, bias = torch.randn(6, 3, generator=_generator()), torch.randn(6)
    scales = torch.rand(6, generator=_generator(1)) + 0.5
    x = torch.randn(4, 3)
    new_weight, new_bias = smoothing.divide_rows(weight, bias, scales)
    torch.testing.assert_close((x @ new_weight.T + new_bias) * scales, x @ weight.T + bias)
    assert smoothing.divide_rows(weight, None, scales)[1] is None


def test_a_second_moment_follows_its_input() -> None:
    x = torch.randn(50, 6, generator=_generator())
    scales = torch.rand(6, generator=_generator(1)) + 0.5
    moment, scaled = x.T @ x / 50, (x / scales).T @ (x / scales) / 50
    torch.testing.assert_close(smoothing.rescale_hessian(moment, scales), scaled)
