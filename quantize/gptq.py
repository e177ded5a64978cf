"""GPTQ (Frantar et al. 2023) as pure functions.

Columns are rounded one after another; what a column loses is made up for by the columns that
are still free, as far as the input's second moment H says they can. All rows share H, so all
are solved at once.

Act-order is static: the group grids are fixed from the original columns, columns are solved in
the order of descending ``diag(H)``, and codes go back to their places. No trace of the order is
left in the checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from qtool.formats import affine
from qtool.formats.scheme import WeightScheme
from qtool.formats.tensor import QuantizedTensor
from qtool.quantize.awq import output_error

# Columns between two updates of all later columns by one matrix product (section 3.3).
BLOCK_COLUMNS = 128

# Share of the mean of diag(H) that is added to the diagonal: the paper's, then ten times it
# until the factorization succeeds.
DAMPINGS = (0.01, 0.1, 1.0)

# The same for the fit to the original's outputs, which would otherwise learn the text by heart. KL
# of SmolLM2 (W4 asym g64, 8 windows) with 32 x 512 tokens: .107 without any fit, .063 with .01,
# .058 with .1, .052 with .3, .052 with 1; with 4 x 512: .141 without, .167, .122, .105 (.5), .106.
AIM_DAMPING = 0.3


NO_FACTOR = (
    "the second moment of its input cannot be factored, even with float64 and a raised diagonal; "
    "calibrate on other text"
)


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """A rounded weight; ``remedy`` of :class:`Factor`, and why it was not solved if it was not.

    ``output_error`` is that of :func:`~qtool.quantize.awq.output_error`, where it is known.
    """

    tensor: QuantizedTensor
    output_error: Tensor | None = None
    remedy: str | None = None
    fallback: str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Factor:
    """Upper triangular U with ``U^T U = H^-1`` for the permuted, damped second moment H.

    Attributes:
        upper: float32 [K, K], rows and columns in ``order``.
        order: int64 [K], columns as they are solved.
        remedy: what it took beyond the usual damping, for the report; ``None`` usually.
    """

    upper: Tensor
    order: Tensor
    remedy: str | None


def factorize(hessian: Tensor) -> Factor | None:
    """Factor a second moment [K, K]; ``None`` if it cannot be: it is not finite, or indefinite.

    A channel that never fired has no row in H: it gets the mean of the diagonal there, which
    rounds its column to nearest and moves no other. It may fire later.

    Damping is raised first, then the diagonal is lifted until it dominates (Gershgorin), then
    the same is tried in float64.
    """
    if not hessian.sum().isfinite():
        return None
    filled, mean = _filled_diagonal(hessian)
    order = torch.argsort(filled, descending=True, stable=True)
    permuted = hessian[order][:, order]
    permuted.diagonal().copy_(filled[order])
    for candidate, remedy in _candidates(permuted, mean):
        if (upper := _inverse_factor(candidate)) is not None:
            return Factor(upper.float(), order, remedy)
    return None


def _filled_diagonal(hessian: Tensor) -> tuple[Tensor, Tensor]:
    """diag(H) [K] with the mean where a channel never fired, and the mean before, a scalar."""
    diagonal = hessian.diagonal()
    mean = diagonal.mean()
    if mean <= 0:  # nothing ever fired: any positive diagonal rounds to nearest
        mean = torch.ones_like(mean)
    return torch.where(diagonal > 0, diagonal, mean), mean


def _candidates(hessian: Tensor, mean: Tensor) -> Iterator[tuple[Tensor, str | None]]:
    """Ever stronger regularizations, with their names; each takes the place of the one before.

    In float32 that place is ``hessian`` itself: of an MLP in a 7B model it has 485 MB.
    """
    for precision in (torch.float32, torch.float64):
        suffix = " in float64" if precision == torch.float64 else ""
        candidate = hessian.to(precision)
        exact = candidate.diagonal().clone()
        for damping in DAMPINGS:
            candidate.diagonal().copy_(exact + mean * damping)
            usual = damping == DAMPINGS[0] and not suffix
            yield candidate, None if usual else f"damping {damping:g}{suffix}"
        candidate.diagonal().copy_(exact)
        others = candidate.abs().sum(1) - exact.abs()
        candidate.diagonal().copy_(torch.maximum(exact, others) + mean * DAMPINGS[0])
        yield candidate, f"diagonal floor{suffix}"
        candidate.diagonal().copy_(exact)


def _inverse_factor(hessian: Tensor) -> Tensor | None:
    """Upper U with ``U^T U = hessian^-1``, from one Cholesky of the reversed matrix.

    With J the reversal, ``J H J = L L^T`` gives ``H = R R^T`` for the upper ``R = J L J``, and
    ``U = R^-1``. Inverting H first, as the paper's code does, loses half of the digits.
    """
    lower, info = torch.linalg.cholesky_ex(hessian.flip(0, 1))
    if int(info) != 0:
        return None
    # The identity, column-major: then its solution takes its place.
    inverse = torch.eye(hessian.shape[0], dtype=hessian.dtype, device=hessian.device).mT
    torch.linalg.solve_triangular(lower, inverse, upper=False, out=inverse)
    del lower  # a matrix less in memory while the last one is made
    upper = inverse.flip(0, 1)
    return upper if bool(upper.sum().isfinite()) else None


def retarget(
    weights: Sequence[Tensor],
    hessian: Tensor,
    tokens: int,
    drift: Tensor,
    shortfall: Tensor | None = None,
) -> list[Tensor]:
    """Weights that on the inputs of now give what the original gives on its own.

    The input x has drifted from the original's x0 since the layers before were rounded, and the
    residual stream that the output is added to lacks s. The least-squares solution of
    ``W' x = W x0 + s`` is ``W' = W + (W E[(x0 - x) x^T] + E[s x^T]) H^-1`` (Arai & Ichikawa 2025,
    "Quantization Error Propagation", section 4, without s). Solving towards W' makes up for
    earlier layers' error, where plain GPTQ only keeps to its own.

    H is damped by :data:`AIM_DAMPING` of its mean diagonal, and by no less than K / tokens.

    Args:
        weights: float32 [N_i, K], with one input.
        hessian: that input's second moment, finite, [K, K].
        tokens: behind the moments.
        drift: ``E[(x0 - x) x^T]``, [K, K].
        shortfall: ``E[s x^T]`` [N, K], for a single weight; ``None`` for s = 0.
    """
    lower = _cholesky(hessian, max(AIM_DAMPING, hessian.shape[0] / tokens))
    targets = []
    for weight in weights:
        moment = weight @ drift
        if shortfall is not None:
            moment += shortfall
        targets.append(weight + torch.cholesky_solve(moment.T, lower).T)
    return targets


def _cholesky(hessian: Tensor, damping: float) -> Tensor:
    """Lower factor of a finite H, damped as little over ``damping`` as it takes."""
    filled, mean = _filled_diagonal(hessian)
    damped = hessian.clone()
    while True:
        damped.diagonal().copy_(filled + mean * damping)
        factor: tuple[Tensor, Tensor] = torch.linalg.cholesky_ex(damped)
        if int(factor[1]) == 0:
            return factor[0]
        damping *= 10


def solve_group(
    weights: Sequence[Tensor],
    nearest: Sequence[QuantizedTensor],
    hessian: Tensor,
    factor: Factor | None,
) -> list[Outcome]:
    """Solve weights [N_i, K] that share an input, none worse than rounded to nearest.

    Args:
        weights: float32, with one input whose second moment is ``hessian`` [K, K].
        nearest: each weight rounded to nearest; gives the grid, and what a module falls back to.
        factor: of ``hessian``, or ``None`` if it has none.
    """
    if factor is None:
        return [Outcome(tensor, fallback=NO_FACTOR) for tensor in nearest]
    solved = solve(weights, nearest, factor)
    return [
        _never_worse(weight, hessian, Outcome(tensor, remedy=factor.remedy), plain)
        for weight, tensor, plain in zip(weights, solved, nearest, strict=True)
    ]


def _never_worse(
    weight: Tensor, hessian: Tensor, solved: Outcome, nearest: QuantizedTensor
) -> Outcome:
    found = output_error(solved.tensor.dequantize() - weight, hessian)
    plain = output_error(nearest.dequantize() - weight, hessian)
    if found <= plain:
        return replace(solved, output_error=found)
    reason = f"the solve left an output error of {float(found):.3g}, rounding leaves {plain:.3g}"
    return Outcome(nearest, plain, fallback=reason)


def solve(
    weights: Sequence[Tensor], nearest: Sequence[QuantizedTensor], factor: Factor
) -> list[QuantizedTensor]:
    """Round weights that share an input, column by column, with their errors fed forward.

    Args:
        weights: float32 [N_i, K] each.
        nearest: each on the grid it is to have, all of one scheme.
        factor: of the second moment of their input.

    Returns:
        One tensor a weight, on exactly the given grids.
    """
    scheme = nearest[0].scheme
    rows = [weight.shape[0] for weight in weights]
    columns = weights[0].shape[1]
    scales = _columns_of([affine.per_row(t.scales, scheme, t.shape) for t in nearest])
    zeros = _columns_of([affine.per_row(t.zeros, scheme, t.shape) for t in nearest])
    width = scheme.block_shape((rows[0], columns))[1]
    group = torch.arange(columns, device=scales.device) // width
    # Columns become rows: each is contiguous, and rounded with one row of the grid.
    work = torch.cat(list(weights)).t()[factor.order].contiguous()
    codes = _solve_columns(work, factor.upper, scales, zeros, group[factor.order], scheme)
    restored = torch.empty_like(codes)
    restored[factor.order] = codes
    return [
        replace(grid, codes=part.contiguous())
        for part, grid in zip(restored.t().split(rows), nearest, strict=True)
    ]


def _columns_of(grids: list[Tensor]) -> Tensor:
    """Grids [N_i, G] of all rows, float32 [G, N]."""
    return torch.cat(grids).float().t().contiguous()


def _solve_columns(
    work: Tensor,
    upper: Tensor,
    scales: Tensor,
    zeros: Tensor,
    group: Tensor,
    scheme: WeightScheme,
) -> Tensor:
    """Codes [K, N] of work [K, N], which is overwritten.

    Inside a block of columns the errors so far are applied when a column's turn comes (one
    matrix-vector product, which reads them once); later blocks get theirs in one product.
    """
    codes = torch.empty(work.shape, dtype=affine.CODE_DTYPES[scheme.type], device=work.device)
    groups = group.tolist()
    for start in range(0, work.shape[0], BLOCK_COLUMNS):
        end = min(start + BLOCK_COLUMNS, work.shape[0])
        errors = torch.empty_like(work[start:end])
        block = upper[start:end, start:end]
        diagonal = block.diagonal().tolist()
        for i in range(end - start):
            column = work[start + i]
            if i:
                column = torch.addmv(column, errors[:i].t(), block[:i, i], alpha=-1)
            scale, zero = scales[groups[start + i]], zeros[groups[start + i]]
            code = affine.round_codes(column / scale, zero, scheme)
            codes[start + i] = code
            errors[i] = (column - (code - zero) * scale) / diagonal[i]
        if end < work.shape[0]:
            work[end:].addmm_(upper[start:end, end:].t(), errors, alpha=-1)
    return codes
