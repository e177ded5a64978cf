"""What range a block's grid spans, where another one than that of its weights loses less.

Integer grids are clipped: a range without its outliers has finer steps (AWQ, Lin et al. 2023, as
their code does it). A float grid has nothing to gain from that, as its steps grow with the
numbers; but they double at powers of two, and where those fall among a block's weights is an
accident of its largest one. Ranges of up to twice the largest weight move them over one octave.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from qtool.calibration.products import exact_products
from qtool.formats import affine
from qtool.formats.scheme import WeightScheme
from qtool.formats.tensor import round_to_grid

# A range is shrunk at most to 11/20, where the search of AWQ's authors ends too.
CLIP_FACTORS = tuple(1 - step / 20 for step in range(10))

# Starts of a float grid's octave. With 16, rows of Gaussian weights keep less than 90% of their
# squared error (tests/quantize/test_ranges.py); twice as many gain less, and take twice the time.
OCTAVE_FACTORS = tuple(2 ** (step / 16) for step in range(16))

# Weights searched at a time: 4 MB in float32 stay in a core's cache with what is made of them.
CHUNK = 2**20


def search_clip(
    weight: Tensor, hessian: Tensor, scheme: WeightScheme, scale_dtype: torch.dtype
) -> Tensor:
    """Shrink factor of each block's range, in [1 - 9/20, 1]; see :func:`search_range`."""
    return search_range(weight, scheme, scale_dtype, CLIP_FACTORS, hessian)


def search_octave(
    weight: Tensor, scheme: WeightScheme, scale_dtype: torch.dtype, hessian: Tensor | None = None
) -> Tensor:
    """Factor of each block's range on a float grid, in [1, 2); see :func:`search_range`."""
    return search_range(weight, scheme, scale_dtype, OCTAVE_FACTORS, hessian)


def search_range(
    weight: Tensor,
    scheme: WeightScheme,
    scale_dtype: torch.dtype,
    factors: Sequence[float],
    hessian: Tensor | None = None,
) -> Tensor:
    """Factor of each block's range with the smallest error; the first one wins ties.

    Blocks are judged one by one, by the squared error of their output (with the diagonal blocks
    of the input's second moment), or of their weights if no input is known.

    Args:
        weight: [N, K], any floating dtype.
        scheme: type, bits and block shape [r, c].
        scale_dtype: dtype the scales are stored in.
        factors: what is tried.
        hessian: second moment of the input, [K, K].

    Returns:
        float32 [N/r, K/c], for :func:`~qtool.formats.affine.choose_grid`.
    """
    rows, columns = scheme.block_shape((weight.shape[0], weight.shape[1]))
    moments = None if hessian is None else _diagonal_blocks(hessian, columns)
    step = rows * max(1, CHUNK // (rows * weight.shape[1]))
    parts = [
        _search(part.float(), scheme, scale_dtype, factors, moments) for part in weight.split(step)
    ]
    return torch.cat(parts)


def _search(
    weight: Tensor,
    scheme: WeightScheme,
    scale_dtype: torch.dtype,
    factors: Sequence[float],
    moments: Tensor | None,
) -> Tensor:
    shape = weight.shape[0], weight.shape[1]
    best_loss = torch.full(scheme.grid_shape(shape), math.inf, device=weight.device)
    best = torch.full_like(best_loss, factors[0])
    for factor in factors:
        candidate = torch.full_like(best, factor)
        grid = affine.choose_grid(weight, scheme, scale_dtype, candidate)
        delta = affine.to_blocks(round_to_grid(weight, *grid, scheme) - weight, scheme)
        loss = _block_errors(delta, moments)
        better = loss < best_loss
        best_loss = torch.where(better, loss, best_loss)
        best = torch.where(better, candidate, best)
    return best


def _diagonal_blocks(hessian: Tensor, size: int) -> Tensor:
    """[K, K] -> its diagonal blocks [ceil(K / size), size, size], filled up with zeros."""
    count = -(-hessian.shape[0] // size)
    padding = count * size - hessian.shape[0]
    grid = functional.pad(hessian, (0, padding, 0, padding)).reshape(count, size, count, size)
    return grid.diagonal(dim1=0, dim2=2).permute(2, 0, 1)


def _block_errors(delta: Tensor, moments: Tensor | None) -> Tensor:
    """delta [R, G, r * c] and moments [G, c, c] -> squared error of every block, [R, G]."""
    if moments is None:
        return delta.square().sum(-1)
    num_rows, num_groups, _ = delta.shape
    by_group = delta.transpose(0, 1).reshape(num_groups, -1, moments.shape[-1])
    with exact_products():
        errors = ((by_group @ moments) * by_group).sum(-1)
    return errors.reshape(num_groups, num_rows, -1).sum(-1).t()
