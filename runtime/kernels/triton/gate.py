"""The gate: what the machine code of every kernel must be, checked without a GPU.

For each architecture the kernels that :mod:`.config` would choose there are compiled and held
against: no stack, shared memory within the limit, the matrix instruction meant, weights copied
asynchronously 16 bytes at a time, nothing converted from integers or between layouts in the
main loop, and a budget of instructions a weight. Why budgets: a multiprocessor issues 128
thread instructions a clock, in which an A100's memory brings 25 weights of 4 bits, an H200's 40.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
import triton

from qtool.runtime.kernels.triton.aot import compile_gemm
from qtool.runtime.kernels.triton.attention_gate import (
    AttentionCase,
    StoreCase,
    all_attention,
    attention_violations,
    budgeted_attention,
    compile_attention,
    compile_store,
    instructions_per_element,
    launch_of,
    stores,
)
from qtool.runtime.kernels.triton.config import (
    BUCKETS,
    GemmShape,
    Tiles,
    Zeros,
    select_config,
    select_experts_config,
)
from qtool.runtime.kernels.triton.layout import Codes
from qtool.runtime.kernels.triton.machine_code import (
    EXCHANGE,
    INT_TO_FLOAT,
    MachineCode,
    read_code,
)
from qtool.runtime.kernels.triton.row_gate import RowCase, compile_row, row_cases
from qtool.runtime.kernels.triton.target import SHARED_MEMORY, Target, sample_target

ARCHES = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "gfx942")
# Budgets were counted with this compiler; under another one they are shown, not enforced.
TRITON = "3.9"
SLACK = 1.03
# sm_86 and sm_89 have sm_80's budgets; on the others figures are recorded.
BUDGET_OF: Mapping[str, str] = {
    "sm_80": "sm_80",
    "sm_86": "sm_80",
    "sm_89": "sm_80",
    "sm_90": "sm_90",
}
_COPY = re.compile(r"^LDGSTS\b.*\.128$|^LDGSTS\.E\.BYPASS(\.\w+)*\.128|^UBLKCP|^UTMALDG")
ROWS = COLUMNS = 8192


@dataclass(frozen=True, slots=True)
class Case:
    """A kernel by name.

    Attributes:
        dtype: of activations, or of the result of 8-bit products.
        tokens: rows of the product.
        budgets: instructions a weight in the main loop, on sm_80 and sm_90.
        gated: whether rows are a gate and its up projection.
        experts: of a mixture, each with such a weight, eight of them a token; 0: none.
        token_steps: whether tokens of 16-bit products have a scale a step.
    """

    name: str
    shape: GemmShape
    dtype: torch.dtype
    tokens: int
    budgets: Mapping[str, float]
    gated: bool = False
    experts: int = 0
    token_steps: bool = False

    def runs_on(self, target: Target) -> bool:
        """e4m3 products need the hardware; blocks are multiplied in 16 bits where it is missing."""
        if self.token_steps:
            return not target.has_fp8
        return self.shape.codes is not Codes.FP8_BYTES or target.has_fp8

    def tiles(self, target: Target) -> Tiles:
        """What serving chooses on a GPU."""
        if self.experts:
            return select_experts_config(target, self.shape, 8 * self.tokens, self.experts)
        tiles = select_config(target, self.shape, self.tokens)
        assert tiles is not None, "cases stay below the length at which weights are dequantized"
        return tiles


AnyCase: TypeAlias = Case | AttentionCase | StoreCase | RowCase


@dataclass(frozen=True, slots=True)
class Finding:
    """A case on one architecture.

    Attributes:
        tiles: of a product or of attention.
        per_weight: instructions of the main loop a weight, or an element of keys and values;
            ``None`` for a kernel without one.
        budget: what it may be, or ``None``.
        violations: what is wrong, one phrase each.
    """

    case: AnyCase
    arch: str
    tiles: Tiles | None
    code: MachineCode
    per_weight: float | None
    budget: float | None
    violations: tuple[str, ...]

    @property
    def label(self) -> str:
        """Its name in one line."""
        tokens = (
            f", {self.case.tokens} tokens" if isinstance(self.case, Case | AttentionCase) else ""
        )
        return f"{self.case.name}{tokens}, {self.arch}"


def budget_note() -> str | None:
    """What is not enforced under this compiler, or ``None``."""
    if triton.__version__.startswith(f"{TRITON}."):
        return None
    return (
        f"budgets were counted with Triton {TRITON}; under {triton.__version__} instructions a "
        "weight are shown and not enforced"
    )


def gemm_shape(codes: Codes, group: int | None, zeros: Zeros = "constant") -> GemmShape:
    """A weight of 8192 x 8192 in groups, or with a scale a row (``None``)."""
    step = min(group or 128, 128)
    if group is not None and codes in (Codes.INT4, Codes.INT8):
        zeros = "groups"
    return GemmShape(codes, ROWS, COLUMNS // step, step, group is not None, zeros)


def budgeted_cases() -> tuple[Case, ...]:
    """The rows of the budget table in docs/kernels.md."""
    fp16, bf16 = torch.float16, torch.bfloat16
    int4 = {group: gemm_shape(Codes.INT4, group) for group in (128, 64, 32)}
    int8, fp8 = gemm_shape(Codes.INT8, None), gemm_shape(Codes.FP8, None)
    bytes8 = gemm_shape(Codes.INT8_BYTES, None)

    def case(
        name: str, shape: GemmShape, dtype: torch.dtype, tokens: int, a: float, h: float
    ) -> Case:
        return Case(name, shape, dtype, tokens, {"sm_80": a, "sm_90": h})

    return (
        case("W4A16 g128 fp16", int4[128], fp16, 8, 2.0, 2.0),
        case("W4A16 g128 bf16", int4[128], bf16, 8, 2.4, 2.7),
        case("W4A16 g128 fp16", int4[128], fp16, 16, 2.3, 2.3),
        case("W4A16 g128 fp16", int4[128], fp16, 32, 2.9, 2.6),
        case("W4A16 g64 fp16", int4[64], fp16, 8, 2.5, 2.5),
        case("W4A16 g32 fp16", int4[32], fp16, 8, 3.7, 3.7),
        case("W8A16 fp16", int8, fp16, 16, 2.4, 2.4),
        case("W8A16 bf16", int8, bf16, 16, 4.2, 4.2),
        case("FP8 W8A16 fp16", fp8, fp16, 16, 3.3, 2.9),
        case("W8A8 INT8", bytes8, fp16, 16, 1.4, 1.4),
        replace(case("W4A16 g128 fp16, experts", int4[128], fp16, 16, 2.0, 2.0), experts=128),
    )


def all_cases() -> Iterator[Case]:
    """Every kind of weight, dtype and bucket; those with a budget have it."""
    budgeted = {(c.shape, c.dtype, c.tokens): c for c in budgeted_cases() if not c.experts}
    for name, shape in _every_shape():
        for dtype, suffix in ((torch.float16, "fp16"), (torch.bfloat16, "bf16")):
            if shape.is_bytes and dtype == torch.bfloat16:
                continue  # the result's dtype changes nothing in the loop
            for tokens in BUCKETS[:5]:
                plain = Case(f"{name} {suffix}", shape, dtype, tokens, {})
                yield budgeted.get((shape, dtype, tokens), plain)
    for tokens in BUCKETS[:5]:
        for codes, group in ((Codes.INT4, 128), (Codes.INT8_BYTES, None)):
            shape = gemm_shape(codes, group)
            name = f"{codes.value}, gate and up"
            yield Case(name, shape, torch.float16, tokens, {}, gated=True)
        blocks = gemm_shape(Codes.FP8, 128)
        name = "FP8 blocks x FP8 in float16"
        yield Case(name, blocks, torch.float16, tokens, {}, token_steps=True)
    yield from (case for case in budgeted_cases() if case.experts)
    yield from _experts()


def _experts() -> Iterator[Case]:
    """Mixtures of 128 experts: decode, and prompts that give each of them 32 and 64 rows."""
    for tokens in (16, 512, 1024):
        for codes, group in (
            (Codes.INT4, 128),
            (Codes.INT8_BYTES, None),
            (Codes.FP8_BYTES, 128),
        ):
            shape, name = gemm_shape(codes, group), f"{codes.value}, experts"
            yield Case(f"{name}, gate and up" if group is None else name, shape, torch.bfloat16,
                       tokens, {}, gated=group is None, experts=128)  # fmt: skip


def rows_to_check() -> tuple[RowCase, ...]:
    """Kernels without a matrix product."""
    shapes = {
        "W4 g128": gemm_shape(Codes.INT4, 128),
        "W8": gemm_shape(Codes.INT8, None),
        "FP8": gemm_shape(Codes.FP8, None),
    }
    return tuple(row_cases(shapes))


def attention_to_check(*, everything: bool) -> Iterator[AttentionCase | StoreCase]:
    """Attention over the cache, and what writes it; without ``everything`` what has a budget."""
    yield from all_attention() if everything else budgeted_attention()
    yield from stores() if everything else ()


def _every_shape() -> Iterator[tuple[str, GemmShape]]:
    for group in (128, 64, 32):
        yield f"W4A16 g{group}", gemm_shape(Codes.INT4, group)
    yield "W4A16 row sym", gemm_shape(Codes.INT4, None)
    yield "W4A16 row asym", gemm_shape(Codes.INT4, None, "rows")
    yield "W8A16 g128", gemm_shape(Codes.INT8, 128)
    yield "W8A16", gemm_shape(Codes.INT8, None)
    yield "FP8 W8A16", gemm_shape(Codes.FP8, None)
    yield "W8A8 INT8", gemm_shape(Codes.INT8_BYTES, None)
    yield "W8A8 FP8", gemm_shape(Codes.FP8_BYTES, None)
    yield "W8A8 FP8 blocks", gemm_shape(Codes.FP8_BYTES, 128)


def pairs(cases: Iterable[AnyCase], arches: Iterable[str]) -> Iterator[tuple[AnyCase, str]]:
    """Every case on every architecture where it is run."""
    for case in cases:
        for arch in arches:
            if not isinstance(case, Case) or case.runs_on(sample_target(arch)):
                yield case, arch


def check(case: AnyCase, arch: str) -> Finding:
    """Compile what serving would run and look at its code."""
    target = sample_target(arch)
    if isinstance(case, Case):
        return _check_product(case, arch, target)
    if isinstance(case, AttentionCase):
        tiles, code = launch_of(case.tiles(target)), read_code(compile_attention(case, target))
        found = instructions_per_element(code, case, target)
        return _finding(case, arch, tiles, code, found, attention_violations(case, target, code))
    launch, compiled = (
        (None, compile_row(case, target))
        if isinstance(case, RowCase)
        else (launch_of(case.tiles(target)), compile_store(case, target))
    )
    code = read_code(compiled)
    return Finding(case, arch, launch, code, None, None, tuple(resource_violations(target, code)))


def _check_product(case: Case, arch: str, target: Target) -> Finding:
    tiles = case.tiles(target)
    compiled = compile_gemm(
        target,
        case.shape,
        tiles,
        case.dtype,
        gated=case.gated,
        experts=case.experts > 0,
        token_steps=case.token_steps,
    )
    code = read_code(compiled)
    per_weight = instructions_per_weight(code, case.shape, tiles, target)
    wrong = violations_of(case, target, tiles, code)
    return _finding(case, arch, tiles, code, per_weight, wrong)


def _finding(
    case: Case | AttentionCase,
    arch: str,
    tiles: Tiles,
    code: MachineCode,
    per_weight: float,
    wrong: Iterable[str],
) -> Finding:
    """What was found, and whether it keeps to its budget."""
    budget, violations = case.budgets.get(BUDGET_OF.get(arch, "")), list(wrong)
    if budget_note() is None and budget is not None and per_weight > budget * SLACK:
        unit = "a weight" if isinstance(case, Case) else "an element"
        violations.append(f"{per_weight:.2f} instructions {unit}, budget {budget}")
    return Finding(case, arch, tiles, code, per_weight, budget, tuple(violations))


def instructions_per_weight(
    code: MachineCode, shape: GemmShape, tiles: Tiles, target: Target
) -> float:
    """A thread's instructions in the main loop over its weights there."""
    threads = tiles.num_warps * (32 if target.is_nvidia else 64)
    return len(code.loop) / (tiles.block_n * shape.step / threads)


