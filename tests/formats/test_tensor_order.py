"""A weight whose columns have an order of their own: the same weight, and never stacked wrongly."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from qtool.formats.scheme import weight_scheme
from qtool.formats.tensor import QuantizedTensor, can_stack, concatenate_rows

SCHEME = weight_scheme(4, False, 8)


def _tensor(order: Tensor | None, seed: int = 0) -> QuantizedTensor:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (6, 24), dtype=torch.uint8, generator=generator)
    zeros = torch.randint(0, 16, (6, 3), dtype=torch.uint8, generator=generator)
    return QuantizedTensor(codes, torch.rand(6, 3, generator=generator), zeros, SCHEME, order=order)


def _order(seed: int) -> Tensor:
    return torch.randperm(24, generator=torch.Generator().manual_seed(seed))


def test_dequantizing_puts_every_column_where_its_feature_is() -> None:
    order = _order(1)
    tensor = _tensor(order)
    sorted_columns = tensor.in_code_order().dequantize()
    assert tensor.in_code_order().order is None
    for column, feature in enumerate(order.tolist()):
        assert torch.equal(tensor.dequantize()[:, feature], sorted_columns[:, column])


def test_stacked_weights_share_their_order() -> None:
    first, second = _tensor(_order(1)), _tensor(_order(1).clone(), seed=1)
    stacked = concatenate_rows([first, second])
    assert torch.equal(stacked.dequantize(), torch.cat([first.dequantize(), second.dequantize()]))
    for other in (_tensor(_order(2)), _tensor(None)):
        assert not can_stack([first, other]) and not can_stack([other, first])
        with pytest.raises(ValueError, match="can be stacked"):
            concatenate_rows([first, other])


def test_a_copy_on_another_device_keeps_it() -> None:
    moved = _tensor(_order(1)).to("cpu")
    assert moved.order is not None and torch.equal(moved.order, _order(1))
    assert torch.equal(moved.dequantize(), _tensor(_order(1)).dequantize())


@pytest.mark.parametrize(
    "order", [torch.zeros(24).long(), torch.arange(23), torch.arange(1, 25), torch.arange(24) - 1]
)
def test_what_is_no_permutation_is_refused(order: Tensor) -> None:
    with pytest.raises(ValueError, match="no permutation of 24 input features"):
        replace(_tensor(None), order=order)
