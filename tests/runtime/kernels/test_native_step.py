"""A whole step in one native call: against transformers and the reference, in any company."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from qtool.errors import EngineError, UsageError
from qtool.quantize.options import QuantizeOptions
from qtool.quantize.pipeline import quantize_model
from qtool.runtime.kernels.cpu.torch_ops import CpuBackend
from qtool.runtime.loaded_model import LoadedModel, load_model
from qtool.runtime.model import Decoder
from qtool.runtime.native_decoder import NativeDecoder
from qtool.runtime.options import ModelOptions
from qtool.runtime.scheduled_step import Chunk
from support.batches import (
    batch_of,
    block_size_of,
    make_cache,
    make_sequence,
    run_chunked,
    run_whole,
)
from support.native import LEVELS
from support.variants import VARIANTS, ref_logits, relative_error, token_ids

pytestmark = pytest.mark.skipif(not LEVELS, reason="no native code here")

# Compute, KV cache, and the distance from the reference's logits that it may have. Random weights
# of a tiny model make more of the noise of 8-bit activations than a trained one does.
FORMS = {
    "fp32": ("fp32", "auto", 1e-5),
    "bf16": ("bf16", "auto", 0.02),
    "int8": ("int8", "auto", 0.04),
    "int8, int8 KV": ("int8", "int8", 0.05),
    "int8, fp8 KV": ("int8", "fp8", 0.1),
    "int8, k8v4 KV": ("int8", "k8v4", 0.15),
}


def _load(folder: Path, **options: str) -> LoadedModel:
    return load_model(folder, ModelOptions(device="cpu", **{"dtype": "fp32"} | options))


def _native(folder: Path, compute: str, kv_cache_dtype: str = "auto") -> Decoder:
    decoder = _load(folder, cpu_compute=compute, kv_cache_dtype=kv_cache_dtype).decoder
    assert isinstance(decoder, NativeDecoder)
    return decoder


@pytest.fixture(scope="module")
def quantized(model_factory: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """4 bits in groups of 32; widths that leave ragged blocks of 32 columns."""
    folder = model_factory(hidden_size=96, intermediate_size=160, heads=6, kv_heads=2, layers=3)
    out = tmp_path_factory.mktemp("quantized") / "model"
    quantize_model(folder, out, QuantizeOptions(method="rtn", group_size=32))
    return out


@pytest.fixture(scope="module")
def reference(quantized: Path) -> Decoder:
    return _load(quantized, backend="reference").decoder


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_transformers_at_every_level(
    monkeypatch: pytest.MonkeyPatch, model_factory: Callable[..., Path], variant: str
) -> None:
    folder, ids = model_factory(**VARIANTS[variant]), token_ids(90)
    expected = ref_logits(folder, ids)
    for level in LEVELS:
        monkeypatch.setenv("QTOOL_CPU_ISA", level)
        decoder = _native(folder, "fp32")
        assert relative_error(run_whole(decoder, ids), expected) < 1e-4, level
        assert relative_error(run_chunked(decoder, ids, [33, 20, 1]), expected) < 1e-4, level


@pytest.mark.parametrize("form", FORMS)
def test_a_quantized_model_stays_near_the_reference_at_every_level(
    monkeypatch: pytest.MonkeyPatch, quantized: Path, reference: Decoder, form: str
) -> None:
    compute, kv_cache_dtype, bound = FORMS[form]
    ids = token_ids(60)
    expected = run_whole(reference, ids)
    for level in LEVELS:
        monkeypatch.setenv("QTOOL_CPU_ISA", level)
        logits = run_whole(_native(quantized, compute, kv_cache_dtype), ids)
        assert relative_error(logits, expected) < bound, level
        # In float64: log_softmax in float32 alone makes 1e-7 of nothing.
        log_p, log_q = expected.double().log_softmax(-1), logits.double().log_softmax(-1)
        assert float((log_p.exp() * (log_p - log_q)).sum(-1).mean()) < bound**2, level


class TestTheSameBits:
    """A row's logits do not depend on its chunk, its company or the number of threads."""

    @pytest.fixture(params=FORMS)
    def decoder(self, request: pytest.FixtureRequest, quantized: Path) -> Decoder:
        return _native(quantized, *FORMS[request.param][:2])

    @pytest.mark.parametrize("sizes", [[1], [2, 3], [16], [17, 3], [129], [40, 1, 1, 29]])
    def test_in_chunks_of_any_size(self, decoder: Decoder, sizes: list[int]) -> None:
        ids = token_ids(150, 1)
        assert torch.equal(run_chunked(decoder, ids, sizes), run_whole(decoder, ids))

    def test_in_any_company(self, decoder: Decoder) -> None:
        """Prompts, chunks and decodes of 9 others in the same step."""
        ids, size = token_ids(70, 2), block_size_of(decoder)
        alone, cache = run_whole(decoder, ids), make_cache(decoder, 256, num_tails=10)
        mine = make_sequence(ids, 0, "mine", block_size=size, tail=0)
        others = [
            make_sequence(
                token_ids(9 + 7 * i, 10 + i), 21 + 20 * i, f"o{i}", block_size=size, tail=i + 1
            )
            for i in range(9)
        ]
        before = [Chunk(other, 0, other.num_tokens - 3) for other in others]
        batch = batch_of(*before[:4], Chunk(mine, 0, 50), *before[4:], block_size=size)
        first = decoder.forward(batch, cache)
        offset = sum(chunk.length for chunk in before[:4])
        assert torch.equal(first[offset : offset + 50], alone[:50])
        after = [Chunk(other, other.num_tokens - 3, 1) for other in others]
        batch = batch_of(*after, Chunk(mine, 50, 20), block_size=size)
        second = decoder.forward(batch, cache)
        assert torch.equal(second[len(after) :], alone[50:])

    def test_on_any_number_of_threads(self, decoder: Decoder) -> None:
        ids, results = token_ids(140, 3), []
        library = decoder.backend.library  # type: ignore[attr-defined]
        before = library.qt_pool_size()
        for threads in (1, 2, 5):
            library.qt_pool_start(threads)
            results.append(run_chunked(decoder, ids, [100, 1]))
        library.qt_pool_start(before)
        assert all(torch.equal(result, results[0]) for result in results)


