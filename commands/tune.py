"""``qtool tune``: measure the tiles of a model's quantized products on this GPU, once."""

from __future__ import annotations

from pathlib import Path

from qtool.commands import console
from qtool.errors import UsageError
from qtool.formats.model_source import cache_folder, resolve_model
from qtool.runtime.loaded_model import load_model
from qtool.runtime.options import ModelOptions


def run(model: str, loading: ModelOptions, show: console.Show) -> None:
    """Measure and write a table, which later loads on this GPU read.

    Raises:
        UsageError: there is no GPU whose kernels could be measured, or nothing to measure.
    """
    decoder = load_model(resolve_model(model), loading).decoder
    if decoder.backend.name != "triton":
        raise UsageError(
            f"tune on back end {decoder.backend.name}: it measures Triton's kernels on a GPU; "
            "run it where there is one"
        )
    path, count = _measure(decoder.backend, show)
    if show.as_json:
        console.emit("result", {"path": str(path), "shapes": count})
    else:
        console.out.print(f"{count} shapes measured; written to {path}", markup=False)


def _measure(backend: object, show: console.Show) -> tuple[Path, int]:
    from qtool.runtime.kernels.triton.backend import TritonBackend
    from qtool.runtime.kernels.triton.experts import PackedExperts
    from qtool.runtime.kernels.triton.linear import PackedLinear
    from qtool.runtime.kernels.triton.timing import shapes_of, timer_of
    from qtool.runtime.kernels.triton.tuning import read_table, tune, write_table

    assert isinstance(backend, TritonBackend)
    operations: list[PackedLinear | PackedExperts] = [*backend.packed, *backend.packed_experts]
    shapes = tuple(dict.fromkeys(shape for op in operations for shape in shapes_of(op)))
    if not shapes:
        raise UsageError("the model has no quantized linears on these kernels: nothing to tune")
    with show.status(f"measuring {len(shapes)} shapes"):
        table = tune(backend.target, shapes, timer_of(operations))
    key = backend.tuned_for
    path = cache_folder() / key.file_name
    # What other models' weights were measured to be best in stays.
    others, _ = read_table(path.parent, key)
    write_table(path, key, {**(others or {}), **table})
    return path, len(shapes)
