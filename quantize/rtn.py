"""Round to nearest: the grid spans each group's range, every weight goes to its nearest code."""

from __future__ import annotations

import torch
from torch import Tensor

from qtool.formats import affine
from qtool.formats.scheme import WeightScheme
from qtool.formats.tensor import QuantizedTensor


def quantize_rtn(
    weight: Tensor,
    scheme: WeightScheme,
    scale_dtype: torch.dtype,
    clip: Tensor | None = None,
    input_scale: Tensor | None = None,
) -> QuantizedTensor:
    """Round a weight to the nearest codes of its grid.

    Args:
        weight: [N, K], any floating dtype, finite.
        scheme: bits, symmetry and block shape.
        scale_dtype: dtype the scales are stored in.
        clip: optional shrink factor of each block's range, [N/r, K/c], in (0, 1].
        input_scale: scale [1] of the input, which a static activation scheme holds.
    """
    scales, zeros = affine.choose_grid(weight, scheme, scale_dtype, clip)
    codes = affine.quantize(weight, scales, zeros, scheme)
    return QuantizedTensor(codes, scales, zeros, scheme, input_scale)
