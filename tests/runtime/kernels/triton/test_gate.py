"""The gate reads machine code rightly and says what is wrong with it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from qtool.cli import main

pytest.importorskip("triton")
from qtool.runtime.kernels.triton import gate
from qtool.runtime.kernels.triton.config import Tiles, select_config
from qtool.runtime.kernels.triton.gate import (
    ARCHES,
    Case,
    all_cases,
    budgeted_cases,
    expected_matrix,
    gemm_shape,
    instructions_per_weight,
    pairs,
    violations_of,
)
from qtool.runtime.kernels.triton.layout import Codes
from qtool.runtime.kernels.triton.machine_code import MachineCode, parse_amd, parse_sass, sass_loops
from qtool.runtime.kernels.triton.target import sample_target

SASS = """
        /*0000*/                   MOV R1, c[0x0][0x28] ;                  /* 0x00000a0000017a02 */
        /*0010*/                   IADD3 R2, R2, 0x1, RZ ;                 /* 0x0000000102027810 */
        /*0020*/                   LDGSTS.E.BYPASS.128 [R3], [R4.64] ;     /* 0x0000000004037fae */
        /*0030*/                   HMMA.16816.F32 R4, R8, R12, R4 ;        /* 0x0000000c0804723c */
        /*0040*/              @!P0 BRA 0x20 ;                              /* 0xffffffd000008947 */
        /*0050*/               @P1 BRA 0x70 ;                              /* 0x0000001000001947 */
        /*0060*/                   EXIT ;                                  /* 0x000000000000794d */
        /*0070*/                   BRA 0x10 ;                              /* 0xfffffff000007947 */
