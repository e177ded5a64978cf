"""Which kernel each operation would take on a device, asked of the back ends themselves.

Small sample weights go through the same :meth:`Backend.linear` as a model's, so no rule is
written twice. The sample's shape fits every kernel; a model's odd shapes may not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from qtool.formats.scheme import WeightScheme, weight_scheme
from qtool.formats.tensor import QuantizedTensor
from qtool.runtime.kernels import Selection, select_backend
from qtool.runtime.kernels.backend import Backend

SAMPLE_SHAPE = (256, 512)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
SCHEMES = (weight_scheme(4, False, 128), weight_scheme(8, True, 128))


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedKernel:
    """One operation in one compute dtype.

    Attributes:
        bytes_per_weight: memory of the prepared weight, scales included; ``None`` where an
            operation has no weight.
        reason: why this back end and this kernel.
    """

    operation: str
    dtype: str
    backend: str
    kernel: str
    bytes_per_weight: float | None
    reason: str


def planned_kernels(device: torch.device) -> tuple[PlannedKernel, ...]:
    """Every operation in every compute dtype, as ``--backend auto`` would run it."""
    return tuple(kernel for dtype in DTYPES for kernel in _kernels(dtype, device))


def _kernels(dtype: str, device: torch.device) -> Iterator[PlannedKernel]:
    plain = select_backend("auto", device, DTYPES[dtype])
    chosen = select_backend("auto", device, DTYPES[dtype], quantized=True)

    def planned(
        selection: Selection, operation: str, kernel: str, why: str = "", size: float | None = None
    ) -> PlannedKernel:
        return PlannedKernel(
            operation=operation,
            dtype=dtype,
            backend=selection.backend.name,
            kernel=kernel,
            bytes_per_weight=size,
            reason=why or selection.reason,
        )

    for scheme in SCHEMES:
        sample = _sample(scheme, device)
        operation = chosen.backend.linear(sample, None)
        size = operation.num_bytes / sample.codes.numel()
        held_dense = size >= DTYPES[dtype].itemsize
        why = f"held dense: no {scheme.bits}-bit kernel for {dtype}" if held_dense else ""
        yield planned(chosen, f"linear W{scheme.bits}", operation.kernel, why, size)
    dense: Tensor = torch.zeros(SAMPLE_SHAPE, dtype=DTYPES[dtype], device=device)
    operation = plain.backend.linear(dense, None)
    size = operation.num_bytes / dense.numel()
    yield planned(plain, "linear dense", operation.kernel, size=size)
    for weights, selection in (("quantized", chosen), ("dense", plain)):
        yield planned(selection, f"attention, {weights}", _attention(selection.backend))
        yield planned(selection, f"norm, {weights}", selection.backend.norm_kernel)


def _sample(scheme: WeightScheme, device: torch.device) -> QuantizedTensor:
    grid = scheme.grid_shape(SAMPLE_SHAPE)
    return QuantizedTensor(
        codes=torch.zeros(SAMPLE_SHAPE, dtype=torch.uint8, device=device),
        scales=torch.ones(grid, dtype=torch.bfloat16, device=device),
        zeros=torch.full(grid, scheme.symmetric_zero, dtype=torch.uint8, device=device),
        scheme=scheme,
    )


def _attention(backend: Backend) -> str:
    """What runs where a model's heads and the cache's form are those that kernels take."""
    return backend.fused_kernel or backend.attention_kernel
