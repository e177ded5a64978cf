"""Operations of the decoder, one signature, three back ends: reference, cpu, triton.

:func:`select_backend` is the dispatcher. It says why it chose, and what was not as asked.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

import torch

from qtool.errors import UsageError
from qtool.runtime.kernels.backend import Backend

BACKENDS = ("auto", "reference", "cpu", "triton")


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
    if device.type == "cpu" and name != "triton":
        return _select_cpu(device, dtype, cpu_compute, quantized, batch_invariant)
    return _select_triton(name, device, dtype, batch_invariant)


def _select_triton(
    name: str, device: torch.device, dtype: torch.dtype, batch_invariant: bool
) -> Selection:
    """Triton where there is a GPU it was checked for; on a CPU in its interpreter, for tests."""
    target = obstacle = None
    if batch_invariant:
        obstacle = "how its products are split depends on the batch"
    elif importlib.util.find_spec("triton") is None:
        obstacle = "triton is not installed"
    else:
        from qtool.runtime.kernels.triton.launch import is_interpreted
        from qtool.runtime.kernels.triton.target import detect_target, sample_target

        if device.type == "cpu":
            target = sample_target("sm_90") if is_interpreted() else None
            obstacle = "it needs a GPU, or TRITON_INTERPRET=1 for tests"
        else:
            target = detect_target(device)
            obstacle = f"no kernel was checked for {torch.cuda.get_device_name(device)}"
    if target is not None:
        from qtool.formats.model_source import cache_folder
        from qtool.runtime.kernels.triton.backend import TritonBackend, tuned_for
        from qtool.runtime.kernels.triton.tuning import read_table

        table, stale = read_table(cache_folder(), tuned_for(device))
        notes = (stale,) if stale else ()
        tuned = "tuned" if table else "not tuned"
        backend = TritonBackend(device, dtype, target, table)
        return Selection(backend, f"a GPU: {target.arch}, {tuned}", notes)
    if name == "triton":
        raise UsageError(f"backend triton on device {device}: {obstacle}; use auto")
    from qtool.runtime.kernels.reference import ReferenceBackend

    return Selection(
        ReferenceBackend(device, dtype),
        obstacle or "",
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
