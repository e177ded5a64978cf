"""Factors between queries and keys: no score changes, and a scale a token suits all channels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from qtool.calibration.families import find_family
from qtool.calibration.walk import Walk
from qtool.errors import CheckpointError
from qtool.formats.checkpoint import CheckpointReader
from qtool.formats.kv_plan import MAX_EXPONENT, KeyExponents
from qtool.formats.scheme import WeightScheme
from qtool.quantize.rtn import quantize_rtn
from qtool.runtime.cache_quality import compare_caches
from qtool.runtime.config import parse_decoder_config
from qtool.runtime.kernels.cpu.native_backend import NativeBackend
from qtool.runtime.kernels.reference import ReferenceBackend
from qtool.runtime.key_smoothing import (
    FLOAT16_MAX_EXPONENT,
    KeySmoother,
    calibrated_exponents,
    expected_peaks,
    exponents_of,
    powers_of_two,
)
from qtool.runtime.loaded_model import LoadedModel, load_model
from qtool.runtime.loader import DecoderBuilder
from qtool.runtime.weight_source import WeightSource
from support.batches import run_chunked, run_whole
from support.native import LEVELS, native_at
from support.smoothing import (
    SMOOTHED_MODELS,
    decoders,
    edit,
    large_bias,
    load_options,
    model_of,
)
from support.variants import token_ids

CPU = torch.device("cpu")


class TestExponents:
    """From peaks to powers."""

    @given(
        peaks=st.lists(st.floats(2.0**-20, 2.0**20, width=32), min_size=8, max_size=8),
        zeros=st.sets(st.integers(0, 7), max_size=7),
        rotary_dim=st.sampled_from([0, 4, 8]),
    )
    @settings(deadline=None)
    def test_they_level_what_is_not_zero_and_are_tied_where_channels_rotate(
        self, peaks: list[float], zeros: set[int], rotary_dim: int
    ) -> None:
        table = torch.tensor([[0.0 if i in zeros else p for i, p in enumerate(peaks)]])
        (found,) = exponents_of(table, rotary_dim)
        half = rotary_dim // 2
        assert found.dtype == torch.int64 and found.min() == 0 and found.max() <= MAX_EXPONENT
        assert torch.equal(found[:half], found[half:rotary_dim])
        tied = table[0].clone()
        tied[:rotary_dim] = torch.maximum(tied[:half], tied[half:rotary_dim]).repeat(2)
        alive = tied > 0
        assert not found[~alive].any()
        levelled = (tied.maximum(tied.max() / 256) / powers_of_two(found))[alive]
        assert levelled.max() / levelled.min() <= 2.001

    @pytest.mark.parametrize("dead", [0.0, 1e-6])
    def test_a_channel_of_zeros_says_nothing_of_the_others(self, dead: float) -> None:
        (found,) = exponents_of(torch.tensor([[1.0, 1.0, 1.0, dead]]), 0)
        # One that is small but there counts as 2**-8 of the largest.
        assert found.tolist() == ([0, 0, 0, 0] if dead == 0 else [8, 8, 8, 0])

    def test_heads_are_on_their_own_and_nothing_follows_from_no_number(self) -> None:
        peaks = torch.tensor([[1.0, 4.0], [32.0, 1.0], [0.0, 0.0]])
        assert exponents_of(peaks, 0).tolist() == [[0, 2], [5, 0], [0, 0]]
        assert not exponents_of(torch.tensor([[1.0, torch.nan], [1.0, 4.0]]), 0).any()

    def test_heads_that_share_a_norm_share_the_larger_peaks(
        self, model_factory: Callable[..., Path]
    ) -> None:
        peaks = [[[1.0] * 15 + [8.0], [1.0] * 14 + [4.0, 1.0]]] * 2
        for name, expected in (("qwen2", [3, 2]), ("qwen3 mha, untied, window", [3, 3])):
            with CheckpointReader(model_factory(**SMOOTHED_MODELS[name])) as reader:
                config = parse_decoder_config(reader.config)
            found = calibrated_exponents(peaks, config)
            assert [max(head) for head in found[1]] == expected


class TestExpectedPeaks:
    """What projections and gains say of keys that no text has been run for."""

    def test_they_are_the_sizes_of_channels_behind_random_inputs(self) -> None:
        generator = torch.Generator().manual_seed(5)

        def noise(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        gains, before, bias = noise(8), noise(40).exp(), 3 * noise(16)
        gains[2] = 0.0
        weight = noise(16, 40) * noise(16, 1).exp()
        keys = (noise(4000, 40) * before @ weight.t() + bias).unflatten(1, (2, 8))
        sizes = keys.square().mean(0).sqrt()
        sizes = sizes / sizes.square().mean(1, keepdim=True).sqrt()
        expected = (sizes * gains.abs()).amax(0, keepdim=True)
        assert torch.allclose(expected_peaks(gains, weight, bias, before), expected, rtol=0.05)
        quantized = quantize_rtn(weight, WeightScheme(8, True, "channel", None), torch.float32)
        found = expected_peaks(gains, quantized, bias, before)
        assert torch.allclose(found, expected, rtol=0.06)

    def test_a_head_of_zeros_has_no_factors(self) -> None:
        found = expected_peaks(torch.ones(4), torch.zeros(4, 3), None, torch.ones(3))
        assert not exponents_of(found, 4).any()


class TestNoScoreChanges:
    """A cache in the compute dtype holds other keys and gives the same bits."""

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("name", SMOOTHED_MODELS)
    def test_logits_of_the_reference_are_the_same_bits(
        self, name: str, dtype: torch.dtype, model_factory: Callable[..., Path]
    ) -> None:
        folder = model_of(name, model_factory)
        plain, smoothed = decoders(folder, lambda: ReferenceBackend(CPU, dtype))
        ids = token_ids(90)
        assert torch.equal(run_whole(smoothed, ids), run_whole(plain, ids))
        assert torch.equal(run_chunked(smoothed, ids, [40, 1]), run_chunked(plain, ids, [40, 1]))

    @pytest.mark.parametrize("compute", ["fp32", "bf16"])
    @pytest.mark.parametrize("name", ["llama gqa", "qwen2", "qwen3", "gemma3", "phi3"])
    def test_so_are_those_of_native_kernels(
        self, name: str, compute: Any, model_factory: Callable[..., Path]
    ) -> None:
        dtype = torch.float32 if compute == "fp32" else torch.bfloat16
        native = native_at(LEVELS[-1])
        plain, smoothed = decoders(
            model_of(name, model_factory), lambda: NativeBackend(CPU, dtype, native, compute)
        )
        ids = token_ids(90)
        assert torch.equal(run_chunked(smoothed, ids, [40, 1]), run_chunked(plain, ids, [40, 1]))

    def test_float16_gets_smaller_factors_and_stays_close(
        self, model_factory: Callable[..., Path]
    ) -> None:
        folder = large_bias(model_factory(model_type="qwen2"), 200.0)
        with CheckpointReader(folder) as reader:
            config = parse_decoder_config(reader.config)
        largest = tuple((tuple([0] * 15 + [8]),) * 2 for _ in range(2))
        with pytest.raises(CheckpointError, match="rotated together, 8 apart"):
            KeySmoother(config, largest, (), torch.float16)
        head = tuple([0] * 7 + [8]) * 2
        plain, smoothed = decoders(
            folder, lambda: ReferenceBackend(CPU, torch.float16), ((head, head),) * 2
        )
        ids = token_ids(60)
        found, expected = run_whole(smoothed, ids), run_whole(plain, ids)
        assert (found - expected).norm() < 2e-3 * expected.norm()
        rows = torch.ones(4 * 16 + 2 * 16 + 2 * 16, 1)
        smoother = KeySmoother(config, ((head, head),) * 2, (), torch.float16)
        (scaled,), _ = smoother.projections(0, "a", [rows], [None])
        assert isinstance(scaled, Tensor)
        assert scaled.max() == 2.0**FLOAT16_MAX_EXPONENT == 1 / scaled.min()


class TestWhatItIsFor:
    """Scales a token and head."""

    def test_a_pair_of_gains_of_30_costs_little(self, model_factory: Callable[..., Path]) -> None:
        """As in Gemma 3, whose queries make little of such channels."""
        folder = model_factory(**SMOOTHED_MODELS["gemma3"], max_positions=512)
        for norm, gain in (("q_norm.weight", 1 / 30), ("k_norm.weight", 30.0)):
            edit(folder, norm, partial(_set_pair, gain=gain))
        loaded = load_model(folder, load_options())
        assert loaded.smoothed.by_norm == (0, 1, 2, 3) and not loaded.notes
        smoothed, plain = _key_losses(loaded, folder, "int8")
        assert smoothed < plain / 8
        # Values stay as coarse as they are.
        smoothed, plain = _key_losses(loaded, folder, "k8v4")
        assert smoothed < plain / 1.3

    def test_large_biases_of_keys_cost_little(self, model_factory: Callable[..., Path]) -> None:
        folder = large_bias(model_factory(model_type="qwen2", max_positions=512), 60.0)
        exponents = _calibrated(folder)
        assert max(exponents[0][0]) >= 4
        loaded = load_model(folder, load_options(), key_exponents=exponents)
        assert loaded.smoothed.by_plan == (0, 1) and not loaded.notes
        smoothed, plain = _key_losses(loaded, folder, "int8")
        assert smoothed < plain / 5
        # A scale a channel has no use for factors, and takes them without a trace.
        smoothed, plain = _key_losses(loaded, folder, "int4")
        assert smoothed == plain > 0


def _set_pair(gains: Tensor, gain: float) -> None:
    """Of a norm that multiplies by its weight and one: two channels that are rotated together."""
    gains[5] = gains[5 + len(gains) // 2] = gain - 1


def _key_losses(loaded: LoadedModel, folder: Path, form: str) -> tuple[float, float]:
    """KL of a form of the cache against wide, with factors and without."""
    with CheckpointReader(folder) as reader:
        config = parse_decoder_config(reader.config)
        plain = DecoderBuilder(WeightSource(reader), config, loaded.decoder.backend).build(512)
    windows = torch.randint(384, (2, 300), generator=torch.Generator().manual_seed(6))
    models = loaded, replace(loaded, decoder=plain)
    smoothed, unsmoothed = (compare_caches(m, ["wide", form], windows)[1].kl for m in models)
    return smoothed, unsmoothed


def _calibrated(folder: Path) -> tuple[KeyExponents, ...]:
    ids = torch.randint(384, (3, 100), generator=torch.Generator().manual_seed(1))
    with CheckpointReader(folder) as reader, torch.no_grad():
        walk, peaks = Walk(reader, find_family(reader.config), CPU, ids=ids, watch_cache=True), []
        for _ in walk.blocks():
            walk.advance()
            assert walk.cache_peaks is not None
            peaks.append(walk.cache_peaks.keys)
        return calibrated_exponents(peaks, parse_decoder_config(reader.config))