def expected_matrix(case: Case, target: Target, tiles: Tiles) -> frozenset[str]:
    """Matrix instructions that will do, by what is multiplied."""
    if not target.is_nvidia:
        return frozenset({"v_mfma"})
    letter = {Codes.INT8_BYTES: "I", Codes.FP8_BYTES: "Q"}.get(case.shape.codes, "H")
    if target.capability == 90 and tiles.num_warps >= 4:
        return frozenset({f"{letter}GMMA"})
    if target.capability >= 100:
        return frozenset({f"UTC{letter}MMA", f"{letter}MMA"})
    return frozenset({f"{letter}MMA"})


def resource_violations(target: Target, code: MachineCode) -> Iterator[str]:
    """What no kernel may use."""
    if code.stack:
        yield f"stack of {code.stack} bytes: registers spill"
    limit = SHARED_MEMORY[target.arch]
    if code.shared > limit:
        yield f"{code.shared} bytes of shared memory, limit {limit}"


def violations_of(case: Case, target: Target, tiles: Tiles, code: MachineCode) -> Iterator[str]:
    """What is wrong with a product's code, budgets aside."""
    if not code.loop:
        yield "no main loop found"
    yield from resource_violations(target, code)
    expected = expected_matrix(case, target, tiles)
    if not code.matrix or not code.matrix <= expected:
        found = ", ".join(sorted(code.matrix)) or "none"
        yield f"matrix instructions {found}, expected {' or '.join(sorted(expected))}"
    if count := code.count(INT_TO_FLOAT):
        yield f"{count} conversions of integers in the main loop"
    if not target.is_nvidia:
        return
    if count := code.count(EXCHANGE):
        yield f"{count} exchanges between threads in the main loop: a layout conversion"
    if not code.count(_COPY):
        yield "no asynchronous copies of 16 bytes in the main loop"
