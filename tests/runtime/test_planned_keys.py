"""Rows of quantized weights with factors in them, and plans that ask for those."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from qtool.errors import CheckpointError, EngineError
from qtool.formats.kv_plan import KV_PLAN_PATH, KVPlan
from qtool.formats.scheme import ActivationScheme, WeightScheme, fp8_scheme, w8a8_scheme
from qtool.formats.tensor import QuantizedTensor
from qtool.formats.writer import dump_json
from qtool.quantize.options import QuantizeOptions
from qtool.quantize.pipeline import quantize_model
from qtool.quantize.rtn import quantize_rtn
from qtool.runtime.kernels.backend import Backend
from qtool.runtime.kernels.cpu.native_backend import NativeBackend
from qtool.runtime.kernels.reference import ReferenceBackend
from qtool.runtime.key_smoothing import powers_of_two, scale_rows
from qtool.runtime.loaded_model import load_model
from qtool.runtime.options import EngineOptions
from qtool.runtime.startup import start_engine
from support.batches import run_whole
from support.families import IN_BLOCKS
from support.native import LEVELS, native_at
from support.smoothing import SMOOTHED_MODELS, decoders, load_options, spread_gains
from support.variants import token_ids

CPU = torch.device("cpu")

SCHEMES = {
    "W4 asym g16": WeightScheme(group_size=16),
    "W8 sym": WeightScheme(8, True, "channel", None),
    "W8A8": w8a8_scheme(),
    "W8A8 by tensor": WeightScheme(
        8, True, "tensor", None, "int", ActivationScheme("int", "token")
    ),
    "FP8": fp8_scheme("channel"),
    "FP8 by tensor": fp8_scheme("tensor"),
}


class TestQuantizedRows:
    """Rows of a quantized weight are multiplied by what their scales are."""

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
    @pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
    def test_codes_stay_and_every_weight_is_multiplied_exactly(
        self, scheme: WeightScheme, dtype: torch.dtype
    ) -> None:
        generator = torch.Generator().manual_seed(3)
        weight = torch.randn(34, 48, generator=generator) * 0.03
        exponents = torch.arange(34) % 17 - 8
        input_scale = torch.ones(1) if scheme.has_input_scale else None
        before = quantize_rtn(weight, scheme, dtype, input_scale=input_scale)
        after = scale_rows(before, exponents)
        assert isinstance(after, QuantizedTensor) and after.codes is before.codes
        assert torch.equal(
            after.dequantize(), before.dequantize() * powers_of_two(exponents).unsqueeze(1)
        )
        assert after.scheme.activations == scheme.activations

    def test_float16_becomes_float32_only_where_it_would_round_or_overflow(self) -> None:
        scheme = WeightScheme(8, True, "channel", None)
        codes = torch.full((3, 4), 3, dtype=torch.uint8)
        zeros = torch.full((3, 1), 128, dtype=torch.uint8)
        for values, exponents, kept in (
            ([0.01, 0.01, 0.01], [-1, 8, 0], True),
            ([0.01, 0.01, 0.01], [-8, 0, 0], False),
            ([0.01, 300.0, 0.01], [0, 8, 0], False),
        ):
            scales = torch.tensor(values, dtype=torch.float16).unsqueeze(1)
            before = QuantizedTensor(codes, scales, zeros, scheme)
            after = scale_rows(before, torch.tensor(exponents))
            assert isinstance(after, QuantizedTensor)
            assert after.scales.dtype == (torch.float16 if kept else torch.float32)
            factors = powers_of_two(torch.tensor(exponents)).unsqueeze(1)
            assert torch.equal(after.dequantize(), before.dequantize() * factors)

    @pytest.mark.parametrize("method", ["rtn", "smoothquant", "fp8 channel", "fp8 tensor"])
    @pytest.mark.parametrize("compute", [None, "fp32", "int8"])
    def test_logits_of_a_quantized_model_are_the_same_bits(
        self, method: str, compute: Any, model_factory: Callable[..., Path], tmp_path: Path
    ) -> None:
        folder = _quantized(method, model_factory(kv_heads=2, bias=True), tmp_path)

        def backend() -> Backend:
            if compute is None:
                return ReferenceBackend(CPU, torch.float32)
            return NativeBackend(CPU, torch.bfloat16, native_at(LEVELS[-1]), compute)

        plain, smoothed = decoders(folder, backend)
        ids = token_ids(50)
        assert torch.equal(run_whole(smoothed, ids), run_whole(plain, ids))


def _quantized(method: str, source: Path, tmp_path: Path) -> Path:
    name, _, granularity = method.partition(" ")
    texts = tmp_path / "words.txt"
    texts.write_text("The model reads the text, then the model writes the next word.\n" * 60)
    options = QuantizeOptions(
        method=name,
        granularity=granularity or None,  # type: ignore[arg-type]
        calibration=(str(texts),),
        samples=4,
        seq_len=32,
        device="cpu",
    )
    quantize_model(source, tmp_path / "q", options)
    return tmp_path / "q"


def _write(folder: Path, plan: KVPlan) -> Path:
    dump_json(folder / KV_PLAN_PATH, plan.to_dict())
    return folder


def _uniform(count: int, heads: int, head_dim: int, **changes: object) -> KVPlan:
    """int8 in all layers; each head's keys with factors of 2 and 1 by halves of a half."""
    quarter = head_dim // 4
    head = ((1,) * quarter + (0,) * quarter) * 2
    exponents = ((head,) * heads,) * count
    return replace(KVPlan.uniform("int8", count), **{"key_exponents": exponents} | changes)  # type: ignore[arg-type]


