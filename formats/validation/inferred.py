"""How linears are stored, where no config says it: guessed from the shapes of their tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from qtool.formats.reader import TensorEntry
from qtool.formats.validation.claim import Claim
from qtool.formats.validation.layouts import Shape


def inferred_claim(
    tensors: Mapping[str, TensorEntry], read: Callable[[str], list[int]]
) -> Claim | None:
    """How a linear is stored, guessed from its tensors where no config says it.

    Args:
        tensors: by local name.
        read: a small tensor of whole numbers, by local name.
    """
    shapes = {name: entry.shape for name, entry in tensors.items()}
    if "weight_packed" in shapes and shapes.get("weight_shape") == (2,):
        columns = read("weight_shape")[1]
        bits = shapes["weight_packed"][-1] * 32 // max(columns, 1)
        grid = _span(columns, shapes.get("weight_scale", (0, 1))[-1])
        symmetric = "weight_zero_point" not in shapes
        return Claim("pack-quantized", bits, "int", symmetric, *grid) if bits else None
    if "qweight" in shapes and "scales" in shapes:
        return _inferred_columns(shapes["qweight"], shapes["scales"], shapes.get("qzeros", ()))
    weight = tensors.get("weight")
    scale = shapes.get("weight_scale", shapes.get("weight_scale_inv"))
    if weight is None or len(weight.shape) != 2 or scale is None:
        return None
    kind = "float" if weight.dtype.is_floating_point else "int"
    strategies = {(): "tensor", (1,): "tensor", (weight.shape[0], 1): "channel"}
    return Claim(f"{kind}-quantized", 8, kind, True, strategies.get(scale, "block"))


def _inferred_columns(qweight: Shape, scales: Shape, zeros: Shape) -> Claim | None:
    """AWQ packs along the outputs, GPTQ along the inputs; scales are [groups, outputs] in both."""
    if min(len(qweight), len(scales), len(zeros)) < 2 or 0 in (*qweight, *scales, *zeros):
        return None
    if scales[1] == qweight[1] * 8:
        return Claim("awq", 4, "int", False, *_span(qweight[0], scales[0]))
    bits = zeros[1] * 32 // scales[1]
    return Claim("gptq", bits, "int", True, *_span(qweight[0] * 32 // bits, scales[0]))


def _span(columns: int, groups: int) -> tuple[str, int | None]:
    return ("channel", None) if groups <= 1 else ("group", columns // groups)
