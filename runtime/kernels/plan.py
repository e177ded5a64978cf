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
    chosen = {name: select_backend("auto", device, dtype) for name, dtype in DTYPES.items()}
    return tuple(kernel for dtype in DTYPES for kernel in _kernels(dtype, chosen[dtype]))


def _kernels(dtype: str, chosen: Selection) -> Iterator[PlannedKernel]:
    backend = chosen.backend

    def planned(
        operation: str, kernel: str, reason: str, size: float | None = None
    ) -> PlannedKernel:
        return PlannedKernel(
            operation=operation,
            dtype=dtype,
            backend=backend.name,
            kernel=kernel,
            bytes_per_weight=size,
            reason=reason,
        )

    for scheme in SCHEMES:
        sample = _sample(scheme, backend.device)
        operation = backend.linear(sample, None)
        size = operation.num_bytes / sample.codes.numel()
        held_dense = size >= DTYPES[dtype].itemsize
        why = f"held dense: no {scheme.bits}-bit kernel for {dtype}" if held_dense else ""
        yield planned(f"linear W{scheme.bits}", operation.kernel, why or chosen.reason, size)
    dense: Tensor = torch.zeros(SAMPLE_SHAPE, dtype=DTYPES[dtype], device=backend.device)
    operation = backend.linear(dense, None)
    size = operation.num_bytes / dense.numel()
    yield planned("linear dense", operation.kernel, chosen.reason, size)
    yield planned("attention", backend.attention_kernel, chosen.reason)
    yield planned("norm", backend.norm_kernel, chosen.reason)


def _sample(scheme: WeightScheme, device: torch.device) -> QuantizedTensor:
    grid = scheme.grid_shape(SAMPLE_SHAPE)
    return QuantizedTensor(
        codes=torch.zeros(SAMPLE_SHAPE, dtype=torch.uint8, device=device),
        scales=torch.ones(grid, dtype=torch.bfloat16, device=device),
        zeros=torch.full(grid, scheme.symmetric_zero, dtype=torch.uint8, device=device),
        scheme=scheme,
    )
