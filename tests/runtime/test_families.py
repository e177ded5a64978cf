"""Every family against transformers', in float32: prompt and decode, past window and context."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from qtool.errors import ModelError, UsageError
from qtool.runtime.blocks import FORGOTTEN
from qtool.runtime.config import parse_decoder_config
from qtool.runtime.families import FAMILIES
from qtool.runtime.loaded_model import LoadedModel, load_model
from qtool.runtime.native_decoder import NativeDecoder
from qtool.runtime.options import ModelOptions
from qtool.runtime.scheduled_step import Chunk
from support.batches import (
    BLOCK_SIZE,
    batch_of,
    make_cache,
    make_sequence,
    run_chunked,
    run_whole,
)
from support.families import FAMILY_VARIANTS, LONGROPE, PHI, TWO_ROPES, WINDOW
from support.native import LEVELS
from support.variants import ref_logits, relative_error, token_ids

BASE: dict[str, Any] = {
    "vocab_size": 8,
    "hidden_size": 64,
    "intermediate_size": 8,
    "num_hidden_layers": 12,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}


def _load(folder: Path, length: int | None = None, **options: str) -> LoadedModel:
    chosen = ModelOptions(device="cpu", **{"dtype": "fp32"} | options)
    return load_model(folder, chosen, length)


def _assert_equal_to_transformers(
    folder: Path, backend: str, ids: list[int], length: int | None = None
) -> None:
    expected = ref_logits(folder, ids)
    decoder = _load(folder, length, backend=backend).decoder
    assert relative_error(run_whole(decoder, ids), expected) < 1e-4
    assert relative_error(run_chunked(decoder, ids, [33, 20, 1]), expected) < 1e-4


@pytest.mark.parametrize("variant", FAMILY_VARIANTS)
def test_logits_equal_transformers(model_factory: Callable[..., Path], variant: str) -> None:
    folder, ids = model_factory(**FAMILY_VARIANTS[variant]), token_ids(90)
    for backend in ("reference", "cpu"):
        _assert_equal_to_transformers(folder, backend, ids)


def test_every_family_is_among_the_variants() -> None:
    from support.variants import VARIANTS

    seen = {v.get("model_type", "llama") for v in (VARIANTS | FAMILY_VARIANTS).values()}
    assert seen == set(FAMILIES)


def test_longrope_within_the_original_length_takes_the_short_factors(
    model_factory: Callable[..., Path],
) -> None:
    folder = model_factory(
        **PHI, rope_parameters=dict(LONGROPE), original_max_position_embeddings=32
    )
    _assert_equal_to_transformers(folder, "reference", token_ids(30), length=32)
    assert not _load(folder, 32).notes
    assert any("longrope rotary scaling" in note for note in _load(folder).notes)


def test_dynamic_scaling_stretches_with_the_longest_sequence(
    model_factory: Callable[..., Path],
) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    folder = model_factory(max_positions=64, rope_parameters=rope)
    _assert_equal_to_transformers(folder, "reference", token_ids(60))
    _assert_equal_to_transformers(folder, "reference", token_ids(90), length=90)
    with pytest.raises(UsageError, match="at most 256 tokens"):
        _load(folder, 257)


@pytest.mark.parametrize("variant", ["gemma3", "qwen3", "phi3", "mixtral"])
def test_bfloat16_differs_by_its_rounding_only(
    model_factory: Callable[..., Path], variant: str
) -> None:
    folder, ids = model_factory(**FAMILY_VARIANTS[variant]), token_ids(40)
    expected = ref_logits(folder, ids)
    for backend in ("reference", "cpu"):
        decoder = _load(folder, backend=backend, dtype="bf16").decoder
        assert relative_error(run_whole(decoder, ids), expected) < 0.05


@pytest.mark.parametrize("variant", ["gemma2", "phi4 partial", "qwen3", "qwen2_moe"])
def test_reference_gives_a_row_the_same_bits_in_chunks_of_any_size(
    model_factory: Callable[..., Path], variant: str
) -> None:
    decoder = _load(model_factory(**FAMILY_VARIANTS[variant]), backend="reference").decoder
    ids = token_ids(70)
    whole = run_whole(decoder, ids)
    assert torch.equal(run_chunked(decoder, ids, [33, 5, 1]), whole)
    assert torch.equal(run_chunked(decoder, ids, [64, 3]), whole)


class TestConfig:
    """``config.json`` in the spellings that are on the hub."""

    def test_gemma3_old_and_new_spelling_mean_the_same(self) -> None:
        base = BASE | {"model_type": "gemma3_text", "sliding_window": 16}
        old = base | {
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            "sliding_window_pattern": 6,
        }
        types = ["sliding_attention"] * 5 + ["full_attention"]
        new = base | {"rope_parameters": TWO_ROPES, "layer_types": types * 2}
        assert parse_decoder_config(old) == parse_decoder_config(new)
        assert parse_decoder_config(old).windows == ((16,) * 5 + (None,)) * 2
        assert parse_decoder_config(old).rope_of == (0, 0, 0, 0, 0, 1) * 2

    def test_phi3_old_and_new_spelling_mean_the_same(self) -> None:
        length = {"original_max_position_embeddings": 32}
        factors = {key: LONGROPE[key] for key in ("short_factor", "long_factor")}
        base = BASE | {"model_type": "phi3"} | length
        old = base | {"rope_scaling": {"type": "su", **factors}, "partial_rotary_factor": 0.75}
        new = base | {"rope_parameters": LONGROPE}
        assert parse_decoder_config(old) == parse_decoder_config(new)
        assert parse_decoder_config(old).ropes[0].factor == 2.0

    def test_a_block_is_forgotten_only_where_all_layers_have_a_window(self) -> None:
        assert parse_decoder_config(BASE | {"model_type": "mistral"}).window == 4096
        assert parse_decoder_config(BASE | {"model_type": "gemma2"}).window is None
        assert parse_decoder_config(BASE | {"model_type": "llama"}).window is None

    def test_a_yarn_model_may_run_to_the_length_that_it_was_stretched_to(self) -> None:
        yarn = {"rope_scaling": {"type": "yarn", "factor": 4.0}, "model_type": "qwen2"}
        config = parse_decoder_config(BASE | yarn)
        assert (config.max_position, config.longest) == (64, 256)

    @pytest.mark.parametrize(
        ("model_type", "changes", "message"),
        [
            ("gemma3", {}, "model_type 'gemma3' is not supported.*gemma3_text"),
            ("gemma2", {"hidden_activation": "relu"}, "hidden_activation 'relu'"),
            ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
            ("qwen3", {"layer_types": ["linear_attention"] * 12}, "layer_types.*linear_attention"),
            ("qwen3", {"layer_types": ["full_attention"]}, "layer_types has 1 entries for 12"),
            ("llama", {"rope_scaling": {"type": "ntk"}}, "rotary scaling 'ntk'"),
            (
                "llama",
                {"rope_scaling": {"type": "dynamic", "factor": 2.0, "alpha": 1.0}},
                "rotary scaling 'dynamic' with 'alpha'",
            ),
            ("phi3", {"partial_rotary_factor": 0.2}, "partial_rotary_factor 0.2.* rotates 3"),
            ("phi3", {"rope_parameters": LONGROPE | {"long_factor": [1.0]}}, "1 values in 'long_f"),
            ("mixtral", {"num_attention_heads": ...}, "no 'num_attention_heads'"),
        ],
    )
    def test_what_the_decoder_does_not_have_is_refused_by_name(
        self, model_type: str, changes: dict[str, Any], message: str
    ) -> None:
        config = BASE | {"model_type": model_type} | changes
        with pytest.raises(ModelError, match=message):
            parse_decoder_config({k: v for k, v in config.items() if v is not ...})


@pytest.mark.parametrize("backend", ["reference", "cpu", "native"])
def test_blocks_behind_the_window_may_hold_anything(
    model_factory: Callable[..., Path], backend: str
) -> None:
    if backend == "native" and not LEVELS:
        pytest.skip("no native code here")
    options = {"cpu_compute": "fp32"} if backend == "native" else {"backend": backend}
    decoder = _load(
        model_factory(model_type="mistral", sliding_window=WINDOW), None, **options
    ).decoder
    ids, cache = token_ids(90), make_cache(decoder)
    sequence = make_sequence(ids, 1)
    logits = [decoder.forward(batch_of(Chunk(sequence, 0, 60)), cache)]
    for index in range((60 - WINDOW + 1) // BLOCK_SIZE):
        for pool in cache.pools:
            pool[sequence.block_table[index]].view(torch.uint8).fill_(255)
        sequence.block_table[index] = FORGOTTEN
    assert sequence.block_table.count(FORGOTTEN) == 2
    logits += [decoder.forward(batch_of(Chunk(sequence, i, 1)), cache) for i in range(60, 90)]
    assert relative_error(torch.cat(logits), run_whole(decoder, ids)) < 1e-5


@pytest.mark.skipif(not LEVELS, reason="no native code here")
@pytest.mark.parametrize(
    ("variant", "why"),
    [
        ("qwen3", "norm of queries and keys"),
        ("gemma2", "norm behind attention and MLP"),
        ("smollm3", "layers with rotary tables of their own"),
        ("phi4 partial", "heads rotated in part"),
        ("mixtral", "mixture of experts"),
    ],
)
def test_what_the_native_step_lacks_is_named_and_the_layers_run_one_by_one(
    model_factory: Callable[..., Path], variant: str, why: str
) -> None:
    folder, ids = model_factory(**FAMILY_VARIANTS[variant]), token_ids(40)
    loaded = _load(folder, None, cpu_compute="fp32")
    assert not isinstance(loaded.decoder, NativeDecoder)
    assert any(f"the native step has no {why}" in note for note in loaded.notes)
    assert relative_error(run_whole(loaded.decoder, ids), ref_logits(folder, ids)) < 1e-4
    small = _load(folder, None, cpu_compute="fp32", kv_cache_dtype="int8")
    assert small.decoder.kv.schemes.name == "int8"
    (remark,) = set(small.notes) - set(loaded.notes)
    assert "int8 has not been measured on this model" in remark
    assert relative_error(run_whole(small.decoder, ids), ref_logits(folder, ids)) < 0.05