"""
GOOD = MachineCode(
    registers=96,
    stack=0,
    shared=25600,
    matrix=frozenset({"HMMA"}),
    loop=("LDGSTS.E.BYPASS.128", "LDSM.16.M88.4", "LOP3.LUT", "HMMA.16816.F32", "BRA"),
)
CASE = budgeted_cases()[0]
SM80 = sample_target("sm_80")
TILES = Tiles(8, 64, 2, 5)


def test_loops_are_found_by_jumps_backwards() -> None:
    instructions = parse_sass(SASS)
    assert [i.name for i in instructions][:3] == ["MOV", "IADD3", "LDGSTS.E.BYPASS.128"]
    inner, outer = sass_loops(instructions)
    assert [i.address for i in inner] == [0x20, 0x30, 0x40]
    assert outer[0].address == 0x10 and outer[-1].address == 0x70


def test_amd_labels_point_to_instructions() -> None:
    text = "kernel:\n\ts_mov_b32 s0, 1 ; a comment\n.LBB0_1:\n"
    text += "\tv_mfma_f32_16x16x16_f16 a[0:3], v0, v1\n"
    instructions, labels = parse_amd(text + "\ts_cbranch_scc0 .LBB0_1\n")
    assert [i.name for i in instructions][1:] == ["v_mfma_f32_16x16x16_f16", "s_cbranch_scc0"]
    assert labels[".LBB0_1"] == 1


def test_a_good_kernel_passes() -> None:
    assert list(violations_of(CASE, SM80, TILES, GOOD)) == []
    assert instructions_per_weight(GOOD, CASE.shape, TILES, SM80) == 5 * 64 / (64 * 128)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ({"stack": 8}, "stack of 8 bytes"),
        ({"shared": 167_000}, "167000 bytes of shared memory, limit 166912"),
        ({"matrix": frozenset({"IMMA"})}, "matrix instructions IMMA, expected HMMA"),
        ({"matrix": frozenset()}, "matrix instructions none"),
        ({"loop": ()}, "no main loop"),
        ({"loop": (*GOOD.loop, "I2F.F16")}, "1 conversions of integers"),
        ({"loop": (*GOOD.loop, "STS.128", "SHFL.BFLY")}, "2 exchanges between threads"),
        ({"loop": ("LDGSTS.E.64", *GOOD.loop[1:])}, "no asynchronous copies of 16 bytes"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_every_fault_is_named(fault: dict[str, object], words: str) -> None:
    found = list(violations_of(CASE, SM80, TILES, replace(GOOD, **fault)))  # type: ignore[arg-type]
    assert any(words in violation for violation in found)


@pytest.mark.parametrize(
    ("codes", "arch", "warps", "expected"),
    [
        (Codes.INT4, "sm_80", 2, "HMMA"),
        (Codes.INT4, "sm_90", 2, "HMMA"),
        (Codes.INT4, "sm_90", 4, "HGMMA"),
        (Codes.INT8_BYTES, "sm_89", 2, "IMMA"),
        (Codes.INT8_BYTES, "sm_90", 8, "IGMMA"),
        (Codes.FP8_BYTES, "sm_89", 2, "QMMA"),
        (Codes.FP8_BYTES, "sm_90", 4, "QGMMA"),
        (Codes.INT4, "sm_100", 4, "UTCHMMA"),
        (Codes.INT4, "gfx942", 2, "v_mfma"),
    ],
)
def test_each_gpu_has_its_matrix_instruction(
    codes: Codes, arch: str, warps: int, expected: str
) -> None:
    case = Case("", gemm_shape(codes, None), torch.float16, 8, {})
    assert expected in expected_matrix(case, sample_target(arch), Tiles(16, 64, warps, 3))


def test_every_budget_is_of_a_kernel_that_serving_chooses() -> None:
    everything = list(all_cases())
    for case in budgeted_cases():
        assert case in everything
        for arch in ARCHES:
            tiles = case.tiles(sample_target(arch))
            if not case.experts:
                assert tiles == select_config(sample_target(arch), case.shape, case.tokens)
    assert len(budgeted_cases()) == 11


def test_every_kernel_of_the_package_is_in_the_gate() -> None:
    folder = Path(gate.__file__).parent
    found = {
        name
        for file in folder.glob("*.py")
        for name in re.findall(r"@triton\.jit[^@]*?\ndef (\w+_kernel)\(", file.read_text("utf-8"))
    }
    rows = {case.kernel.fn.__name__ for case in gate.rows_to_check()}
    products = {"weight_gemm_kernel", "byte_gemm_kernel", "paged_attention_kernel"}
    assert found == rows | products | {"write_rows_kernel", "seal_pages_kernel"}


def test_e4m3_products_are_compiled_only_where_they_are_run() -> None:
    fp8 = [case for case in all_cases() if case.shape.codes is Codes.FP8_BYTES]
    assert {arch for _, arch in pairs(fp8, ARCHES)} == {"sm_89", "sm_90", "sm_100"}
    in_float16 = [case for case in all_cases() if case.token_steps]
    assert {arch for _, arch in pairs(in_float16, ARCHES)} == {"sm_80", "sm_86", "gfx942"}


SCRIPT = """
import json, torch
from qtool.runtime.kernels.triton.aot import compile_gemm
from qtool.runtime.kernels.triton.config import Tiles
from qtool.runtime.kernels.triton.gate import budgeted_cases, check
from qtool.runtime.kernels.triton.machine_code import read_code
from qtool.runtime.kernels.triton.target import sample_target
case = budgeted_cases()[0]
finding = check(case, "sm_80")
spilling = compile_gemm(sample_target("sm_80"), case.shape, Tiles(128, 128, 4, 3), torch.float16)
print(json.dumps([finding.violations, finding.per_weight, read_code(spilling).stack]))
"""


def test_real_machine_code_passes_and_a_spill_is_seen(checkout_env: dict[str, str]) -> None:
    environment = {k: v for k, v in checkout_env.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    violations, per_weight, stack = json.loads(done.stdout.splitlines()[-1])
    assert violations == [] and 1.5 < per_weight < 2.2 and stack > 0


def test_the_interpreter_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    result = CliRunner().invoke(main, ["kernels", "check"])
    assert result.exit_code == 2
    assert "TRITON_INTERPRET is set, and Triton's interpreter compiles nothing" in result.output
