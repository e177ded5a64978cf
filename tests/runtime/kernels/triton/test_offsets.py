"""Offsets beyond 2**31: tiles far down in huge tensors, which are sparse files here."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from qtool.formats.scheme import weight_scheme
from qtool.runtime.kernels.backend import AttentionScope
from support.gemm import make_input, make_weight, relative_error

pytest.importorskip("triton")
from triton.runtime.interpreter import interpreter_builder

from qtool.runtime.kernels.triton.config import Tiles, shape_of
from qtool.runtime.kernels.triton.kv_pages import Pool
from qtool.runtime.kernels.triton.launch import Workspace
from qtool.runtime.kernels.triton.layout import pack
from qtool.runtime.kernels.triton.routing import Routed
from qtool.runtime.kernels.triton.weight_gemm import (
    constants,
    weight_gemm,
    weight_gemm_kernel,
)
from support.paged_cases import Case

FAR = 2**31


def _sparse(path: Path, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros that take no memory until they are written."""
    kind = torch.empty(0, dtype=dtype).numpy().dtype
    return torch.from_numpy(np.memmap(path, dtype=kind, mode="w+", shape=shape))


def _launch_at(
    monkeypatch: pytest.MonkeyPatch, tile_m: int, tile_n: int, *tensors: Tensor | None, **more: int
) -> None:
    """One program, as if it were that tile of a grid nobody could run through."""
    weight = make_weight(weight_scheme(4, False, 128), 64, 128)
    tiles = Tiles(8, 64, 2, 3)
    chosen = constants(shape_of(pack(weight)), tiles, torch.float16, gated=False, asm=False)
    real = type(interpreter_builder).set_grid_idx

    def shifted(x: int, y: int, z: int) -> None:
        interpreter_builder.grid_dim = (tile_m + 1, tile_n + 1, 1)
        real(interpreter_builder, tile_m, tile_n, z)

    monkeypatch.setattr(interpreter_builder, "set_grid_idx", shifted)
    x, words, scales, out = tensors
    none = (None, None)
    pointers = (x, words, scales, *none, None, *none, out, *none, *none)
    weight_gemm_kernel[(1, 1, 1)](*pointers, more["M"], more["N"], 1, **chosen)


def test_tokens_far_down_are_read_and_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, x = make_weight(weight_scheme(4, False, 128), 64, 128), make_input(8, 128, torch.half)
    packed, first = pack(weight), FAR // 64
    many = _sparse(tmp_path / "x", (first + 8, 128), torch.float16)
    many[first:] = x
    out = _sparse(tmp_path / "out", (first + 8, 64), torch.float16)
    tensors = many, packed.words, packed.scales, out
    _launch_at(monkeypatch, first // 8, 0, *tensors, M=first + 8, N=64)
    expected = x.double() @ weight.dequantize().double().T
    assert first * 64 >= FAR and relative_error(out[first:], expected) < 1e-3


def test_weights_far_down_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = make_weight(weight_scheme(4, False, 128), 64, 128), make_input(8, 128, torch.half)
    packed, tile = pack(weight), FAR // (64 * 32)
    words = _sparse(tmp_path / "words", (tile + 1, 1, 64, 32), torch.int16)
    words[tile] = packed.words[0]
    rows = 64 * (tile + 1)
    scales = _sparse(tmp_path / "scales", (1, rows), torch.int32)
    scales[:, -64:] = packed.scales
    out = _sparse(tmp_path / "out", (8, rows), torch.float16)
    _launch_at(monkeypatch, 0, tile, x, words, scales, out, M=8, N=rows)
    expected = x.double() @ weight.dequantize().double().T
    assert relative_error(out[:, -64:], expected) < 1e-3


def test_experts_far_down_are_read(tmp_path: Path) -> None:
    weight, x = make_weight(weight_scheme(4, False, 128), 64, 128), make_input(8, 128, torch.half)
    packed, expert = pack(weight), FAR // (64 * 32)
    words = _sparse(tmp_path / "words", (expert + 1, 1, 1, 64, 32), torch.int16)
    scales = _sparse(tmp_path / "scales", (expert + 1, 1, 64), torch.int32)
    words[expert], scales[expert] = packed.words, packed.scales
    first = replace(packed, words=words[0], scales=scales[0])
    block = torch.tensor([[expert], [0], [8]], dtype=torch.int32)
    routed = Routed(torch.arange(8, dtype=torch.int32), block)
    out, workspace = torch.empty(8, 64), Workspace.on(torch.device("cpu"))
    weight_gemm(x, first, out, Tiles(8, 64, 2, 3), workspace, routed=routed, asm=False)
    expected = x.double() @ weight.dequantize().double().T
    assert relative_error(out, expected) < 1e-3


@pytest.mark.parametrize("form", ["wide", "int8", "k8v4", "int4"])
def test_pages_far_down_are_written_and_read(form: str, tmp_path: Path) -> None:
    case = Case(form, (66,), group=1, kv_heads=1)
    scope, pages = AttentionScope(0.125), case.pages
    expected = case.expected(0, scope, 64)
    width = pages.keys.words[0].numel()
    first = FAR // width + 1
    case.tables = [[first + 1, first]]
    pools = []
    for name, pool in (("keys", pages.keys), ("values", pages.values)):
        shapes = {"words": pool.words, "grid": pool.grid}
        far = {
            part: _sparse(tmp_path / f"{name} {part}", (first + 2, *old.shape[1:]), old.dtype)
            for part, old in shapes.items()
            if old is not None
        }
        pools.append(Pool(far["words"], far.get("grid")))
    pages.keys, pages.values = pools
    found = case.last((64,), scope)[0]
    assert first * width >= FAR and relative_error(found, expected) < 1e-3


@pytest.mark.parametrize("form", ["k8v4", "int4"])
def test_tail_pages_far_apart_are_written_and_read(form: str, tmp_path: Path) -> None:
    case = Case(form, (3, 66), group=1, kv_heads=1)
    scope = AttentionScope(0.125)
    stride = FAR + 2 * 64 * 64
    far = _sparse(tmp_path / "tails", (2, stride), torch.float16)
    case.pages._tails = far[:, : 2 * 64 * 64].view(2, 2, 64, 1, 64)
    assert case.pages._tails.stride(0) == stride
    for index, out in enumerate(case.last((2, 64), scope)):
        assert relative_error(out, case.expected(index, scope, (2, 64)[index])) < 1e-3
