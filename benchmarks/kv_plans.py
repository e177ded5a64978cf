"""What it is worth to choose each layer's cache by measurement: plans of equal bytes, by KL.

Takes a checkpoint with a plan of ``--kv-cache auto`` and compares, on text that nothing was chosen
by: uniform caches; for each of them the best mix of no more bytes; the plan; and the plan's own
schemes dealt to other layers, the widest to the first ones, to the last ones, and by chance.

    qtool quantize MODEL --method rtn --kv-cache auto --calibration valid.txt --out q
    python benchmarks/kv_plans.py q --text test.txt --windows 32 --seq-len 1024
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from qtool.calibration.data import evaluation_windows, held_out_documents, load_tokenizer
from qtool.formats.kv_plan import WIDE, KVPlan
from qtool.quantize.cache_search import Choice, frontier
from qtool.quantize.kv_cache import SWEPT
from qtool.runtime.cache_quality import compare_caches
from qtool.runtime.kv_schemes import PAGE_SIZE, SCHEMES, LayerSchemes
from qtool.runtime.loaded_model import load_model
from qtool.runtime.options import ModelOptions


def dealt_otherwise(
    schemes: Sequence[str], sizes: Mapping[str, int], seeds: int
) -> Iterator[tuple[str, list[str]]]:
    """The same schemes as often, in other layers."""
    widest_first = sorted(schemes, key=lambda name: -sizes[name])
    yield "plan, widest first", widest_first
    yield "plan, widest last", widest_first[::-1]
    for seed in range(seeds):
        dealt = list(schemes)
        random.Random(seed).shuffle(dealt)
        yield f"plan, by chance {seed}", dealt


def best_within(front: Sequence[Choice], size: int) -> Choice:
    """The choice of least loss that is no larger; fronts get larger and better."""
    return [choice for choice in front if choice.size <= size][-1]


def forms(
    plan: KVPlan, sizes: Mapping[str, int], seeds: int, mixes: Sequence[str]
) -> dict[str, list[str]]:
    """Schemes by layer of everything that is compared, by what the table calls it."""
    assert plan.chosen_from is not None
    losses = [{WIDE: 0.0, **layer} for layer in plan.chosen_from["layer_losses"]]
    front = frontier(sizes, losses)
    found = {WIDE: [WIDE] * len(losses)}
    for name in SWEPT:
        found[name] = [name] * len(losses)
        if name in mixes:
            best = best_within(front, sizes[name] * len(losses))
            found[f"best in {name}'s bytes"] = list(best.schemes)
    return found | {"plan": list(plan.layers)} | dict(dealt_otherwise(plan.layers, sizes, seeds))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--text", default="builtin")
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--seeds", type=int, default=3, help="plans dealt by chance")
    parser.add_argument("--mixes", nargs="*", default=["k8v4", "int8"], choices=SWEPT)
    arguments = parser.parse_args()
    tokenizer = load_tokenizer(arguments.model)
    text = held_out_documents(arguments.text).render(tokenizer)
    windows = evaluation_windows(text, tokenizer, arguments.seq_len, arguments.windows)
    model = load_model(arguments.model, ModelOptions(dtype="fp32"), arguments.seq_len)
    plan, config = model.kv_plan, model.decoder.config
    if plan is None or plan.chosen_from is None:
        parser.error(f"{arguments.model} has no plan that --kv-cache auto made")
    heads, head_dim = config.num_kv_heads, config.head_dim
    sizes = {n: SCHEMES[n].page_bytes(PAGE_SIZE, heads, head_dim, 2) for n in (WIDE, *SWEPT)}
    compared = forms(plan, sizes, arguments.seeds, arguments.mixes)
    rows = compare_caches(model, [LayerSchemes.of(names) for names in compared.values()], windows)
    elements = 2 * PAGE_SIZE * heads * head_dim * config.num_layers
    print(f"{text.name}: {len(windows)} windows of {arguments.seq_len} tokens")
    for (name, names), row in zip(compared.items(), rows, strict=True):
        bits = 8 * sum(sizes[scheme] for scheme in names) / elements
        counts = ", ".join(f"{names.count(s)} {s}" for s in dict.fromkeys(names))
        print(f"{name:24} {bits:6.3f} bits  KL {row.kl:.5f}  ({counts})")


if __name__ == "__main__":
    main()
