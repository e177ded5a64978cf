"""Which tiles attention takes, and the kernel's compile-time parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from qtool.runtime.kernels.backend import AttentionScope, PageForm
from qtool.runtime.kernels.triton.target import Target

BYTES_AND_NIBBLES = ("int8", "int4")
# What the kernels read: keys, values.
FORMS = (("wide", "wide"), ("fp8", "fp8"), ("int8", "int8"), BYTES_AND_NIBBLES, ("int4", "int4"))
HEAD_DIMS = (64, 80, 96, 128, 256)
PLANES = {"wide": 1, "int8": 2, "fp8": 2, "int4": 4}
BITS = {"wide": 16, "int8": 8, "fp8": 8, "int4": 4}
# Probabilities times the scales of values are float16. As powers of two, factors that keep
# the largest finite for any value that float16 holds, and the usual ones away from subnormals.
LOG_FACTOR = {"wide": 0, "int8": 6, "fp8": 8, "int4": 0}
FP8_SHORT = 256.0  # what float16 operands of e4m3 are short of
OPERANDS = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


@dataclass(frozen=True, slots=True)
class AttentionTiles:
    """One compiled form.

    Attributes:
        block_m: rows of a tile: tokens times heads of queries that share one of keys.
        value_places: channels of a row's sums, filled up.
        num_warps, num_stages: as Triton means them.
        max_registers: of a thread; ``None`` leaves it to ptxas.
    """

    block_m: int
    value_places: int
    num_warps: int
    num_stages: int
    max_registers: int | None = None

    @property
    def options(self) -> dict[str, int]:
        """How the kernel is launched; AMD's compiler knows no limit of registers."""
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        if self.max_registers is not None:
            options["maxnreg"] = self.max_registers
        return options


def why_not_attention(form: PageForm, head_dim: int, page: int, dtype: torch.dtype) -> str | None:
    """What keeps a cache from the kernels, or ``None``."""
    if dtype not in OPERANDS:
        return f"computing in {str(dtype).removeprefix('torch.')}"
    if (form.keys, form.values) not in FORMS:
        return f"there is no kernel for {form.keys} keys with {form.values} values"
    if head_dim not in HEAD_DIMS:
        return f"head_dim is {head_dim}; the kernels take {', '.join(map(str, HEAD_DIMS))}"
    if page < 16 or page > 128 or page & (page - 1):
        return f"block_size is {page}; the kernels take 16, 32, 64 or 128"
    return None


def large_tile(target: Target) -> int:
    """Rows of a tile where a sequence has many.

    Hopper's instruction takes 64. Others unpack a page once for every warp that holds rows, so
    their tiles have no more rows than two warps hold, and more would not fit in registers.
    """
    return 64 if target.capability >= 90 else 32


def select_attention(
    target: Target, form: PageForm, head_dim: int, page: int, block_m: int
) -> AttentionTiles:
    """Tiles of a layer's attention: a pure function.

    Two warps for few rows: four would each unpack a quarter of a page, and exchange more than
    they compute. Stages as shared memory has room for two programs of them.
    """
    places = padded(head_dim, PLANES[form.values]), padded(head_dim, PLANES[form.keys])
    stage = page * (places[1] * BITS[form.keys] + places[0] * BITS[form.values]) // 8
    room = (target.shared_memory // 2 - 8192) // stage
    stages = max(2, min(3, 1 + room)) if target.is_nvidia else 2
    if head_dim > 128 and block_m <= 16:
        # Wide heads fill the registers; with the other number of stages ptxas spills 8 bytes.
        if target.capability == 90 and form.keys == "wide":
            stages = 3
        elif target.capability in (86, 89) and form.keys == "int4":
            stages = 2
    most = 255 if _needs_all_registers(target, form, block_m) else None
    return AttentionTiles(block_m, places[0], _warps(form, head_dim, block_m), stages, most)


def _needs_all_registers(target: Target, form: PageForm, block_m: int) -> bool:
    """Whether ptxas would spill: it stops at 168 for one more program on a multiprocessor.

    Bytes beside 4 bits take 168 to 220 registers and spilled up to 32 bytes; large tiles of 4 bits
    on sm_100 take 199 and spilled 16.
    """
    if not target.is_nvidia:
        return False
    large = target.capability == 100 and form.keys == "int4" and block_m > 16
    return large or (form.keys, form.values) == BYTES_AND_NIBBLES


def _warps(form: PageForm, head_dim: int, block_m: int) -> int:
    if head_dim > 128:
        few = 2 if (form.keys, form.values) == BYTES_AND_NIBBLES else 4  # 2.4 for 2.7 an element
        return few if block_m <= 16 else 8
    if block_m <= 16 and head_dim == 64 and form.values == "int4":
        return 1  # planes of 16 channels are two instructions wide
    return 2 if block_m <= 32 else 4


def value_groups(head_dim: int) -> int:
    """Groups of 4-bit values: of 64, or the whole head where that does not divide it."""
    return head_dim // 64 if head_dim % 64 == 0 else 1


def padded(head_dim: int, planes: int) -> int:
    """Places of planes whose widths are filled up to powers of two."""
    return planes * int(triton.next_power_of_2(head_dim // planes))


def attention_constants(
    form: PageForm,
    group: int,
    head_dim: int,
    page: int,
    scope: AttentionScope,
    dtype: torch.dtype,
    tiles: AttentionTiles,
    *,
    asm: bool,
    interpreted: bool = False,
) -> dict[str, Any]:
    """The kernel's compile-time parameters."""
    operand = tl.float16
    if form.keys == "wide":
        operand = tl.float32 if interpreted and dtype == torch.bfloat16 else OPERANDS[dtype]
    return {
        "GROUP": group,
        "D": head_dim,
        "PAGE": page,
        "BLOCK_M": tiles.block_m,
        "KEYS": form.keys,
        "VALUES": form.values,
        "VALUE_GROUPS": value_groups(head_dim) if form.values == "int4" else 1,
        "WINDOW": scope.window or 0,
        "CAP": scope.softcap or 0.0,
        "LOG_FACTOR": LOG_FACTOR[form.values],
        "VALUE_FACTOR": FP8_SHORT if form.values == "fp8" else 1.0,
        "OPERAND": operand,
        "ASM": asm,
    }
