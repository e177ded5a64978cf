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


def select_backend(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    *,
    cpu_compute: str = "auto",
    quantized: bool = False,
    batch_invariant: bool = False,
) -> Selection:
    """The back end for a device and compute dtype.

    Args:
        name: ``auto``, or a back end by name.
        cpu_compute: see :class:`qtool.runtime.options.ModelOptions`.
        quantized: whether the checkpoint is; plain weights run on torch unless ``cpu_compute``
            asks for native code.
        batch_invariant: only one whose results do not depend on a row's company will do.

    Raises:
        UsageError: an unknown name, or a back end that cannot run on the device.
    """
    from qtool.runtime.kernels.reference import ReferenceBackend

    if name not in BACKENDS:
        raise UsageError(f"backend {name!r}: known are {', '.join(BACKENDS)}")
    if name == "cpu" and device.type != "cpu":
        raise UsageError(f"backend cpu on device {device}: choose reference or auto there")
    if name == "reference":
        return Selection(ReferenceBackend(device, dtype), "asked for", ())
    if device.type == "cpu":
        return _select_cpu(device, dtype, cpu_compute, quantized, batch_invariant)
    return Selection(
        ReferenceBackend(device, dtype),
        f"there are no kernels for {device.type} yet",
        (f"plain torch runs on {device}: correct, but slow; quantized weights are held dense",),
    )


def _select_cpu(
    device: torch.device,
    dtype: torch.dtype,
    cpu_compute: str,
    quantized: bool,
    batch_invariant: bool,
) -> Selection:
    from qtool.runtime.kernels.cpu.build import load_native
    from qtool.runtime.kernels.cpu.native_backend import NativeBackend, resolve_compute
    from qtool.runtime.kernels.cpu.torch_ops import CpuBackend
    from qtool.runtime.kernels.reference import ReferenceBackend

    plain: type[Backend] = ReferenceBackend if batch_invariant else CpuBackend
    if not quantized and cpu_compute == "auto" and not batch_invariant:
        return Selection(plain(device, dtype), "the device is a CPU", _cpu_notes(dtype))
    native = load_native()
    if native.library is None:
        notes = (f"{native.reason}; slower torch operations run instead", *_cpu_notes(dtype))
        return Selection(plain(device, dtype), "there is no native code", notes)
    compute = resolve_compute(cpu_compute, dtype, quantized)
    backend = NativeBackend(device, dtype, native, compute, plain)
    return Selection(backend, f"native code for {native.level}, computing in {compute}", ())


def _cpu_notes(dtype: torch.dtype) -> tuple[str, ...]:
    if dtype == torch.bfloat16:
        return ()
    return (
        f"4-bit weights are held dense in {dtype}: torch's packed CPU kernel is fast in bf16 only",
    )
