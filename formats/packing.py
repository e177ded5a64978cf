"""Integer codes <-> 32-bit words.

One layout, drawn in ``docs/layouts.md``: a row is a little-endian bit string; element i takes
bits [i * bits, (i + 1) * bits). For 4 bits, eight elements a word:

    bit  31    28 27    24 23    20 19    16 15    12 11     8 7      4 3      0
        | code 7 | code 6 | code 5 | code 4 | code 3 | code 2 | code 1 | code 0 |

The last word of a row is filled up with zero codes.
"""

from __future__ import annotations

import torch
from torch import Tensor

WORD_BITS = 32


def codes_per_word(bits: int) -> int:
    """How many codes one word holds. Raises ValueError unless ``bits`` divides 32."""
    if bits < 1 or bits > 8 or WORD_BITS % bits:
        raise ValueError(f"bits={bits}: only 1, 2, 4 and 8 fill a word without straddling it")
    return WORD_BITS // bits


def pack_rows(codes: Tensor, bits: int) -> Tensor:
    """Pack uint8 codes [N, K] along K into int32 words [N, ceil(K * bits / 32)].

    Raises:
        ValueError: wrong dtype, or a code that does not fit in ``bits``.
    """
    per_word = codes_per_word(bits)
    if codes.dtype != torch.uint8:
        raise ValueError(f"codes are {codes.dtype}: packing takes torch.uint8")
    if codes.numel() and int(codes.max()) >= 2**bits:
        raise ValueError(f"code {int(codes.max())} does not fit in {bits} bits")
    rows, columns = codes.shape
    padding = -columns % per_word
    padded = torch.nn.functional.pad(codes, (0, padding)).reshape(rows, -1, per_word)
    shifts = torch.arange(per_word, device=codes.device) * bits
    words: Tensor = (padded.long() << shifts).sum(-1)
    # int64 -> int32 keeps the low 32 bits, which is the two's complement the formats store.
    return words.to(torch.int32)


def unpack_rows(words: Tensor, bits: int, columns: int) -> Tensor:
    """Inverse of :func:`pack_rows`: int32 words [N, W] to uint8 codes [N, columns].

    Raises:
        ValueError: wrong dtype, or a word count that does not belong to ``columns``.
    """
    per_word = codes_per_word(bits)
    if words.dtype != torch.int32:
        raise ValueError(f"words are {words.dtype}: unpacking takes torch.int32")
    expected = -(-columns // per_word)
    if words.shape[1] != expected:
        raise ValueError(
            f"{words.shape[1]} words a row: {columns} codes of {bits} bits take {expected}"
        )
    # Flat first: a single column counts as contiguous whatever its stride, and a view does not.
    codes = words.reshape(-1).view(torch.uint8).view(words.shape[0], 4 * words.shape[1])
    width = 8
    while width > bits:
        width //= 2
        codes = _split_bytes(codes, width)
    return codes[:, :columns].contiguous()


def _split_bytes(codes: Tensor, bits: int) -> Tensor:
    """uint8 [N, B] with two codes of ``bits`` in each byte, the first in its low bits, to [N, 2B].

    Each byte becomes an int16 that holds it twice, ``bits`` apart, less what is in the way: three
    passes over whole vectors. Shifting every code out of its word took 20 times as long.
    """
    pairs = codes.to(torch.int16)
    mask = 2**bits - 1
    spread = (pairs << (8 - bits)).bitwise_or_(pairs).bitwise_and_(mask << 8 | mask)
    return spread.view(torch.uint8)
