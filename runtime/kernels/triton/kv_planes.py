"""Tiles of cached keys and values as matrix operands, inside attention kernels.

Words and grids are those of :mod:`.kv_pages`. Codes become float16 whatever the model computes in:
it holds them exactly, bfloat16 would take half as many instructions again, and probabilities keep
eleven bits instead of eight.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from qtool.runtime.kernels.triton.planes import (
    as_float16,
    fp8_planes,
    int4_planes,
    int8_planes,
    join_four,
    join_two,
)


@triton.jit
def channel_of(places: tl.tensor, PLANES: tl.constexpr, D: tl.constexpr) -> tl.tensor:
    """The channel at each place of planes that are filled up to a power of two."""
    WIDTH: tl.constexpr = triton.next_power_of_2(D // PLANES)
    return (places // WIDTH) * (D // PLANES) + places % WIDTH


@triton.jit
def is_channel(places: tl.tensor, PLANES: tl.constexpr, D: tl.constexpr) -> tl.tensor:
    """Whether a place of such planes holds a channel."""
    return places % triton.next_power_of_2(D // PLANES) < D // PLANES


@triton.jit
def load_words(
    words_ptr: tl.tensor,
    first: tl.tensor,
    slots: tl.tensor,
    live: tl.tensor,
    WIDTH: tl.constexpr,
    MASKED: tl.constexpr,
) -> tl.tensor:
    """A page's rows [PAGE, next power of two of WIDTH], from row ``first`` of the pool on.

    Args:
        live: which rows may be read; looked at where ``MASKED``. Any codes are finite.
    """
    columns = tl.arange(0, triton.next_power_of_2(WIDTH))
    ptrs = words_ptr + first * WIDTH + slots[:, None] * WIDTH + columns[None, :]
    inside = (columns < WIDTH)[None, :]
    if MASKED:
        inside = inside & live[:, None]
    if MASKED or triton.next_power_of_2(WIDTH) != WIDTH:
        words = tl.load(ptrs, mask=inside, other=0)
    else:
        words = tl.load(ptrs)
    return words


@triton.jit
def planes_of(
    words: tl.tensor, CODES: tl.constexpr, OPERAND: tl.constexpr, ASM: tl.constexpr
) -> Any:
    """Tiles of operands: signed bytes, codes from 0 to 15, e4m3 / 256, or the words themselves."""
    zero = tl.full((1,), 8, tl.int32)  # for a path that is not taken
    if CODES == "int4":
        planes = int4_planes(words, zero, 0, tl.float16, ASM)
    elif CODES == "int8":
        planes = int8_planes(words, zero, 8, tl.float16, ASM)
    elif CODES == "fp8":
        planes = fp8_planes(words, tl.float16, ASM)
    else:
        planes = (words.to(OPERAND),)
    return planes


@triton.jit
def tile_of(
    words: tl.tensor, CODES: tl.constexpr, OPERAND: tl.constexpr, ASM: tl.constexpr
) -> tl.tensor:
    """The planes side by side."""
    planes = planes_of(words, CODES, OPERAND, ASM)
    if CODES == "int4":
        tile = join_four(planes[0], planes[1], planes[2], planes[3])
    elif CODES == "wide":
        tile = planes[0]
    else:
        tile = join_two(planes[0], planes[1])
    return tile


@triton.jit
def token_scales(
    grid_ptr: tl.tensor,
    first: tl.tensor,
    slots: tl.tensor,
    live: tl.tensor,
    MASKED: tl.constexpr,
) -> tl.tensor:
    """float32 scales of a page's rows; where ``MASKED``, 0 for those that are not ``live``.

    Two float16 share a word: loads of two bytes would not be copied asynchronously.
    """
    ptrs = grid_ptr + first // 2 + slots // 2
    if MASKED:
        words = tl.load(ptrs, mask=live, other=0)
    else:
        words = tl.load(ptrs)
    return as_float16(words >> (16 * (slots % 2))).to(tl.float32)


@triton.jit
def halves_of(words: tl.tensor) -> tl.tensor:
    """float16 [2 * n] of words [n] that hold two of them; in registers they are the words."""
    pairs = tl.join(as_float16(words), as_float16(words >> 16))
    return tl.reshape(pairs, (2 * words.shape[0],))


@triton.jit
def placed(codes: tl.tensor, scale: tl.tensor, low: tl.tensor, ASM: tl.constexpr) -> tl.tensor:
    """``codes * scale + low`` in float16, rounded once; scale and low broadcast to the codes."""
    if ASM:
        # Written out: for sm_80 the compiler would take pairs of scales apart and join them again.
        values = tl.inline_asm_elementwise(
            "fma.rn.f16x2 $0, $1, $2, $3;",
            "=r,r,r,r",
            [codes, tl.broadcast_to(scale, codes.shape), tl.broadcast_to(low, codes.shape)],
            dtype=tl.float16,
            is_pure=True,
            pack=2,
        )
    else:
        wide = codes.to(tl.float32) * scale.to(tl.float32) + low.to(tl.float32)
        values = wide.to(tl.float16)
    return values
