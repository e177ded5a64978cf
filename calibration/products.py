"""How exactly calibration multiplies: factors rounded to 16 bits where that is faster.

Text is a sample, and what is learned from it carries a sampling error far above the 2^-9 of a
bfloat16 factor; sums stay in float32. oneDNN takes the setting as a permission: it uses it where
the CPU has instructions for it (AMX, AVX512-BF16), and elsewhere nothing changes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def rounded_products() -> Iterator[None]:
    """Float32 products on the CPU may round their factors to bfloat16, until the context ends."""
    with _precision("bf16"):
        yield


@contextmanager
def exact_products() -> Iterator[None]:
    """Float32 products are float32: for what is measured, judged or solved in a rounded one."""
    with _precision("ieee"):
        yield


@contextmanager
def _precision(name: str) -> Iterator[None]:
    mkldnn: Any = torch.backends.mkldnn
    matmul = mkldnn.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = name
    try:
        yield
    finally:
        matmul.fp32_precision = before
