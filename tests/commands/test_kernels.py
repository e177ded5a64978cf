"""qtool kernels check: what it prints, and that a violation ends in exit code 1."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from qtool.commands import kernels
from qtool.commands.console import Show
from qtool.errors import KernelError, UsageError

pytest.importorskip("triton")
from qtool.runtime.kernels.triton import gate
from qtool.runtime.kernels.triton.config import Tiles
from qtool.runtime.kernels.triton.machine_code import MachineCode

CODE = MachineCode(96, 0, 25600, frozenset({"HMMA"}), ("HMMA",) * 256)


def _fake_gate(rows: int = 0, attention: int = 0, **violations: tuple[str, ...]) -> Any:
    """The real gate, but for compiling: each architecture has the violations given."""

    def check(case: gate.AnyCase, arch: str) -> gate.Finding:
        found = violations.get(arch, ())
        if isinstance(case, gate.RowCase):
            return gate.Finding(case, arch, None, CODE, None, None, found)
        return gate.Finding(case, arch, Tiles(8, 64, 2, 5), CODE, 2.0, 2.0, found)

    def one_case() -> Iterable[gate.Case]:
        return gate.budgeted_cases()[:1]

    def all_cases() -> Iterator[gate.Case]:
        yield gate.Case("everything", gate.budgeted_cases()[0].shape, torch.float16, 64, {})

    return SimpleNamespace(
        ARCHES=("sm_80", "sm_90"),
        budgeted_cases=one_case,
        all_cases=all_cases,
        rows_to_check=lambda: gate.rows_to_check()[:rows],
        attention_to_check=lambda everything: gate.budgeted_attention()[:attention],
        budget_note=lambda: None,
        pairs=gate.pairs,
        check=check,
    )


def test_good_kernels_are_a_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kernels, "load_gate", _fake_gate)
    kernels.run(Show(as_json=True, quiet=True), everything=False, arches=())
    rows = json.loads(capsys.readouterr().out)["kernels"]
    assert [row["arch"] for row in rows] == ["sm_80", "sm_90"]
    assert rows[0]["instructions_per_weight"] == 2.0 and rows[0]["violations"] == []
    kernels.run(Show(as_json=True, quiet=True), everything=True, arches=("sm_90",))
    (row,) = json.loads(capsys.readouterr().out)["kernels"]
    assert row["kernel"] == "everything" and row["arch"] == "sm_90"


def test_kernels_without_a_product_have_rows_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kernels, "load_gate", lambda: _fake_gate(rows=1))
    kernels.run(Show(as_json=True, quiet=True), everything=False, arches=("sm_80",))
    product, row = json.loads(capsys.readouterr().out)["kernels"]
    assert product["tokens"] == 8 and product["instructions_per_weight"] == 2.0
    assert row["kernel"] == "norm" and row["tiles"] is row["instructions_per_weight"] is None
    kernels.run(Show(quiet=True), everything=False, arches=("sm_80",))
    monkeypatch.setattr(kernels, "load_gate", lambda: _fake_gate(rows=1, sm_80=("a fault",)))
    with pytest.raises(KernelError, match="norm, sm_80: a fault"):
        kernels.run(Show(quiet=True), everything=False, arches=("sm_80",))


def test_attention_has_rows_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kernels, "load_gate", lambda: _fake_gate(attention=1))
    kernels.run(Show(as_json=True, quiet=True), everything=False, arches=("sm_80",))
    found = json.loads(capsys.readouterr().out)["kernels"]
    assert [row["kernel"] for row in found][1:] == ["attention 16-bit"]
    monkeypatch.setattr(kernels, "load_gate", lambda: _fake_gate(attention=1, sm_80=("a fault",)))
    with pytest.raises(KernelError, match="attention 16-bit, 1 tokens, sm_80: a fault"):
        kernels.run(Show(quiet=True), everything=False, arches=("sm_80",))


def test_a_violation_is_an_error_with_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "load_gate", lambda: _fake_gate(sm_90=("stack of 8 bytes",)))
    with pytest.raises(KernelError, match="1 of 2 kernels .*8 tokens, sm_90: stack of 8") as error:
        kernels.run(Show(quiet=True), everything=False, arches=())
    assert error.value.exit_code == 1


def test_an_unknown_gpu_is_refused_before_anything_is_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kernels, "load_gate", _fake_gate)
    with pytest.raises(UsageError, match="--arch sm_70: known are sm_80, sm_90"):
        kernels.run(Show(quiet=True), everything=False, arches=("sm_70",))


def test_a_machine_without_triton_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(UsageError, match="Triton does not import .*pip install triton"):
        kernels.load_gate()
