"""Operations of the decoder, one signature, three back ends: reference, cpu, triton.

:func:`select_backend` is the dispatcher. It says why it chose, and what was not as asked.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from qtool.errors import UsageError
from qtool.runtime.kernels.backend import Backend

BACKENDS = ("auto", "reference", "cpu")


@dataclass(frozen=True, slots=True)
class Selection:
    """A back end, and one sentence for everything a user might have expected otherwise."""

    backend: Backend
    reason: str
    notes: tuple[str, ...]


def select_backend(name: str, device: torch.device, dtype: torch.dtype) -> Selection:
    """The back end for a device and compute dtype.

    Args:
        name: ``auto``, or a back end by name.

    Raises:
        UsageError: an unknown name, or a back end that cannot run on the device.
    """
    from qtool.runtime.kernels.cpu.torch_ops import CpuBackend
    from qtool.runtime.kernels.reference import ReferenceBackend

    if name not in BACKENDS:
        raise UsageError(f"backend {name!r}: known are {', '.join(BACKENDS)}")
    if name == "cpu" and device.type != "cpu":
        raise UsageError(f"backend cpu on device {device}: choose reference or auto there")
    if name == "reference":
        return Selection(ReferenceBackend(device, dtype), "asked for", ())
    if device.type == "cpu":
        return Selection(CpuBackend(device, dtype), "the device is a CPU", _cpu_notes(dtype))
    return Selection(
        ReferenceBackend(device, dtype),
        f"there are no kernels for {device.type} yet",
        (f"plain torch runs on {device}: correct, but slow; quantized weights are held dense",),
    )


def _cpu_notes(dtype: torch.dtype) -> tuple[str, ...]:
    if dtype == torch.bfloat16:
        return ()
    return (
        f"4-bit weights are held dense in {dtype}: torch's packed CPU kernel is fast in bf16 only",
    )
