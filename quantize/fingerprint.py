"""Everything that decides a run's result, as one flat JSON object to compare."""

from __future__ import annotations

import hashlib
from dataclasses import asdict
from typing import Any

import torch
import transformers
from torch import Tensor

from qtool import __version__
from qtool.formats.checkpoint import CONFIG_NAME, CheckpointReader
from qtool.formats.safetensors_file import tensor_digest
from qtool.quantize.options import QuantizeOptions

# Options that decide whether and where a result is written, not what it is; the texts count by
# their tokens, wherever they lie.
_NOT_DECISIVE = {"overwrite", "restart", "strict", "device", "calibration", "eval_text"}

# A digest that people compare by eye.
SHOWN = 16


def run_fingerprint(
    reader: CheckpointReader,
    options: QuantizeOptions,
    ids: Tensor | None,
    held_out: Tensor | None,
) -> dict[str, Any]:
    """What a run is: the source's content, every option, all tokens, versions, and threads.

    Args:
        reader: the source; all its files are read once.
        options: what is asked.
        ids, held_out: calibration samples and evaluation windows, int64, or ``None``.
    """
    chosen = {
        f"--{name.replace('_', '-')}": value
        for name, value in asdict(options).items()
        if name not in _NOT_DECISIVE
    }
    return {
        "source": source_digest(reader),
        "calibration tokens": None if ids is None else tensor_digest(ids)[:SHOWN],
        "held-out tokens": None if held_out is None else tensor_digest(held_out)[:SHOWN],
        "device": str(options.torch_device),
        "qtool": __version__,
        "torch": torch.__version__,
        # Its modules compute the blocks.
        "transformers": transformers.__version__,
        # Long sums are split among them: GPTQ's codes differ between one thread and two.
        "threads (OMP_NUM_THREADS)": torch.get_num_threads(),
        **chosen,
    }


def source_digest(reader: CheckpointReader) -> str:
    """Digest of the config and of every shard's content; a Sapphire Rapids core takes .9 s a GB."""
    shards = sorted({entry.shard for entry in reader.entries.values()})
    whole = hashlib.sha256()
    for name in (CONFIG_NAME, *shards):
        with (reader.folder / name).open("rb") as file:
            whole.update(hashlib.file_digest(file, "sha256").digest())
    return whole.hexdigest()[:SHOWN]