class TestTheLikeliest:
    """Tokens instead of logits."""

    @pytest.mark.parametrize("rows", [1, 2, 3, 17])
    def test_they_are_those_of_the_logits_at_every_level(
        self, monkeypatch: pytest.MonkeyPatch, quantized: Path, rows: int
    ) -> None:
        ids = token_ids(rows, 5)
        for level in LEVELS:
            monkeypatch.setenv("QTOOL_CPU_ISA", level)
            decoder = _native(quantized, "int8", "int8")
            batch = batch_of(Chunk(make_sequence(ids, 0), 0, rows))
            expected = decoder.forward(batch, make_cache(decoder)).max(dim=-1)
            best, tokens = decoder.likeliest(batch, make_cache(decoder))
            assert torch.equal(best, expected.values) and torch.equal(tokens, expected.indices)

    @pytest.mark.parametrize("last", [0.0, torch.nan])
    def test_of_equals_the_lowest_is_taken_and_a_nan_is_told(
        self, model_factory: Callable[..., Path], tmp_path: Path, last: float
    ) -> None:
        folder = tmp_path / "model"
        shutil.copytree(model_factory(tie=False), folder)
        tensors = load_file(folder / "model.safetensors")
        tensors["lm_head.weight"].zero_()[-1] = last
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        decoder = _native(folder, "fp32")
        batch = batch_of(Chunk(make_sequence([3, 4, 5], 0), 0, 3))
        best, tokens = decoder.likeliest(batch, make_cache(decoder))
        if last == 0:
            assert best.tolist() == [0] * 3 and tokens.tolist() == [0] * 3
        else:
            assert best.isnan().all()


