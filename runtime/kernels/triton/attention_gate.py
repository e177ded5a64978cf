"""Attention and cache writes, for the gate: what is compiled, and what its code must be.

Counted are instructions of the main loop for an element of keys or values, in a decode step with
four heads of queries to one of keys. A row's scores are reduced from thread to thread, so exchanges
are no fault here; everything else is as for weights.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import triton

from qtool.runtime.kernels.backend import AttentionScope, PageForm
from qtool.runtime.kernels.triton.aot import TYPES, Compiled, compile_kernel
from qtool.runtime.kernels.triton.attention import paged_attention_kernel
from qtool.runtime.kernels.triton.attention_config import (
    AttentionTiles,
    attention_constants,
    large_tile,
    select_attention,
    value_groups,
)
from qtool.runtime.kernels.triton.attention_plan import SMALL_TILE
from qtool.runtime.kernels.triton.config import Tiles
from qtool.runtime.kernels.triton.kv_write import seal_pages_kernel, write_rows_kernel
from qtool.runtime.kernels.triton.machine_code import INT_TO_FLOAT, MachineCode
from qtool.runtime.kernels.triton.target import SHARED_MEMORY, Target

INT8, INT4 = PageForm("int8", "int8"), PageForm("int4", "int4")
WIDE, FP8, K8V4 = PageForm("wide", "wide"), PageForm("fp8", "fp8"), PageForm("int8", "int4")
NAMES = {WIDE: "16-bit", FP8: "fp8", INT8: "int8", K8V4: "k8v4", INT4: "int4"}
_COPY = re.compile(r"^LDGSTS\b.*\.128")


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """Attention over pages of 64 tokens.

    Attributes:
        tokens: rows of a sequence: 1 is a decode step.
        budgets: instructions an element in the main loop, on sm_80 and sm_90.
    """

    name: str
    form: PageForm
    tokens: int = 1
    budgets: Mapping[str, float] = field(default_factory=dict)
    dtype: torch.dtype = torch.float16
    head_dim: int = 128
    group: int = 4
    page: int = 64
    scope: AttentionScope = AttentionScope(0.1)

    def tiles(self, target: Target) -> AttentionTiles:
        """What serving chooses on a GPU."""
        block_m = SMALL_TILE if self.tokens == 1 else large_tile(target)
        return select_attention(target, self.form, self.head_dim, self.page, block_m)


def budgeted_attention() -> tuple[AttentionCase, ...]:
    """Those with a row in the table of docs/kernels.md."""
    budgets = {INT8: 3.0, INT4: 3.6}
    return tuple(
        AttentionCase(
            f"attention {NAMES[form]}",
            form,
            budgets={arch: budgets[form] for arch in ("sm_80", "sm_90") if form in budgets},
        )
        for form in (WIDE, INT8, INT4)
    )


def all_attention() -> Iterator[AttentionCase]:
    """Every form, in decode steps and prompts, and what else makes code of its own."""
    yield from budgeted_attention()
    for form in (FP8, K8V4):
        yield AttentionCase(f"attention {NAMES[form]}", form)
    for form, name in NAMES.items():
        yield AttentionCase(f"attention {name}", form, tokens=512)
    for form in (WIDE, INT8, K8V4, INT4):
        for head_dim in (64, 256):
            yield AttentionCase(f"attention {NAMES[form]}, D {head_dim}", form, head_dim=head_dim)
        yield AttentionCase(f"attention {NAMES[form]}, bf16", form, dtype=torch.bfloat16)
        scope = AttentionScope(0.1, 4096, 50.0)
        yield AttentionCase(f"attention {NAMES[form]}, window, soft cap", form, scope=scope)
    yield AttentionCase("attention 16-bit, pages of 16", WIDE, page=16)


def compile_attention(case: AttentionCase, target: Target) -> Compiled:
    """Attention as its wrapper would launch it."""
    tiles = case.tiles(target)
    plain = f"*{TYPES[case.dtype]}"
    pointers = {"q_ptr": plain, "out_ptr": plain, "tables_ptr": "*i64"}
    pointers |= dict.fromkeys(("tiles_ptr", "splits_ptr", "work_ptr", "locks_ptr"), "*i32")
    pointers |= {"partials_ptr": "*fp32"}
    for part, codes in (("key", case.form.keys), ("value", case.form.values)):
        pointers[f"{part}_words_ptr"] = plain if codes == "wide" else "*i16"
        if codes != "wide":
            by_channel = part == "key" and codes == "int4"
            pointers[f"{part}_grid_ptr"] = "*fp16" if by_channel else "*i32"
    if case.form.has_tails:
        pointers |= dict.fromkeys(("own_keys_ptr", "own_values_ptr", "tails_ptr"), plain)
    strides = ("q_stride", "own_key_stride", "own_value_stride", "table_stride")
    arguments = pointers | dict.fromkeys(strides, "i32") | {"tail_stride": "i64", "scale": "fp32"}
    constants = attention_constants(
        case.form, case.group, case.head_dim, case.page, case.scope, case.dtype, tiles,
        asm=target.is_nvidia,
    )  # fmt: skip
    return compile_kernel(
        paged_attention_kernel, arguments, constants, target, launch_of(tiles), tiles.max_registers
    )


def launch_of(tiles: AttentionTiles) -> Tiles:
    """The same as the tiles of a product: rows by the tokens of a page."""
    return Tiles(tiles.block_m, 64, tiles.num_warps, tiles.num_stages)


def instructions_per_element(code: MachineCode, case: AttentionCase, target: Target) -> float:
    """A thread's instructions for a page, over its elements of keys and values there."""
    threads = case.tiles(target).num_warps * (32 if target.is_nvidia else 64)
    return len(code.loop) * threads / (2 * case.page * case.head_dim)


