"""Round to nearest: a grid for each group's range, every weight goes to its nearest code."""

from __future__ import annotations

import torch
from torch import Tensor

from qtool.formats import affine
from qtool.formats.scheme import WeightScheme
from qtool.formats.tensor import QuantizedTensor
from qtool.quantize.ranges import search_octave


def quantize_rtn(
    weight: Tensor,
    scheme: WeightScheme,
    scale_dtype: torch.dtype,
    factor: Tensor | None = None,
    input_scale: Tensor | None = None,
) -> QuantizedTensor:
    """Round a weight to the nearest codes of its grid.

    FP8 without a factor gets the one with the least error of the weights.

    Args:
        weight: [N, K], any floating dtype, finite.
        scheme: bits, symmetry and block shape.
        scale_dtype: dtype the scales are stored in.
        factor: of each block's range, [N/r, K/c]; see :mod:`qtool.quantize.ranges`.
        input_scale: scale [1] of the input, which a static activation scheme holds.
    """
    if factor is None and scheme.type == "float":
        factor = search_octave(weight, scheme, scale_dtype)
    scales, zeros = affine.choose_grid(weight, scheme, scale_dtype, factor)
    codes = affine.quantize(weight, scales, zeros, scheme)
    return QuantizedTensor(codes, scales, zeros, scheme, input_scale)
