"""``qtool convert``: a quantized checkpoint in another format, with the same weights to the bit."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from qtool.commands import console
from qtool.formats.convert import Conversion, convert_checkpoint
from qtool.formats.model_source import resolve_model


def run(
    model: str,
    out: Path,
    format: str,
    show: console.Show = console.TEXT,
    *,
    overwrite: bool = False,
) -> Conversion:
    """Convert and say what was done. Raises QtoolError."""
    with show.status(f"resolving {model}"):
        source = resolve_model(model)
    with show.steps() as steps:
        done = convert_checkpoint(source, out, format, overwrite=overwrite, progress=steps.update)
    for note in done.notes:
        show.note(note)
    if show.as_json:
        console.emit("result", {"out": str(out)} | asdict(done))
    else:
        console.out.print(
            f"{out}: {done.linears} linears from {done.source_format} to {done.format}, all "
            f"dequantize to the same bits; {console.size(done.total_bytes)}",
            highlight=False,
            markup=False,
        )
    return done