class TestPlans:
    """``key_exponents`` of a checkpoint's plan."""

    def test_they_are_followed_and_shown_where_keys_are_stored_so(
        self, model_factory: Callable[..., Path]
    ) -> None:
        folder = _write(model_factory(), _uniform(2, 2, 16))
        loading = load_options(strict=True)
        with start_engine(EngineOptions(model=str(folder), loading=loading)).engine as engine:
            assert engine.info.key_smoothing == "by the checkpoint's plan in 2 layers"
        wide = load_options(strict=True, kv_cache_dtype="wide")
        with start_engine(EngineOptions(model=str(folder), loading=wide)).engine as engine:
            assert engine.info.key_smoothing == ""

    def test_they_come_before_gains_where_there_are_any(
        self, model_factory: Callable[..., Path]
    ) -> None:
        source = spread_gains(model_factory(**SMOOTHED_MODELS["qwen3"]))
        plan = _uniform(2, 2, 32)
        assert plan.key_exponents is not None
        half = replace(plan, key_exponents=(plan.key_exponents[0], None))
        loaded = load_model(_write(source, half), load_options(strict=True))
        assert (loaded.smoothed.by_plan, loaded.smoothed.by_norm) == ((0,), (1,))
        assert loaded.smoothed.describe() == (
            "by the checkpoint's plan in 1 layers, by gains of k_norm in 1 layers"
        )

    def test_fp8_scales_of_the_checkpoint_keep_keys_as_they_were(
        self, model_factory: Callable[..., Path]
    ) -> None:
        folder = spread_gains(model_factory(**SMOOTHED_MODELS["qwen3"]))
        tensors = load_file(folder / "model.safetensors")
        for name in ("k_scale", "v_scale"):
            tensors[f"model.layers.1.self_attn.{name}"] = torch.ones(1)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        assert load_model(folder, load_options()).smoothed.by_norm == (0,)
        loaded = load_model(_write(folder, _uniform(2, 2, 32)), load_options())
        assert loaded.smoothed.by_plan == (0,) and list(loaded.smoothed.refused) == [1]
        assert any("keys of 1 layers are not smoothed" in note for note in loaded.notes)

    def test_scales_that_span_rows_of_several_channels_are_a_note(
        self, model_factory: Callable[..., Path], tmp_path: Path
    ) -> None:
        source = model_factory(**IN_BLOCKS)
        folder = _write(_quantized("fp8 block", source, tmp_path), _uniform(2, 4, 32))
        note = "keys of 2 layers are not smoothed as qtool/kv_plan.json says: scales of"
        loaded = load_model(folder, load_options())
        assert any(text.startswith(note) for text in loaded.notes)
        assert not loaded.smoothed.by_plan
        with pytest.raises(EngineError, match=note):
            load_model(folder, load_options(strict=True))

    @pytest.mark.parametrize(
        ("family", "plan", "message"),
        [
            ("llama gqa", _uniform(2, 2, 32), r"are \(2, 32\) by KV heads .* has \(2, 16\)"),
            ("llama gqa", _uniform(2, 4, 16), r"are \(4, 16\) by KV heads"),
            (
                "llama gqa",
                _uniform(2, 2, 16, key_exponents=(None, ((1,) + (0,) * 15,) * 2)),
                "of layer 1 differ between channels that are rotated together, 8 apart",
            ),
            (
                "qwen3",
                _uniform(2, 2, 32, key_exponents=(((1,) * 32, (0,) * 32), None)),
                "of layer 0 differ by head, and gains of k_norm are one for all heads",
            ),
        ],
    )
    def test_those_that_would_change_scores_are_refused(
        self, family: str, plan: KVPlan, message: str, model_factory: Callable[..., Path]
    ) -> None:
        with pytest.raises(CheckpointError, match=message) as error:
            load_model(_write(model_factory(**SMOOTHED_MODELS[family]), plan), load_options())
        assert "qtool quantize --kv-cache, or delete the file" in str(error.value)
