"""Decoders without a row of their own: what is found by running one, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from qtool.calibration import standard
from qtool.calibration.families import FAMILIES, find_family
from qtool.calibration.standard import family_of
from qtool.errors import ModelError
from qtool.formats.checkpoint import CheckpointReader
from support.offline import OFFLINE_VARIANTS

QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
GATED = (("mlp.gate_proj", "mlp.up_proj"), ("mlp.down_proj",))
DENSE = [
    name for name, v in OFFLINE_VARIANTS.items() if "moe" not in name and "mixtral" not in name
]

# Model type, where its blocks are, what reads one input in the order in which it runs.
STANDARD: list[tuple[str, str, tuple[tuple[str, ...], ...]]] = [
    ("stablelm", "model.layers", (QKV, ("self_attn.o_proj",), *GATED)),
    ("olmo2", "model.layers", (QKV, ("self_attn.o_proj",), *GATED)),
    ("granite", "model.layers", (QKV, ("self_attn.o_proj",), *GATED)),
    # Attention and MLP side by side, from one norm.
    ("cohere", "model.layers", ((*QKV, *GATED[0]), ("self_attn.o_proj",), GATED[1])),
    ("phi", "model.layers", ((*QKV, "mlp.fc1"), ("self_attn.dense",), ("mlp.fc2",))),
    # Fused projections, and names of its own.
    (
        "gpt_neox",
        "gpt_neox.layers",
        tuple(
            (name,)
            for name in (
                "attention.query_key_value",
                "attention.dense",
                "mlp.dense_h_to_4h",
                "mlp.dense_4h_to_h",
            )
        ),
    ),
    ("opt", "model.decoder.layers", (QKV, ("self_attn.out_proj",), ("fc1",), ("fc2",))),
]


def _family(folder: Path) -> Any:
    with CheckpointReader(folder) as reader:
        return family_of(reader)


@pytest.mark.parametrize("variant", DENSE)
def test_running_a_family_of_the_table_finds_what_its_row_says(
    variant: str, model_factory: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = model_factory(**OFFLINE_VARIANTS[variant])
    row = _family(folder)
    monkeypatch.setattr(standard, "FAMILIES", {})
    found = _family(folder)
    assert found.linear_groups == row.linear_groups and found.blocks == row.blocks
    assert found.ties_head == row.ties_head or "tie_word_embeddings" in _config(folder)
    assert found.pairs == () and found.embedding == row.embedding


@pytest.mark.parametrize(("model_type", "blocks", "groups"), STANDARD, ids=[s[0] for s in STANDARD])
def test_linears_are_found_in_the_order_in_which_they_run_and_by_what_they_read(
    model_type: str,
    blocks: str,
    groups: tuple[tuple[str, ...], ...],
    model_factory: Callable[..., Path],
) -> None:
    family = _family(model_factory(model_type=model_type, tie=False, pad_token_id=0))
    assert family.blocks == blocks and family.linear_groups == groups
    assert family.unclipped == groups[0]
    # On disk GPT-NeoX's head has another name than in memory.
    assert family.head == ("embed_out" if model_type == "gpt_neox" else "lm_head")


def test_a_row_of_the_table_is_taken_where_there_is_one(tiny_model_folder: Path) -> None:
    assert _family(tiny_model_folder) is FAMILIES["llama"]
    assert find_family({"model_type": "llama"}).pairs


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("mamba", r"mixer\.A_log is a matrix of no linear"),
        ("olmoe", r"mlp\.gate\.weight is a matrix of no linear"),
        ("jamba", r"model\.layers\.1 has other linears than model\.layers\.0"),
        ("gpt2", "its config has no hidden_size"),
    ],
)
def test_what_is_no_standard_decoder_is_refused_by_what_it_is_not(
    model_type: str, reason: str, model_factory: Callable[..., Path]
) -> None:
    folder = model_factory(model_type=model_type, pad_token_id=0)
    with pytest.raises(ModelError, match=f"'{model_type}': .*{reason}.*supported are .*llama"):
        _family(folder)


@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj.weight", "lm_head.weight"])
def test_other_names_on_disk_than_in_memory_are_refused(
    name: str, model_factory: Callable[..., Path]
) -> None:
    folder = model_factory(model_type="stablelm", tie=False, pad_token_id=0)
    tensors = load_file(folder / "model.safetensors")
    tensors[f"other.{name}"] = tensors.pop(name)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=f"the checkpoint has no {name}, as transformers has"):
        _family(folder)


def test_a_tied_head_with_a_bias_is_refused(model_factory: Callable[..., Path]) -> None:
    with pytest.raises(ModelError, match="its head is its embedding and has a bias"):
        _family(model_factory(model_type="phi", tie=True, pad_token_id=0))


def _config(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config
