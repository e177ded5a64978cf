"""The gate's rows for attention: they compile what serving chooses, and name every fault."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")
from qtool.runtime.kernels.backend import PageForm
from qtool.runtime.kernels.triton.attention_config import (
    FORMS,
    HEAD_DIMS,
    select_attention,
    why_not_attention,
)
from qtool.runtime.kernels.triton.attention_gate import (
    all_attention,
    attention_violations,
    budgeted_attention,
    expected_matrix,
    instructions_per_element,
    stores,
)
from qtool.runtime.kernels.triton.gate import ARCHES, attention_to_check, pairs
from qtool.runtime.kernels.triton.machine_code import MachineCode
from qtool.runtime.kernels.triton.target import SHARED_MEMORY, sample_target

INT8 = budgeted_attention()[1]
SM80 = sample_target("sm_80")
GOOD = MachineCode(
    registers=150,
    stack=0,
    shared=40_000,
    matrix=frozenset({"HMMA"}),
    loop=("LDGSTS.E.BYPASS.128", "LDSM.16.M88.4", "SHFL.BFLY", "HMMA.16816.F32", "BRA"),
)


def test_a_good_kernel_passes_although_scores_are_reduced_between_threads() -> None:
    assert list(attention_violations(INT8, SM80, GOOD)) == []
    assert instructions_per_element(GOOD, INT8, SM80) == 5 * 64 / (2 * 64 * 128)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ({"stack": 8}, "stack of 8 bytes"),
        ({"shared": 167_000}, "167000 bytes of shared memory, limit 166912"),
        ({"matrix": frozenset({"IMMA"})}, "matrix instructions IMMA, expected HMMA"),
        ({"loop": ()}, "no main loop"),
        ({"loop": (*GOOD.loop, "I2F.F16")}, "1 conversions of integers"),
        ({"loop": GOOD.loop[1:]}, "no asynchronous copies of 16 bytes"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_every_fault_is_named(fault: dict[str, object], words: str) -> None:
    found = attention_violations(INT8, SM80, replace(GOOD, **fault))  # type: ignore[arg-type]
    assert any(words in violation for violation in found)


def test_budgets_are_of_decode_steps_and_all_forms_are_checked() -> None:
    everything = list(all_attention())
    assert {(case.form.keys, case.form.values) for case in everything} == set(FORMS)
    for case in budgeted_attention():
        assert case in everything and case.tokens == 1
    listed = list(attention_to_check(everything=True))
    assert listed == [*everything, *stores()]
    assert len(list(pairs(listed, ARCHES))) == len(listed) * len(ARCHES)
    assert list(attention_to_check(everything=False)) == list(budgeted_attention())


@pytest.mark.parametrize("arch", SHARED_MEMORY)
def test_two_programs_of_a_decode_step_fit_on_a_multiprocessor(arch: str) -> None:
    target = sample_target(arch)
    for keys, values in FORMS:
        for head_dim in HEAD_DIMS[:4]:
            tiles = select_attention(target, PageForm(keys, values), head_dim, 64, 16)
            bits = {"wide": 16, "int8": 8, "fp8": 8, "int4": 4}
            width = 64 if head_dim == 64 else 128
            page = 64 * width * (bits[keys] + bits[values]) // 8
            assert 2 * (tiles.num_stages - 1) * page <= target.shared_memory
            assert tiles.num_stages >= 2 and tiles.num_warps <= 2


def test_prompts_take_hoppers_instruction() -> None:
    case = replace(INT8, tokens=512)
    assert "HGMMA" in expected_matrix(case, sample_target("sm_90"))
    assert expected_matrix(INT8, sample_target("sm_90")) == {"HMMA"}
    assert expected_matrix(case, sample_target("gfx942")) == {"v_mfma"}


@pytest.mark.parametrize(
    ("form", "head_dim", "page", "dtype", "words"),
    [
        (PageForm("wide", "wide"), 128, 64, torch.float32, "computing in float32"),
        (PageForm("int4", "int8"), 128, 64, torch.half, "no kernel for int4 keys with int8 values"),
        (PageForm("int8", "int8"), 72, 64, torch.half, "head_dim is 72"),
        (PageForm("int8", "int8"), 128, 24, torch.half, "block_size is 24"),
        (PageForm("int8", "int8"), 128, 256, torch.half, "block_size is 256"),
    ],
)
def test_what_is_not_taken_says_why(
    form: PageForm, head_dim: int, page: int, dtype: torch.dtype, words: str
) -> None:
    reason = why_not_attention(form, head_dim, page, dtype)
    assert reason is not None and words in reason
    assert why_not_attention(PageForm("int8", "int8"), 128, 64, torch.bfloat16) is None