class TestTheCache:
    """Pages in the kernels' own form."""

    def test_a_copied_block_gives_the_same_continuation(self, quantized: Path) -> None:
        from qtool.runtime.tails import BlockCopy

        decoder, ids = _native(quantized, "int8", "int8"), token_ids(16, 4)
        cache, sequence = make_cache(decoder), make_sequence(ids, 0)
        decoder.forward(batch_of(Chunk(sequence, 0, 15)), cache)
        expected = decoder.forward(batch_of(Chunk(sequence, 15, 1)), cache)
        cache.copy_blocks([BlockCopy(0, 7)])
        sequence.block_table = [7]
        assert torch.equal(decoder.forward(batch_of(Chunk(sequence, 15, 1)), cache), expected)

    @pytest.mark.parametrize(
        ("kv_cache_dtype", "bits", "scales"),
        [("auto", 64, 0), ("int8", 16, 4), ("fp8", 16, 4), ("k8v4", 12, 6)],
    )
    def test_its_bytes_are_those_of_the_form_and_no_more(
        self, quantized: Path, kv_cache_dtype: str, bits: int, scales: int
    ) -> None:
        decoder = _native(quantized, "int8", kv_cache_dtype)
        config = decoder.config
        a_layer = config.num_kv_heads * (config.head_dim * bits // 8 + scales)
        assert decoder.kv_bytes_per_token == config.num_layers * a_layer
        size = decoder.kv.schemes.block_size(None)
        pools = decoder.new_cache(5, size).pools
        assert sum(pool.nbytes for pool in pools) == 5 * size * decoder.kv_bytes_per_token

    def test_blocks_must_be_whole_tiles(self, quantized: Path) -> None:
        with pytest.raises(UsageError, match="block_size=24.*multiple of 16"):
            _native(quantized, "int8").new_cache(4, 24)


class TestFallback:
    """Without native code the torch path runs, and says so."""

    def test_without_a_library_torch_runs_with_a_note(
        self, monkeypatch: pytest.MonkeyPatch, quantized: Path, reference: Decoder
    ) -> None:
        monkeypatch.setenv("QTOOL_NATIVE", "0")
        model = _load(quantized)
        assert type(model.decoder.backend) is CpuBackend
        assert any("QTOOL_NATIVE=0" in note and "slower" in note for note in model.notes)
        ids = token_ids(20)
        assert relative_error(run_whole(model.decoder, ids), run_whole(reference, ids)) < 1e-5
        with pytest.raises(EngineError, match="--strict: .*QTOOL_NATIVE=0"):
            load_model(quantized, ModelOptions(device="cpu", strict=True))
        small = _load(quantized, kv_cache_dtype="int8").decoder
        assert small.kv_cache_dtype.startswith("int8")
        assert relative_error(run_whole(small, ids), run_whole(reference, ids)) < 0.05

    def test_a_head_the_attention_does_not_take_runs_layer_by_layer(
        self, model_factory: Callable[..., Path]
    ) -> None:
        folder, ids = model_factory(head_dim=24), token_ids(20)
        model = _load(folder, cpu_compute="fp32")
        assert not isinstance(model.decoder, NativeDecoder)
        assert "head_dim is 24" in model.notes[0]
        assert relative_error(run_whole(model.decoder, ids), ref_logits(folder, ids)) < 1e-4

    def test_plain_models_stay_on_torch_unless_asked(self, tiny_model_folder: Path) -> None:
        assert type(_load(tiny_model_folder).decoder) is Decoder

    def test_auto_computes_in_int8_only_in_bfloat16(self, quantized: Path) -> None:
        for dtype, compute in (("bf16", "int8"), ("fp32", "fp32")):
            decoder = _load(quantized, dtype=dtype).decoder
            kernels = {op.kernel for op in decoder.linears.values()}
            assert {kernel.split(" (")[0] for kernel in kernels} == {f"native {compute}"}
