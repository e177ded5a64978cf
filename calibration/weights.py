"""Weights on their way in and out: finite in float32, and still finite in the stored dtype."""

from __future__ import annotations

import torch
from torch import Tensor

from qtool.errors import QuantizationError
from qtool.formats.checkpoint import CheckpointReader


def read_weight(reader: CheckpointReader, name: str, device: torch.device | str = "cpu") -> Tensor:
    """A tensor of a checkpoint in float32, in memory of its own.

    Raises:
        CheckpointError: there is no such tensor.
        QuantizationError: it holds NaN or infinity.
    """
    weight = reader.get(name).to(device=device, dtype=torch.float32, copy=True)
    _require_finite(name, weight)
    return weight


def to_stored(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A floating tensor in the dtype it is stored in; integer tensors stay as they are.

    Raises:
        QuantizationError: a value is not finite, or does not fit.
    """
    if not tensor.dtype.is_floating_point:
        return tensor
    stored = tensor.to(dtype)
    if not stored.isfinite().all():
        _require_finite(name, tensor)
        raise QuantizationError(
            f"{name} reaches {float(tensor.abs().max()):.4g}, which {dtype} cannot hold; store the "
            "model with --dtype bf16 or fp32, or repair it"
        )
    return stored


def check_scales(module: str, scales: Tensor) -> None:
    """Scales of a weight that the stored dtype can hold.

    Raises:
        QuantizationError: one is infinite, as float16 ends at 65504.
    """
    if not scales.isfinite().all():
        raise QuantizationError(
            f"{module}: its weights are so large that a scale is beyond {scales.dtype}; store the "
            "model with --dtype bf16 or fp32, or repair it"
        )


def _require_finite(name: str, tensor: Tensor) -> None:
    if not tensor.isfinite().all():
        raise QuantizationError(
            f"{name} holds {int((~tensor.isfinite()).sum())} values that are NaN or infinite; no "
            "method can quantize them: copy the model again, or repair it"
        )
