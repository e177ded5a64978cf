"""The arithmetic and the plumbing of ``benchmarks/peers.py``; no peer is needed."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path

import numpy as np
import pytest

from comparison import worker
from comparison.client import peer_python
from comparison.contest import Entry, Outcome
from comparison.gguf_file import rotary_order, tensor_kind
from comparison.quality import Sums, log_softmax, score
from comparison.results import COLUMNS, Machine, append_csv, cpu_name, to_json
from comparison.roofline import Ceilings, ModelShape, fastest_int8, roof
from comparison.scenarios import (
    SCENARIOS,
    Rates,
    Scenario,
    median_rates,
    prompts,
    rates,
    ratios,
    rotated,
)
from qtool.errors import UsageError

ABOUT = worker.About("1.0", "W4", weight_bytes=10**9, kv_bytes_per_token=10**6)


def test_decoding_is_timed_only_while_every_sequence_decodes() -> None:
    scenario = Scenario("two", 2, 4, 3)
    # The second starts late, so the first one's early tokens count for nothing.
    found = rates(scenario, [[1.0, 2.0, 3.0], [1.5, 2.5, 3.5]])
    assert found.phase == pytest.approx(3 / 1.5)  # at 2.0, 2.5 and 3.0
    assert found.overall == pytest.approx(6 / 3.5)


def test_a_prefill_is_timed_to_its_first_token() -> None:
    found = rates(Scenario("prompt", 1, 512, 1), [[0.25]])
    assert found.phase == pytest.approx(2048)
    assert found.overall == pytest.approx(4)


@pytest.mark.parametrize("times", [[[1.0, 2.0]], [[1.0, 2.0], [1.0]], [[1.0], [1.0]]])
def test_an_engine_that_stopped_early_is_not_timed(times: list[list[float]]) -> None:
    with pytest.raises(ValueError, match="came back instead of 2 of 2"):
        rates(Scenario("two", 2, 4, 2), times)


def test_sequences_one_after_another_have_no_decode_phase() -> None:
    with pytest.raises(ValueError, match="never decoded together"):
        rates(Scenario("two", 2, 4, 2), [[1.0, 2.0], [3.0, 4.0]])


def test_one_outlier_does_not_move_the_median() -> None:
    assert median_rates([Rates(1, 10), Rates(100, 12), Rates(2, 11)]) == Rates(2, 11)


def test_we_are_compared_with_the_best_peer_of_each_figure() -> None:
    row = {"qtool": Rates(300, 100), "llama.cpp": Rates(100, 80), "openvino": Rates(150, 50)}
    assert ratios({"decode_b1": row}) == {"decode_b1": 2.0, "decode_b1_overall": 1.25}


def test_without_a_peer_there_is_no_ratio() -> None:
    assert ratios({"decode_b1": {"qtool": Rates(1, 1)}}) == {}


def test_the_first_place_goes_round() -> None:
    assert [rotated("abc", turn)[0] for turn in range(4)] == ["a", "b", "c", "a"]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
@pytest.mark.parametrize("turn", [0, 5])
def test_no_two_prompts_of_a_run_are_equal(scenario: Scenario, turn: int) -> None:
    found = prompts(scenario, range(32 * 128), turn)
    assert {len(ids) for ids in found} == {scenario.prompt_tokens}
    assert len(set(map(tuple, found))) == scenario.sequences


def test_too_little_text_is_refused() -> None:
    with pytest.raises(ValueError, match="needs 512 tokens"):
        prompts(Scenario("prompt", 1, 512, 1), range(511), 0)


SHAPE = ModelShape(layers=2, hidden=8, intermediate=16, heads=4, kv_heads=2, head_dim=2, vocab=100)


def test_a_model_has_the_operations_of_its_matrices() -> None:
    # Q and O 8 x 8, K and V 8 x 4, gate, up and down 8 x 16, in two layers.
    assert SHAPE.body_weights == 2 * (2 * 64 + 2 * 32 + 3 * 128)
    # Scores and weighted sums: 2 x 8 multiply-adds a token of context and layer.
    assert SHAPE.row_ops(10) - SHAPE.row_ops(0) == 2 * 2 * 8 * 2 * 10


def test_one_sequence_is_bound_by_memory_and_a_prompt_by_arithmetic() -> None:
    ceilings = Ceilings(read_gbs=10, int8_gops=0.001, units={})
    few = Ceilings(read_gbs=10, int8_gops=1e9, units={})
    decode = Scenario("decode", 2, 100, 100)
    read = 1e9 + 2 * 150 * 1e6
    assert roof(decode, SHAPE, ABOUT, few) == pytest.approx(2 / (read / 10e9))
    prefill = Scenario("prefill", 1, 64, 1)
    ops = 64 * SHAPE.row_ops(32) + SHAPE.head_ops
    assert roof(prefill, SHAPE, ABOUT, ceilings) == pytest.approx(64 / (ops / 1e6))


def test_the_fastest_8_bit_unit_counts_else_float() -> None:
    assert fastest_int8({"fp32_gflops": 100, "vnni_gops": 400, "amx_gops": 900}) == 900
    assert fastest_int8({"fp32_gflops": 100}) == 100


def test_a_model_that_agrees_has_no_divergence() -> None:
    logits = np.random.default_rng(0).normal(size=(4, 50)).astype(np.float32)
    window = [3, 1, 4, 1]
    found = score(logits, log_softmax(logits[:3]), window).means()
    expected = -np.mean([log_softmax(logits)[i, t] for i, t in enumerate(window[1:])])
    assert found["kl"] == pytest.approx(0, abs=1e-6)
    assert found["top1"] == 1
    assert math.log(found["perplexity"]) == pytest.approx(expected, rel=1e-5)


def test_divergence_is_the_reference_s_expectation() -> None:
    p, q = np.array([[0.75, 0.25]]), np.array([[0.5, 0.5]])
    found = score(np.log(np.vstack([q, q])), np.log(p), [0, 1])
    assert found.kl == pytest.approx(0.75 * math.log(1.5) + 0.25 * math.log(0.5))
    assert (found + Sums(1, 2.0, 3.0, 1)).tokens == 2


class _Parrot:
    """Answers every prompt with tokens a second apart."""

    about = ABOUT

    def run(self, prompts: list[list[int]], new_tokens: int) -> list[list[float]]:
        return [[float(i) for i in range(new_tokens)] for _ in prompts]

    def logits(self, window: list[int]) -> np.ndarray:
        return np.eye(5, dtype=np.float32)[window] * 9


def _serve(*requests: dict[str, object]) -> list[dict[str, object]]:
    replies = io.StringIO()
    worker.serve(_Parrot(), [json.dumps(request) for request in requests], replies)
    return [json.loads(line) for line in replies.getvalue().splitlines()]


def test_a_worker_answers_each_line_with_a_line_and_outlives_errors() -> None:
    found = _serve({"do": "dance"}, {"do": "run", "prompts": [[1], [2]], "new_tokens": 2})
    assert found == [
        {"error": "ValueError: do='dance': use run or quality"},
        {"times": [[0.0, 1.0], [0.0, 1.0]]},
    ]


def test_a_worker_scores_windows_against_the_reference_on_disk(tmp_path: Path) -> None:
    window = [1, 2, 3]
    reference = log_softmax(_Parrot().logits(window)[:2])
    np.save(worker.reference_file(tmp_path, 0), reference)
    (found,) = _serve({"do": "quality", "windows": [window], "reference": str(tmp_path)})
    assert found["kl"] == pytest.approx(0, abs=1e-6)


def test_a_missing_peer_names_the_target_that_installs_it(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="make peers"):
        peer_python("llama.cpp", tmp_path)


def test_rows_of_a_head_are_interleaved_for_llama_cpp() -> None:
    rows = np.arange(8.0).reshape(8, 1)
    assert rotary_order(rows, heads=2)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_only_matrices_are_quantized_and_the_head_in_8_bits() -> None:
    kinds = [
        tensor_kind(*tensor).name
        for tensor in (("blk.0.attn_norm.weight", 1), ("blk.0.ffn_up.weight", 2))
    ]
    assert kinds == ["F32", "Q4_0"]
    assert tensor_kind("token_embd.weight", 2).name == "Q8_0"


CPUINFO = "model name\t: A CPU @ 2.0\ncpu family\t: 6\nmodel\t\t: 7\nstepping\t: 1\n\nmodel name: B"
MACHINE = Machine(cpu_name(CPUINFO), 2, "2026-01-02 03:04", {"vnni_gops": 900.0})


def _outcome() -> Outcome:
    entries = {
        "qtool": Entry(Rates(200.0, 100.0), 190.0, 210.0, 400.0),
        "llama.cpp": Entry(Rates(100.0, 80.0), 90.0, 110.0, 300.0),
    }
    quality = {"qtool": {"perplexity": 20.0, "kl": 0.05, "top1": 0.9}}
    engines = dict.fromkeys(entries, ABOUT)
    return Outcome("tiny", engines, {"decode_b1": entries}, {"decode_b1": 50.0}, quality)


def test_a_machine_is_known_by_name_and_numbers() -> None:
    assert MACHINE.cpu == "A CPU @ 2.0 6.7.1"
    assert MACHINE.file_name == "a-cpu-2-0-6-7-1.csv"


def test_results_append_below_one_header(tmp_path: Path) -> None:
    for _ in range(2):
        path = append_csv(tmp_path, MACHINE, [_outcome()])
    lines = path.read_text().splitlines()
    assert lines[0] == ",".join(COLUMNS)
    assert len(lines) == 1 + 2 * 2
    assert ",0.500," in lines[1]  # of the roof


def test_the_json_has_the_ratios_on_top() -> None:
    found = json.loads(json.dumps(to_json(MACHINE, [_outcome()])))
    assert found["ratios"] == {"decode_b1": 2.0, "decode_b1_overall": 1.25}
    assert found["models"]["tiny"]["entries"]["decode_b1"]["qtool"]["rates"]["phase"] == 200.0
