"""What the CPU kernels' arithmetic costs: the same weights, against float32 reference operations.

    python benchmarks/compute_loss.py MODEL [--text FILE] [--windows 8] [--seq-len 1024]

MODEL is a quantized checkpoint. Prints, for every form of computation and cache, the perplexity,
the KL divergence from the reference and how often both find the same token likeliest; then how
many of 20 greedy continuations are the reference's, token for token.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.table import Table
from torch import Tensor

from qtool import LLM, SamplingParams
from qtool.calibration.data import evaluation_windows, held_out_documents, load_tokenizer
from qtool.formats.model_source import resolve_model
from qtool.runtime.evaluate import Quality, evaluate
from qtool.runtime.loaded_model import load_model
from qtool.runtime.options import ModelOptions

REFERENCE = ModelOptions(device="cpu", backend="reference", dtype="fp32")
FORMS = {
    "int8, INT8 cache": ModelOptions(device="cpu", cpu_compute="int8", kv_cache_dtype="int8"),
    "int8": ModelOptions(device="cpu", cpu_compute="int8"),
    "bf16": ModelOptions(device="cpu", cpu_compute="bf16"),
    "fp32": ModelOptions(device="cpu", cpu_compute="fp32"),
    "fp32, float32 cache": ModelOptions(device="cpu", cpu_compute="fp32", dtype="fp32"),
}
Losses = dict[str, Quality]
PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 20, 48, 64


def main() -> None:
    """Measure and print."""
    arguments = _parser().parse_args()
    folder = resolve_model(arguments.model)
    tokenizer = load_tokenizer(folder)
    text = held_out_documents(arguments.text).render(tokenizer)
    windows = evaluation_windows(text, tokenizer, arguments.seq_len, arguments.windows)
    prompts = evaluation_windows(text, tokenizer, PROMPT_TOKENS, PROMPTS).tolist()
    console = Console()
    console.print(_table(losses(folder, windows)))
    for name, count in equal_continuations(folder, prompts).items():
        console.print(f"{name}: {count} of {PROMPTS} continuations of {NEW_TOKENS} tokens equal")


def losses(folder: Path, windows: Tensor, forms: Mapping[str, ModelOptions] = FORMS) -> Losses:
    """Quality of every form against the reference, on windows int64 [n, length]."""
    length = windows.shape[1]
    reference = load_model(folder, REFERENCE, length).decoder
    return {
        name: evaluate(load_model(folder, form, length).decoder, windows, reference)
        for name, form in forms.items()
    }


def equal_continuations(
    folder: Path, prompts: list[list[int]], forms: Mapping[str, ModelOptions] = FORMS
) -> dict[str, int]:
    """How many of the reference's greedy continuations every form finds, token for token."""
    expected = _continuations(folder, REFERENCE, prompts)
    found = {name: _continuations(folder, form, prompts) for name, form in forms.items()}
    return {
        name: sum(a == b for a, b in zip(tokens, expected, strict=True))
        for name, tokens in found.items()
    }


def _table(losses: Losses) -> Table:
    table = Table("compute", "perplexity", "KL", "top-1")
    for name, quality in losses.items():
        kl, top1 = f"{quality.kl:.5f}", f"{quality.top1:.1%}"
        table.add_row(name, f"{quality.perplexity:.3f}", kl, top1)
    exact = next(iter(losses.values())).reference_perplexity
    table.add_row("float32 reference", f"{exact:.3f}", "", "")
    return table


def _continuations(folder: Path, form: ModelOptions, prompts: list[list[int]]) -> list[list[int]]:
    greedy = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    with LLM(
        str(folder),
        max_model_len=PROMPT_TOKENS + NEW_TOKENS,
        device=form.device,
        dtype=form.dtype,
        backend=form.backend,
        cpu_compute=form.cpu_compute,
        kv_cache_dtype=form.kv_cache_dtype,
    ) as llm:
        results = llm.generate(prompts, greedy, progress=False)
    return [list(result.outputs[0].token_ids) for result in results]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="folder of a quantized checkpoint")
    parser.add_argument("--text", default="builtin", help="a SOURCE of held-out text")
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=1024)
    return parser


if __name__ == "__main__":
    main()
