"""Offsets beyond 2**31 in 8-bit products and in kernels that work row by row: sparse files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from qtool.formats import activations
from qtool.formats.scheme import ActivationScheme, w8a8_scheme, weight_scheme
from support.gemm import make_input, make_weight, relative_error

pytest.importorskip("triton")
from triton.runtime.interpreter import interpreter_builder

from qtool.runtime.kernels.triton import byte_gemm, dequantize, gated, norm, round_input, routing
from qtool.runtime.kernels.triton.config import Tiles, shape_of
from qtool.runtime.kernels.triton.layout import pack

FAR = 2**31
WIDTH = 2048
ROW = FAR // WIDTH  # the first one that begins there
INT8 = ActivationScheme("int", "token")


class Far:
    """Tensors that are zero up to their last rows, and one program of a grid as large."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self._folder, self._patch, self._count = folder, patch, 0

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Zeros that take no memory until they are written."""
        self._count += 1
        kind = torch.empty(0, dtype=dtype).numpy().dtype
        path = self._folder / str(self._count)
        return torch.from_numpy(np.memmap(path, dtype=kind, mode="w+", shape=shape))

    def ending_in(self, rows: Tensor, first: int = ROW) -> Tensor:
        """``rows``, behind so many rows of zeros."""
        whole = self.tensor((first + len(rows), *rows.shape[1:]), rows.dtype)
        whole[first:] = rows
        return whole

    def launch(self, kernel: Any, place: tuple[int, ...], *args: object, **constants: Any) -> None:
        """The program at ``place``, the last one of its grid."""
        place = (*place, 0, 0)[:3]
        real = type(interpreter_builder).set_grid_idx

        def shifted(*_: int) -> None:
            interpreter_builder.grid_dim = tuple(index + 1 for index in place)
            real(interpreter_builder, *place)

        self._patch.setattr(interpreter_builder, "set_grid_idx", shifted)
        kernel[(1, 1, 1)](*args, **constants)


@pytest.fixture
def far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Far:
    return Far(tmp_path, monkeypatch)


def test_norms_of_rows_far_down(far: Far) -> None:
    x, weight = make_input(1, WIDTH, torch.float16), make_input(2, WIDTH, torch.float32)[0]
    many, rows = far.ending_in(x), far.ending_in(make_input(1, WIDTH, torch.float32))
    out, total = far.tensor(tuple(many.shape), torch.float16), rows[-1] + x[0]
    pointers = (many, None, rows, weight, None, out, None, 1e-5)
    far.launch(norm.rms_norm_kernel, (ROW,), *pointers, **norm.norm_constants(WIDTH))
    expected = functional.rms_norm(total, (WIDTH,), weight, 1e-5)
    torch.testing.assert_close(out[-1], expected.half())
    assert torch.equal(rows[-1], total)


def test_norms_of_heads_far_down(far: Far) -> None:
    x, weight = make_input(1, WIDTH, torch.float16), make_input(2, 128, torch.float32)[0]
    heads = WIDTH // 128
    many = far.ending_in(x)
    outs = [far.tensor(tuple(many.shape), torch.float16) for _ in range(2)]
    for head, out in ((3, outs[0]), (heads + 3, outs[1])):
        far.launch(
            norm.norm_heads_kernel, (ROW, head),
            many, many, weight, weight, *outs, WIDTH, WIDTH, 1e-5,
            H=heads, KV=heads, D=128, BLOCK=128,
        )  # fmt: skip
        expected = functional.rms_norm(x.view(-1, 128)[3].float(), (128,), weight, 1e-5)
        torch.testing.assert_close(out[-1].view(-1, 128)[3], expected.half())


@pytest.mark.parametrize("gate", [None, "silu"])
def test_rounding_of_rows_far_down(far: Far, gate: round_input.Gate | None) -> None:
    x = make_input(1, WIDTH if gate is None else 2 * WIDTH, torch.float16)
    many = far.ending_in(x)
    codes = far.tensor((ROW + 1, WIDTH), torch.int8)
    scales = far.tensor((1, ROW + 1), torch.float32)
    constants = round_input.constants(WIDTH, INT8, gate=gate, dtype=torch.float16)
    pointers = (many, None, codes, scales, WIDTH)
    far.launch(round_input.round_input_kernel, (ROW,), *pointers, **constants)
    if gate is not None:
        half, up = x.float().chunk(2, dim=1)
        x = (functional.silu(half) * up).half()
    expected = activations.round_input(x, INT8)[0]
    step = float(scales[0, -1])
    torch.testing.assert_close(codes[-1] * scales[0, -1], expected, rtol=0, atol=1.01 * step)


def test_gates_of_rows_far_down(far: Far) -> None:
    x = make_input(1, 2 * WIDTH, torch.float16)
    out = far.tensor((ROW + 1, WIDTH), torch.float16)
    far.launch(gated.gated_kernel, (ROW, 1), far.ending_in(x), out, WIDTH, GELU=False, SIZE=1024)
    half, up = x[0].float().chunk(2)
    expected = (functional.silu(half) * up).half()
    torch.testing.assert_close(out[-1, 1024:], expected[1024:])
    assert not out[-1, :1024].any()


def test_slots_far_down_are_added(far: Far) -> None:
    parts = make_input(2, WIDTH, torch.float32)
    out = far.tensor((ROW + 1, WIDTH), torch.float32)
    far.launch(
        routing.combine_kernel, (ROW, 1), far.ending_in(parts, 2 * ROW), out, WIDTH,
        TOP_K=2, SIZE=1024,
    )  # fmt: skip
    torch.testing.assert_close(out[-1, 1024:], (parts[0] + parts[1])[1024:])


def test_weights_far_down_are_dequantized(far: Far) -> None:
    weight = make_weight(weight_scheme(4, False, 128), 64, 128)
    packed, tile = pack(weight), FAR // (64 * 32)
    words = far.ending_in(packed.words, tile)
    scales = far.tensor((1, 64 * (tile + 1)), torch.int32)
    scales[:, -64:] = packed.scales
    out = far.tensor((64 * (tile + 1), 128), torch.float16)
    pointers = (words, scales, packed.zeros, out, len(out), 128)
    chosen = dequantize.constants(shape_of(packed))
    far.launch(dequantize.dequantize_kernel, (tile, 0), *pointers, **chosen)
    assert torch.equal(out[-64:], weight.dequantize(torch.float16))


@pytest.mark.parametrize("where", ["tokens", "weights"])
def test_8_bit_products_far_down(far: Far, where: str) -> None:
    weight = make_weight(w8a8_scheme(), 64, 128)
    packed = pack(weight, as_bytes=True)
    rounded = round_input.round_input(make_input(8, 128, torch.float16), INT8, 128)
    codes, token_scales = rounded.codes, rounded.scales
    words, scales, place, count = packed.words, packed.scales, (0, 0), 64
    if where == "tokens":
        first = FAR // 64
        codes, place = far.ending_in(codes, first), (first // 8, 0)
        token_scales = far.ending_in(token_scales, first)
    else:
        tile = FAR // (64 * 128)
        words, place, count = far.ending_in(words, tile), (0, tile), 64 * (tile + 1)
        scales = far.ending_in(scales.flatten(), 64 * tile)
    out = far.tensor((len(codes), count), torch.float16)
    none = (None, None, None)
    chosen = byte_gemm.constants(shape_of(packed), Tiles(8, 64, 2, 3), asm=False)
    pointers = (codes, words, scales, token_scales, *none, out, None, None, None, None)
    far.launch(byte_gemm.byte_gemm_kernel, place, *pointers, len(codes), count, 1, **chosen)
    exact = (rounded.codes.double() * rounded.scales[:, None]) @ weight.dequantize().double().T
    assert relative_error(out[-8:, -64:], exact) < 1e-3
