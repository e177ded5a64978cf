"""The calibration source ``self``: text that the model says, through our engine.

What a model says is near what it was trained on, which serves where no fitting text is at hand
(Liu et al. 2023, LLM-QAT, 3.1). It is sampled from the model's own distribution, neither cut nor
sharpened, and never ends, so that every block is full.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from qtool.calibration.mix import SampleRequest
from qtool.runtime.llm import LLM
from qtool.runtime.sampling_params import SamplingParams

# Sequences at a time. More would need a larger cache; the progress goes on after each batch.
BATCH = 32


def sample_blocks(
    request: SampleRequest, device: str, progress: Callable[[int, int], None] = lambda *_: None
) -> Tensor:
    """Blocks int64 [num_samples, seq_len]; block i has the seed ``request.seed + i``.

    Args:
        request: of which model, how many, and how they begin.
        device: where to sample.
        progress: called with the blocks done and their number.

    Raises:
        QtoolError: the runtime cannot load the model, or it has no room for ``seq_len`` tokens.
    """
    fresh = request.seq_len - 1
    rows: list[list[int]] = []
    with LLM(
        str(request.folder), device=device, max_model_len=request.seq_len, max_num_seqs=BATCH
    ) as llm:
        for start in range(0, request.num_samples, BATCH):
            params = [
                # min_tokens bars the tokens that end a text.
                SamplingParams(max_tokens=fresh, min_tokens=fresh, seed=request.seed + index)
                for index in range(start, min(start + BATCH, request.num_samples))
            ]
            outputs = llm.generate([[request.first_token]] * len(params), params, progress=False)
            rows += [[request.first_token, *output.outputs[0].token_ids] for output in outputs]
            progress(len(rows), request.num_samples)
    return torch.tensor(rows, dtype=torch.int64)
