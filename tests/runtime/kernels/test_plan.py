"""The plan is what the back ends do, not what somebody wrote about them."""

from __future__ import annotations

import pytest
import torch

from qtool.runtime.kernels.cpu import torch_ops
from qtool.runtime.kernels.plan import planned_kernels

CPU = torch.device("cpu")


def test_the_cpu_packs_four_bits_in_bfloat16_only() -> None:
    kernels = {(k.operation, k.dtype): k for k in planned_kernels(CPU)}
    assert kernels["linear W4", "bf16"].kernel == torch_ops.Int4Linear.kernel
    for dtype in ("fp16", "fp32"):
        held = kernels["linear W4", dtype]
        assert held.kernel == torch_ops.DenseLinear.kernel
        assert held.reason == f"held dense: no 4-bit kernel for {dtype}"
        assert held.bytes_per_weight == kernels["linear dense", dtype].bytes_per_weight


def test_a_changed_rule_changes_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_ops, "fits_int4pack", lambda *_: False)
    kernels = {(k.operation, k.dtype): k for k in planned_kernels(CPU)}
    assert kernels["linear W4", "bf16"].kernel == torch_ops.DenseLinear.kernel
    assert kernels["linear W4", "bf16"].reason.startswith("held dense")