def attention_violations(case: AttentionCase, target: Target, code: MachineCode) -> Iterator[str]:
    """What is wrong with a kernel's code, budgets aside."""
    if not code.loop:
        yield "no main loop found"
    if code.stack:
        yield f"stack of {code.stack} bytes: registers spill"
    if code.shared > SHARED_MEMORY[target.arch]:
        yield f"{code.shared} bytes of shared memory, limit {SHARED_MEMORY[target.arch]}"
    expected = expected_matrix(case, target)
    if not code.matrix or not code.matrix <= expected:
        found = ", ".join(sorted(code.matrix)) or "none"
        yield f"matrix instructions {found}, expected {' or '.join(sorted(expected))}"
    if count := code.count(INT_TO_FLOAT):
        yield f"{count} conversions of integers in the main loop"
    if target.is_nvidia and not code.count(_COPY):
        yield "no asynchronous copies of 16 bytes in the main loop"


def expected_matrix(case: AttentionCase, target: Target) -> frozenset[str]:
    """Matrix instructions that will do: operands have 16 bits."""
    if not target.is_nvidia:
        return frozenset({"v_mfma"})
    if target.capability >= 90 and case.tokens > 1:
        return frozenset({"HGMMA", "HMMA"} if target.capability == 90 else {"UTCHMMA", "HMMA"})
    return frozenset({"HMMA"})


@dataclass(frozen=True, slots=True)
class StoreCase:
    """A kernel that stores rows, or seals pages that have 4-bit codes."""

    name: str
    form: PageForm
    tokens: int = 1
    budgets: Mapping[str, float] = field(default_factory=dict)
    head_dim: int = 128
    group: int = 4
    page: int = 64

    @property
    def seals(self) -> bool:
        """Whether it is the kernel that stores full pages."""
        return self.form.has_tails

    def tiles(self, target: Target) -> AttentionTiles:
        """What serving chooses."""
        return AttentionTiles(SMALL_TILE, self.head_dim, 4 if self.seals else 1, 3)


def stores() -> Iterator[StoreCase]:
    """For each form the kernel that writes its pages: row by row, or full ones."""
    for form, name in NAMES.items():
        yield StoreCase(f"{'seal' if form.has_tails else 'store'} {name}", form)


def compile_store(case: StoreCase, target: Target) -> Compiled:
    """A write of a decode step's rows, or the seal, as their wrapper would launch them."""
    plain, form = "*bf16", case.form
    arguments = {
        "keys_ptr": plain,
        "values_ptr": plain,
        "key_words_ptr": plain if form.keys == "wide" else "*i16",
        "value_words_ptr": plain if form.values == "wide" else "*i16",
    }
    arguments |= dict.fromkeys(("key_stride", "value_stride"), "i32") | {"tail_stride": "i64"}
    if form.keys != "wide":
        arguments |= {"key_grid_ptr": "*fp16", "value_grid_ptr": "*fp16"}
    constants: dict[str, Any] = {"D": case.head_dim, "PAGE": case.page}
    if case.seals:
        arguments |= {"pages_ptr": "*i32", "tables_ptr": "*i64", "tails_ptr": plain}
        arguments["table_stride"] = "i32"
        constants |= {"KEYS": form.keys, "VALUE_GROUPS": value_groups(case.head_dim)}
        kernel = seal_pages_kernel
    else:
        arguments |= dict.fromkeys(("q_ptr", "cos_ptr", "sin_ptr", "q_out_ptr"), plain)
        arguments |= {"slots_ptr": "*i64", "q_stride": "i32", "T": "i32"}
        constants |= {
            "ROWS": 1, "GROUP": case.group, "HEADS": triton.next_power_of_2(case.group),
            "ROTARY": case.head_dim, "CODES": form.keys, "TO_TAILS": False,
        }  # fmt: skip
        kernel = write_rows_kernel
    return compile_kernel(kernel, arguments, constants, target, launch_of(case.tiles(target)))
