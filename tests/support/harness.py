"""A small local task of each kind for lm-evaluation-harness, as files in a folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

# More stop strings than any task that comes with the harness has (6 in version 0.4.13).
UNTIL = [
    *("###", "\n\n\n", "Q:", "</s>", "zz", "Question:", "jump jump", "END"),
    *("\u4e16\u754c!", "@@", "\n---", "Answer:"),
]

ANSWERS = [
    ("The quick brown", "fox"),
    ("the lazy", "dog"),
    ("A model reads the", "text"),
    ("El zorro", "marr\u00f3n"),
    ("\u4f60\u597d\uff0c", "\u4e16\u754c"),
]


def _choice(name: str) -> dict[str, Any]:
    return {
        "task": name,
        "output_type": "multiple_choice",
        "doc_to_text": "{{text}}",
        "doc_to_choice": ["fox", "dog", "text"],
        "doc_to_target": "{{label}}",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    }


def _cloze(name: str) -> dict[str, Any]:
    return {
        "task": name,
        "output_type": "loglikelihood",
        "doc_to_text": "{{text}}",
        "doc_to_target": " {{word}}",
        "metric_list": [{"metric": "perplexity"}, {"metric": "acc"}],
    }


def _rolling(name: str) -> dict[str, Any]:
    return {
        "task": name,
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{long}}",
        "metric_list": [{"metric": "byte_perplexity"}],
    }


def _generate(name: str) -> dict[str, Any]:
    return {
        "task": name,
        "output_type": "generate_until",
        "doc_to_text": "{{text}}",
        "doc_to_target": "{{word}}",
        "generation_kwargs": {"until": UNTIL, "max_gen_toks": 12, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    }


MAKERS = {
    "mini_choice": _choice,
    "mini_cloze": _cloze,
    "mini_roll": _rolling,
    "mini_gen": _generate,
}


def write_tasks(folder: Path) -> list[str]:
    """Write the tasks and their data; returns their names."""
    rows = [
        {"text": text, "word": word, "label": index % 3, "long": f"{text} {word} " * 8}
        for index, (text, word) in enumerate(ANSWERS)
    ]
    # Longer than the tiny models' context of 256 tokens.
    rows[0]["long"] = "The quick brown fox jumps over the lazy dog. " * 20
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    for name, make in MAKERS.items():
        task = make(name) | {
            "dataset_path": "json",
            "dataset_kwargs": {
                "data_files": {"test": str(data)},
                "cache_dir": str(folder / "cache"),
            },
            "test_split": "test",
            "num_fewshot": 0,
        }
        # JSON is YAML.
        (folder / f"{name}.yaml").write_text(json.dumps(task), encoding="utf-8")
    return list(MAKERS)
