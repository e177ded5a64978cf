"""The plan is what the back ends do, not what somebody wrote about them."""

from __future__ import annotations

import pytest
import torch

from qtool.runtime.kernels.cpu import torch_ops
from qtool.runtime.kernels.cpu.build import load_native
from qtool.runtime.kernels.plan import planned_kernels

CPU = torch.device("cpu")


def test_native_code_keeps_quantized_weights_packed_in_every_dtype() -> None:
    if load_native().library is None:
        pytest.skip(load_native().reason)
    kernels = {(k.operation, k.dtype): k for k in planned_kernels(CPU)}
    for dtype in ("bf16", "fp16", "fp32"):
        packed = kernels["linear W4", dtype]
        assert packed.kernel.startswith("native") and packed.bytes_per_weight is not None
        assert packed.bytes_per_weight < 0.7
        assert kernels["attention, quantized", dtype].kernel.startswith("native")


def test_torch_packs_four_bits_in_bfloat16_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QTOOL_NATIVE", "0")
    kernels = {(k.operation, k.dtype): k for k in planned_kernels(CPU)}
    assert kernels["linear W4", "bf16"].kernel == torch_ops.Int4Linear.kernel
    for dtype in ("fp16", "fp32"):
        held = kernels["linear W4", dtype]
        assert held.kernel == torch_ops.DenseLinear.kernel
        assert held.reason == f"held dense: no 4-bit kernel for {dtype}"
        assert held.bytes_per_weight == kernels["linear dense", dtype].bytes_per_weight


def test_a_changed_rule_changes_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QTOOL_NATIVE", "0")
    monkeypatch.setattr(torch_ops, "fits_int4pack", lambda *_: False)
    kernels = {(k.operation, k.dtype): k for k in planned_kernels(CPU)}
    assert kernels["linear W4", "bf16"].kernel == torch_ops.DenseLinear.kernel
    assert kernels["linear W4", "bf16"].reason.startswith("held dense")
