"""``qtool generate``: one completion, printed as it comes."""

from __future__ import annotations

import time
from dataclasses import asdict

from qtool.commands import console
from qtool.runtime.llm import LLM
from qtool.runtime.options import ModelOptions
from qtool.runtime.sampling_params import SamplingParams


def run(
    model: str, prompt: str, params: SamplingParams, loading: ModelOptions, *, chat: bool
) -> None:
    """Generate and print; speed goes to standard error. Raises QtoolError.

    ``chat`` sends the prompt as a user's message through the model's chat template.
    """
    with console.status(f"loading {model}"):
        llm = LLM(
            model,
            **asdict(loading),
            max_num_seqs=1,
        )
    with llm:
        for text in llm.info.notes:
            console.note(text)
        start = time.perf_counter()
        tokens, finish = 0, None
        for delta in llm.stream([{"role": "user", "content": prompt}] if chat else prompt, params):
            console.out.out(delta.text, end="", highlight=False)
            console.out.file.flush()
            tokens += len(delta.token_ids)
            finish = delta.finish_reason or finish
        seconds = time.perf_counter() - start
    console.out.out("")
    console.err.print(
        f"{tokens} tokens in {seconds:.2f} s ({tokens / seconds:.1f} tok/s), ended by {finish}",
        highlight=False,
    )
