"""What this machine has: processor, memory, GPUs, compiler, and the packages that matter.

Facts only; nothing here decides anything. Whatever cannot be found out is ``None`` or absent,
never an error: the reader of these facts is somebody whose machine does not work as hoped.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from qtool.runtime.capacity import available_cpu_memory
from qtool.runtime.kernels.cpu.build import BuildError, find_compiler, load_native
from qtool.runtime.kernels.cpu.cores import available_cores

# What the kernels of torch and of this package make use of.
INSTRUCTION_SETS = (
    "avx2",
    "avx512f",
    "avx512_vnni",
    "avx512_bf16",
    "amx_tile",
    "amx_bf16",
    "amx_int8",
)
PACKAGES = ("torch", "transformers", "safetensors", "triton", "compressed-tensors")
COMPILER_SECONDS = 10


@dataclass(frozen=True, slots=True)
class Processor:
    """The CPU.

    Attributes:
        cores: threads that kernels use; :mod:`qtool.runtime.kernels.cpu.cores` counts them.
        logical_cpus: what the system counts, hardware threads included.
        instruction_sets: of :data:`INSTRUCTION_SETS`, those the processor has.
        torch_capability: the instruction set that torch's own kernels use.
    """

    model: str
    cores: int
    logical_cpus: int
    instruction_sets: tuple[str, ...]
    torch_capability: str


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU that torch sees; ``capability`` as ``9.0``, memory in bytes."""

    name: str
    capability: str
    free_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class Disk:
    """Free bytes where ``path`` lies, or would lie once it is made."""

    path: str
    free_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """All of it.

    Attributes:
        packages: version of each of :data:`PACKAGES`, ``None`` if it is not installed.
        triton: whether it imports and what can run here, in words.
        native: level and file of the native CPU code, or why there is none.
        compiler: the C++ compiler's first line about itself and its path, or ``None``.
        free_memory: bytes this process can still get.
    """

    platform: str
    python: str
    processor: Processor
    free_memory: int
    gpus: tuple[Gpu, ...]
    packages: dict[str, str | None]
    triton: str
    native: str
    compiler: str | None
    disks: tuple[Disk, ...]


def inspect_machine(folders: Iterable[Path]) -> Machine:
    """Look around; ``folders`` are those whose disks matter."""
    gpus = _gpus()
    return Machine(
        platform=platform.platform(),
        python=platform.python_version(),
        processor=_processor(),
        free_memory=available_cpu_memory(),
        gpus=gpus,
        packages={name: _version(name) for name in PACKAGES},
        triton=triton_status(has_gpu=bool(gpus)),
        native=native_status(),
        compiler=describe_compiler(),
        disks=tuple(_disk(folder) for folder in folders),
    )


def _processor() -> Processor:
    info = _cpuinfo()
    flags = set(info.get("flags", "").split())
    return Processor(
        model=info.get("model name") or platform.processor() or platform.machine(),
        cores=available_cores(),
        logical_cpus=os.cpu_count() or 1,
        instruction_sets=tuple(name for name in INSTRUCTION_SETS if name in flags),
        torch_capability=torch.backends.cpu.get_cpu_capability(),
    )


def _cpuinfo() -> dict[str, str]:
    """Facts about the first processor; empty where the system has no such file."""
    text = _read(Path("/proc/cpuinfo")) or ""
    pairs = (line.split(":", 1) for line in text.split("\n\n")[0].splitlines() if ":" in line)
    return {key.strip(): value.strip() for key, value in pairs}


def _gpus() -> tuple[Gpu, ...]:
    if not torch.cuda.is_available():
        return ()
    return tuple(_gpu(index) for index in range(torch.cuda.device_count()))


def _gpu(index: int) -> Gpu:
    properties = torch.cuda.get_device_properties(index)
    free, total = torch.cuda.mem_get_info(index)
    return Gpu(properties.name, f"{properties.major}.{properties.minor}", free, total)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def triton_status(*, has_gpu: bool) -> str:
    """Whether Triton imports, and what of it can run here."""
    try:
        importlib.import_module("triton")
    except ModuleNotFoundError as error:
        return f"does not import ({error}); back ends that need it are not used"
    except Exception as error:  # a broken installation fails in any way
        return f"does not import ({type(error).__name__}: {error}); reinstall it"
    if has_gpu:
        return "imports, runs on the GPU"
    return "imports; without a GPU only its interpreter runs (TRITON_INTERPRET=1), for tests"


def native_status() -> str:
    """The native CPU code, compiled if need be."""
    native = load_native()
    return native.reason or f"{native.level}, {native.path}"


def describe_compiler() -> str | None:
    """The C++ compiler that builds native code: its first line about itself, and its path."""
    try:
        path = shutil.which(find_compiler()[0])
    except BuildError:
        return None
    assert path is not None
    try:
        result = subprocess.run(
            [path, "--version"],
            env={**os.environ, "LC_ALL": "C"},
            capture_output=True,
            text=True,
            errors="replace",
            timeout=COMPILER_SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        return f"{path} does not run ({error})"
    return f"{next(iter(result.stdout.splitlines()), 'unknown version')}, {path}"


def _disk(folder: Path) -> Disk:
    absolute = folder.absolute()
    existing = next(path for path in (absolute, *absolute.parents) if path.exists())
    return Disk(str(absolute), shutil.disk_usage(existing).free)


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
