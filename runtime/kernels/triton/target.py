"""What a GPU is, as far as kernels and the choice of their tiles depend on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

# Bytes of shared memory one program may use; the launcher refuses more. From the CUDA programming
# guide (table of compute capabilities, less 1 KiB the system keeps) and the CDNA 3 ISA guide.
SHARED_MEMORY: Mapping[str, int] = {
    "sm_80": 163 * 1024,
    "sm_86": 99 * 1024,
    "sm_89": 99 * 1024,
    "sm_90": 227 * 1024,
    "sm_100": 227 * 1024,
    "sm_120": 99 * 1024,
    "gfx942": 64 * 1024,
}
# One GPU of each architecture, for checks that have none: A100, A10, L40S, H100 SXM, B200,
# RTX 5090, MI300X.
SAMPLE_SMS: Mapping[str, int] = {
    "sm_80": 108,
    "sm_86": 72,
    "sm_89": 142,
    "sm_90": 132,
    "sm_100": 148,
    "sm_120": 170,
    "gfx942": 304,
}


@dataclass(frozen=True, slots=True)
class Target:
    """A GPU.

    Attributes:
        arch: of :data:`SHARED_MEMORY`; code for it runs there.
        num_sms: multiprocessors (AMD: compute units).

    Raises:
        ValueError: an architecture no kernel was checked for.
    """

    arch: str
    num_sms: int

    def __post_init__(self) -> None:
        if self.arch not in SHARED_MEMORY:
            raise ValueError(f"arch={self.arch!r}: known are {', '.join(SHARED_MEMORY)}")

    @property
    def is_nvidia(self) -> bool:
        """Whether it speaks PTX."""
        return self.arch.startswith("sm_")

    @property
    def capability(self) -> int:
        """``90`` for sm_90; 0 where there is none."""
        return int(self.arch.removeprefix("sm_")) if self.is_nvidia else 0

    @property
    def shared_memory(self) -> int:
        """Bytes one program may use."""
        return SHARED_MEMORY[self.arch]

    @property
    def has_fp8(self) -> bool:
        """Whether it multiplies e4m3; sm_89 and later (gfx942 has another e4m3)."""
        return self.capability >= 89


def sample_target(arch: str) -> Target:
    """A usual GPU of an architecture."""
    return Target(arch, SAMPLE_SMS[arch])


def detect_target(device: torch.device) -> Target | None:
    """The GPU behind a device, or ``None`` where no kernel was checked for it.

    Code for a compute capability runs on later ones of the same generation: 8.7 takes 8.6's.
    """
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip is not None:
        arch = str(properties.gcnArchName).split(":")[0]
        return Target(arch, properties.multi_processor_count) if arch in SHARED_MEMORY else None
    capability = 10 * properties.major + properties.minor
    generation = [int(name[3:]) for name in SHARED_MEMORY if name.startswith("sm_")]
    fitting = [c for c in generation if c // 10 == properties.major and c <= capability]
    if not fitting:
        return None
    return Target(f"sm_{max(fitting)}", properties.multi_processor_count)
