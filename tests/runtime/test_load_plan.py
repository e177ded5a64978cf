"""The load plan says what was loaded, what fits, and what was not as asked."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from qtool.cli import main
from qtool.errors import EngineError
from qtool.quantize.options import QuantizeOptions
from qtool.quantize.pipeline import quantize_model
from qtool.runtime.engine import Engine
from qtool.runtime.load_plan import make_plan
from qtool.runtime.loaded_model import load_model
from qtool.runtime.options import EngineOptions, ModelOptions
from qtool.runtime.request import EngineInfo
from qtool.runtime.tokenizer import Tokenizer
from support.families import FAMILY_VARIANTS
from support.native import LEVELS
from support.real_server import real_server


def _plan(folder: Path, blocks: int = 64, **options: object) -> EngineInfo:
    loading = ModelOptions(device="cpu", **options)  # type: ignore[arg-type]
    model = load_model(folder, loading)
    return make_plan(model, EngineOptions(model="org/tiny", loading=loading), 16, blocks)


def test_it_names_every_kernel_once_with_count_and_bytes(tiny_model_folder: Path) -> None:
    plan = _plan(tiny_model_folder, dtype="fp32", backend="reference")
    found = {part.part: (part.count, part.num_bytes, part.kernel) for part in plan.parts}
    tiles = "torch linear, row tiles"
    assert found == {
        "q_proj, k_proj, v_proj": (2, 2 * 4 * 64 * (64 + 32 + 32), tiles),
        "o_proj": (2, 2 * 4 * 64 * 64, tiles),
        "gate_proj, up_proj": (2, 2 * 4 * 64 * 256, tiles),
        "down_proj": (2, 2 * 4 * 128 * 64, tiles),
        "lm_head": (1, 4 * 64 * 384, tiles),
        "attention": (2, 0, "torch, row tiles"),
        "norm": (5, 0, "torch, row tiles"),
    }
    assert {part.why for part in plan.parts} == {plan.backend_reason} == {"asked for"}
    assert sum(part.num_bytes for part in plan.parts) == plan.weight_bytes


def test_it_says_how_many_tokens_and_sequences_fit(tiny_model_folder: Path) -> None:
    plan = _plan(tiny_model_folder, blocks=40, dtype="fp32", backend="reference")
    assert (plan.num_cache_tokens, plan.num_full_sequences) == (640, 2.5)
    assert (plan.kv_cache_dtype, plan.kv_bytes_per_token) == ("float32", 2 * 2 * 2 * 16 * 4)


def test_it_says_what_reads_a_quantized_cache_and_what_its_tail_pages_take(
    tiny_model_folder: Path,
) -> None:
    loading = ModelOptions(device="cpu", dtype="fp32", backend="reference", kv_cache_dtype="int4")
    options = EngineOptions(model="org/tiny", loading=loading)
    plan = make_plan(load_model(tiny_model_folder, loading), options, 64, 40, 3)
    (attention,) = (part for part in plan.parts if part.part == "attention")
    assert attention.kernel == "torch, row tiles, over pages decoded layer by layer"
    assert "no native kernel here reads keys and values of the int4 form" in attention.why
    assert (plan.block_size, plan.num_cache_tokens) == (64, 2560)
    # 16 elements a head: keys 4.5 bits, values 4 and a grid of 32 bits.
    assert plan.kv_bytes_per_token == 2 * 2 * (9 + 12)
    assert plan.kv_tail_bytes == 3 * 64 * 2 * 2 * 2 * 16 * 4
    assert plan.kv_cache_dtype.startswith("int4 (keys by channel in pages of 64")


def test_a_cache_that_holds_no_whole_sequence_is_a_note_and_under_strict_an_error(
    tiny_model_folder: Path,
) -> None:
    (note,) = _plan(tiny_model_folder, 15, dtype="fp32", backend="reference").notes
    assert "holds 240 tokens, so no sequence reaches max_model_len=256; give" in note
    assert _plan(tiny_model_folder, 16, dtype="fp32", backend="reference").notes == ()
    with pytest.raises(EngineError, match="--strict: the KV cache holds 240 tokens"):
        _plan(tiny_model_folder, 15, dtype="fp32", backend="reference", strict=True)


@pytest.mark.parametrize(
    ("options", "cost"),
    [
        ({"batch_invariant": False}, ""),
        ({"batch_invariant": True, "backend": "reference"}, "tiles of 16 rows"),
        ({"batch_invariant": True}, "nothing where weights are quantized" if LEVELS else "tiles"),
    ],
)
def test_it_says_what_batch_invariance_costs(
    tiny_model_folder: Path, options: dict[str, object], cost: str
) -> None:
    found = _plan(tiny_model_folder, **options).batch_invariance
    assert cost in found and bool(found) == bool(options["batch_invariant"])


@pytest.mark.skipif(not LEVELS, reason="no native code here")
class TestNative:
    @pytest.fixture
    def quantized(
        self, model_factory: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
    ) -> Path:
        out = tmp_path_factory.mktemp("quantized") / "model"
        layers = ("layers.0.mlp.down_proj=fp8-weights",)
        options = QuantizeOptions(method="rtn", group_size=32, layers=layers)
        quantize_model(model_factory(), out, options)
        return out

    def test_a_linear_no_native_kernel_takes_says_why(self, quantized: Path) -> None:
        plan = _plan(quantized)
        down = [part for part in plan.parts if part.part == "down_proj"]
        assert [part.count for part in down] == [1, 1]
        torch, native = sorted(down, key=lambda part: part.kernel, reverse=True)
        assert torch.kernel.startswith("torch") and "FP8" in torch.why and "torch" in torch.why
        assert native.kernel.startswith("native fp32") and native.why == plan.backend_reason

    @pytest.mark.parametrize("name", ["auto", "int4"])
    def test_native_attention_runs_layer_by_layer_where_the_step_lacks_something(
        self, model_factory: Callable[..., Path], name: str
    ) -> None:
        folder = model_factory(**FAMILY_VARIANTS["qwen3"])
        plan = _plan(folder, cpu_compute="fp32", kv_cache_dtype=name)
        parts = {part.part: part for part in plan.parts}
        assert parts["attention"].kernel == "native, paged, a call a layer"
        assert parts["norm"].kernel.startswith("torch") and "native call" in parts["norm"].why
        assert any("native step has no norm of queries" in note for note in plan.notes)


def test_experts_of_a_layer_are_one_part(model_factory: Callable[..., Path]) -> None:
    plan = _plan(model_factory(**FAMILY_VARIANTS["qwen3_moe"]), backend="reference")
    counts = {part.part: part.count for part in plan.parts}
    assert counts["gate_proj, up_proj"] == counts["down_proj"] == 2 * 5
    assert counts["gate"] == 2


def test_the_engine_holds_it(tiny_model_folder: Path) -> None:
    loading = ModelOptions(device="cpu", dtype="fp32", backend="reference")
    options = EngineOptions(model="org/tiny", loading=loading, kv_cache_memory=10**6)
    engine = Engine(
        load_model(tiny_model_folder, loading), Tokenizer.load(tiny_model_folder), options
    )
    assert engine.info.num_blocks == 10**6 // (16 * 512)
    assert engine.info.prefix_caching and engine.info.scheduling_policy == "priority"


def test_serve_plan_prints_it_and_stops(tiny_model_folder: Path) -> None:
    asked = ["--plan", "--device", "cpu", "--backend", "reference", "--kv-cache-memory", "1M"]
    result = CliRunner().invoke(main, ["serve", str(tiny_model_folder), *asked])
    assert result.exit_code == 0, result.output
    for text in ("2 x o_proj: torch linear, row tiles", "KV cache: float32", "scheduler: priority"):
        assert text in result.stdout
    assert "listening" not in result.output
    result = CliRunner().invoke(
        main, ["serve", str(tiny_model_folder), *asked, "--kv-cache-dtype=int4"]
    )
    for text in ("KV cache: int4 (keys by channel", "blocks of 64", "for pages that are not full"):
        assert text in result.stdout


def test_serve_plan_says_what_eviction_keeps_and_what_then_fits(tiny_model_folder: Path) -> None:
    asked = ["--plan", "--device", "cpu", "--backend", "reference", "--kv-cache-memory", "1M"]
    asked += ["--kv-eviction", "heavy-hitter", "--kv-budget", "100", "--max-num-seqs", "20"]
    result = CliRunner().invoke(main, ["serve", str(tiny_model_folder), *asked])
    assert result.exit_code == 0, result.output
    for text in (
        "1,920 tokens in 120 blocks of 16 (20.0 sequences",
        "eviction: heavy-hitter, a sequence keeps 96 tokens at most: the first 16, the last 48",
        "prefixes are not kept",
    ):
        assert text in result.stdout, text


def test_serve_plan_says_what_windows_give_back_or_why_they_do_not(
    model_factory: Callable[..., Path],
) -> None:
    folder = model_factory(max_positions=1024, **FAMILY_VARIANTS["gemma3"])
    asked = ["--plan", "--device", "cpu", "--backend", "reference", "--dtype", "fp32"]
    asked += ["--kv-cache-memory", "1M"]
    result = CliRunner().invoke(main, ["serve", str(folder), *asked])
    assert result.exit_code == 0, result.output
    # Blocks of 2 layers: 64 of them and 3 for the window, instead of 64 of 4 layers.
    for text in (
        "1,956 tokens in 128 blocks of 16 (1.9 sequences of 1,024)",
        "block tables: layers: 2 see 24 tokens, 2 see everything; 2 tables of 2 layers each",
        "a token takes 512 B behind the windows, a sequence 24.6 kB within them",
    ):
        assert text in result.stdout, text
    asked += ["--kv-eviction", "heavy-hitter", "--kv-budget", "160"]
    result = CliRunner().invoke(main, ["serve", str(folder), *asked])
    assert "one for all layers, those with a window included: eviction drops" in result.stdout


def test_the_server_tells_it_without_the_models_place_on_disk(tiny_model_folder: Path) -> None:
    with real_server(tiny_model_folder) as server:
        server.post("/v1/completions", prompt="The", max_tokens=2, ignore_eos=True)
        answer = server.http.get("/server_info").json()
    assert answer["plan"]["parts"][0]["part"] == "q_proj, k_proj, v_proj"
    assert answer["plan"]["served_name"] == "tiny" and "model" not in answer["plan"]
    assert answer["stats"]["generated_tokens"] == 2
    assert str(tiny_model_folder) not in str(answer)


def test_what_becomes_of_4_bit_weights_is_no_concern_of_a_strict_plain_model(
    tiny_model_folder: Path,
) -> None:
    options = ModelOptions(dtype="fp32", strict=True)
    assert load_model(tiny_model_folder, options).notes == ()
