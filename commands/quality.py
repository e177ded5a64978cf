"""The written checkpoint against the original: the runtime's figures for the offline half.

The checkpoint runs in our engine. Where that does not run its family, transformers computes with
the dequantized weights, on inputs rounded as the checkpoint says, and the report says so.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from rich.table import Table
from torch import Tensor

from qtool.calibration.logits import FinalLogits, final_logits
from qtool.calibration.standard import family_of
from qtool.errors import ModelError
from qtool.formats.checkpoint import CONFIG_NAME, read_json
from qtool.formats.dequantized import DequantizedReader
from qtool.formats.probe import make_probe
from qtool.quantize.pipeline import Evaluated
from qtool.quantize.report import Evaluation
from qtool.runtime.config import parse_decoder_config
from qtool.runtime.evaluate import Predictions, evaluate, window_logits
from qtool.runtime.kv_schemes import WIDE
from qtool.runtime.loaded_model import load_model
from qtool.runtime.model import Decoder
from qtool.runtime.options import ModelOptions

# A probe has so many prompts, of so many tokens: a blink even for a large model on a CPU.
PROBE_PROMPTS = 3
PROBE_TOKENS = 16

Report = Callable[[str, int, int], None]


def compare(folder: Path, original: FinalLogits, device: torch.device, report: Report) -> Evaluated:
    """Score a checkpoint on the windows of the original's logits, and take its probe.

    Args:
        folder: the checkpoint, written but not in place.
        original: what the model it was made from says.
        device: where to compute, in float32.
        report: told the phase, what is done of it, and how much there is.
    """
    ids = original.ids
    model, engine = _predictions(folder, ids, device, report)
    quality = evaluate(model, ids, original, lambda done, total: report("evaluate", done, total))
    prompts = ids[:PROBE_PROMPTS, :PROBE_TOKENS].tolist()

    def last(index: int) -> Tensor:
        return window_logits(model, index, prompts[index])(0, len(prompts[index]))[-1]

    return Evaluated(engine, quality.to_dict(), make_probe(prompts, last).to_dict())


def _predictions(
    folder: Path, ids: Tensor, device: torch.device, report: Report
) -> tuple[Decoder | Predictions, str]:
    """The checkpoint ready to be asked, and who answers."""
    try:
        parse_decoder_config(read_json(folder / CONFIG_NAME))
    except ModelError:
        reader = DequantizedReader(folder)
        with reader:
            final = final_logits(
                reader,
                family_of(reader),
                device,
                ids,
                lambda done, total: report("dequantize", done, total),
                reader.round_input,
            )
        inputs = " and rounded inputs" if reader.rounds_inputs else ""
        return final, f"transformers with dequantized weights{inputs}, float32"
    # The weights alone: what a plan of the cache costs is measured by itself.
    loading = ModelOptions(
        device=device.type, dtype="fp32", self_check=False, kv_cache_dtype=WIDE.name
    )
    decoder = load_model(folder, loading, ids.shape[1]).decoder
    return decoder, f"qtool {decoder.backend.name}, float32"


def quality_table(evaluation: Evaluation) -> Table:
    """Original and result side by side."""
    quality = evaluation.quality
    table = Table(
        title=f"{evaluation.windows} x {evaluation.seq_len} tokens of {evaluation.text}, "
        f"{evaluation.engine}"
    )
    for column in ("", "perplexity", "NLL", "KL from original", "top-1 agreement"):
        table.add_column(column, justify="left" if not column else "right")
    table.add_row(
        "original",
        f"{quality['reference_perplexity']:.3f}",
        f"{quality['reference_nll']:.4f}",
        "-",
        "-",
    )
    table.add_row(
        "quantized",
        f"{quality['perplexity']:.3f}",
        f"{quality['nll']:.4f}",
        f"{quality['kl']:.4f}",
        f"{quality['top1_agreement']:.1%}",
    )
    return table
