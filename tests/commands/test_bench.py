"""The benchmark's loads, its definitions, and its runs on a tiny model."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from qtool.cli import main
from qtool.commands.bench_load import RandomLoad, read_sharegpt, sharegpt_work
from qtool.commands.bench_metrics import Spread, Timing, summarize
from qtool.errors import UsageError
from qtool.runtime.tokenizer import Tokenizer

# Against a tiny model on exact kernels: what is measured is not the point.
TINY = ["--device", "cpu", "--dtype", "fp32", "--backend", "reference", "--kv-cache-memory", "4M"]


class TestDefinitions:
    def test_times_of_a_request(self) -> None:
        timing = Timing(prompt_len=7, arrived=10.0, tokens=(10.5, 10.7, 11.1))
        assert (timing.ttft, timing.latency) == (0.5, pytest.approx(1.1))
        assert timing.tpot == pytest.approx((1.1 - 0.5) / 2)

    def test_a_run_is_from_the_first_arrival_to_the_last_token(self) -> None:
        timings = [Timing(10, 1.0, (2.0, 4.0)), Timing(20, 1.0, (3.0,)), Timing(30, 2.0, (6.0,))]
        summary = summarize("run", timings)
        assert (summary.seconds, summary.requests, summary.output_tokens) == (5.0, 3, 4)
        assert (summary.requests_per_second, summary.output_per_second) == (0.6, 0.8)
        assert summary.tokens_per_second == (60 + 4) / 5
        assert summary.ttft.mean == pytest.approx((1 + 2 + 4) / 3)
        assert summary.tpot == Spread(2.0, 2.0, 2.0), "one token has no time per further token"
        assert summary.latency.median == 3.0

    def test_percentiles_are_linear_between_ranks(self) -> None:
        spread = Spread.of([float(value) for value in range(101)])
        assert (spread.mean, spread.median, spread.p99) == (50, 50, 99)
        assert Spread.of([1.0, 2.0]).p99 == pytest.approx(1.99)
        assert math.isnan(Spread.of([]).p99)


class TestRandomLoad:
    def test_lengths_lie_within_their_share_of_the_mean(self) -> None:
        load = RandomLoad(input_len=20, output_len=10, range_ratio=0.5)
        work = load.make(300, vocab_size=50, seed=1)
        inputs = [len(each.token_ids) for each in work]
        outputs = [each.output_len for each in work]
        assert (min(inputs), max(inputs)) == (10, 30) and (min(outputs), max(outputs)) == (5, 15)
        assert all(0 <= token < 50 for each in work for token in each.token_ids)

    def test_a_seed_repeats_and_prefixes_are_shared(self) -> None:
        load = RandomLoad(input_len=4, output_len=4, range_ratio=0, shared_prefix=16)
        first, again, other = (load.make(5, 50, seed) for seed in (1, 1, 2))
        assert first == again != other
        assert {len(each.token_ids) for each in first} == {20}
        assert len({each.token_ids[:16] for each in first}) == 1
        assert len({each.token_ids for each in first}) == 5

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"input_len": 0}, "input_len=0: must be 1"),
            ({"range_ratio": 1.0}, "range_ratio=1.0: must be"),
            ({"shared_prefix": -1}, "shared_prefix=-1: must be"),
        ],
    )
    def test_settings_out_of_range_are_refused(
        self, settings: dict[str, Any], message: str
    ) -> None:
        with pytest.raises(UsageError, match=message):
            RandomLoad(**settings)


def _conversation(*texts: str) -> dict[str, Any]:
    return {"id": "x", "conversations": [{"from": "someone", "value": text} for text in texts]}


class TestShareGpt:
    @pytest.fixture
    def tokenizer(self, tiny_model_folder: Path) -> Tokenizer:
        return Tokenizer.load(tiny_model_folder)

    def _write(self, folder: Path, content: object) -> Path:
        path = folder / "sharegpt.json"
        path.write_text(json.dumps(content), encoding="utf-8")
        return path

    def test_the_first_two_turns_count_and_odd_ones_are_left_out(
        self, tmp_path: Path, tokenizer: Tokenizer
    ) -> None:
        question, answer = "The quick brown fox jumps over it", "The lazy dog did not mind at all"
        unusable = [
            _conversation(question),
            _conversation("", answer),
            _conversation(question, "a"),
            _conversation("z" * 5000, answer),
            _conversation(question, "z" * 5000),
            {"conversations": [{"value": question}, {"value": None}]},
            {"conversations": None},
            "text",
        ]
        good = [_conversation(question + str(i), answer, "more") for i in range(5)]
        path = self._write(tmp_path, [*unusable, *good])
        conversations = read_sharegpt(path)
        work = sharegpt_work(conversations, tokenizer, count=100, seed=0)
        assert sorted(each.token_ids for each in work) == sorted(
            tuple(tokenizer.encode(question + str(i))) for i in range(5)
        )
        expected = len(tokenizer.encode(answer, add_special_tokens=False))
        assert {each.output_len for each in work} == {expected}
        assert sharegpt_work(conversations, tokenizer, 2, seed=0) == work[:2]
        assert sharegpt_work(conversations, tokenizer, 5, seed=1) != work
        with pytest.raises(UsageError, match="none of 2 conversations has"):
            sharegpt_work([("a", answer), (question, "z" * 5000)], tokenizer, 5, seed=0)

    @pytest.mark.parametrize(
        ("content", "message"),
        [([], "no conversation of two turns"), ({}, "must be a JSON list")],
    )
    def test_a_file_of_another_form_is_refused(
        self, tmp_path: Path, content: object, message: str
    ) -> None:
        with pytest.raises(UsageError, match=message):
            read_sharegpt(self._write(tmp_path, content))

    def test_a_file_that_is_no_json_is_refused_before_a_model_is_loaded(
        self, tmp_path: Path
    ) -> None:
        path = tmp_path / "x.json"
        for content in (None, "{"):
            if content is not None:
                path.write_text(content)
            found = _bench("throughput", tmp_path / "no-model", "--dataset", str(path))
            assert found.exit_code != 0 and "cannot be read as JSON" in found.output


def _bench(kind: str, folder: Path, *options: str) -> Result:
    return CliRunner().invoke(main, ["bench", kind, str(folder), *TINY, *options])


def _runs(result: Result) -> list[dict[str, Any]]:
    assert result.exit_code == 0, (result.output, result.exception)
    (last,) = (json.loads(line) for line in result.stdout.splitlines()[-1:])
    assert last["event"] == "result"
    runs: list[dict[str, Any]] = last["runs"]
    return runs


class TestRuns:
    def test_static_batches_run_after_continuous_batching_and_make_as_many_tokens(
        self, tiny_model_folder: Path
    ) -> None:
        asked = ["--num-prompts", "6", "--input-len", "8", "--output-len", "6", "--static"]
        runs = _runs(_bench("throughput", tiny_model_folder, *asked, "--max-num-seqs=2", "--json"))
        assert [run["name"] for run in runs] == ["continuous batching", "static batching"]
        assert runs[0]["output_tokens"] == runs[1]["output_tokens"] > 6
        for run in runs:
            assert 0 < run["ttft"]["mean"] <= run["latency"]["mean"] <= run["latency"]["p99"]
            assert run["output_per_second"] == pytest.approx(run["output_tokens"] / run["seconds"])

    def test_a_shared_prefix_is_computed_once_with_the_cache_and_by_all_without(
        self, tiny_model_folder: Path
    ) -> None:
        asked = ["--num-prompts", "4", "--input-len", "4", "--output-len", "3"]
        result = _bench("throughput", tiny_model_folder, *asked, "--shared-prefix=64", "--json")
        cached, plain = _runs(result)
        assert (cached["name"], cached["reused_tokens"]) == ("prefix cache on", 3 * 64)
        assert (plain["name"], plain["reused_tokens"]) == ("prefix cache off", 0)

    def test_the_table_names_measures_and_compares(self, tiny_model_folder: Path) -> None:
        asked = ["--num-prompts", "2", "--input-len", "4", "--output-len", "3", "--static"]
        result = _bench("throughput", tiny_model_folder, *asked)
        assert result.exit_code == 0, result.output
        for text in ("TTFT mean, ms", "TPOT P99, ms", "latency median, ms", "output tokens/s"):
            assert text in result.stdout
        assert "times the output tokens per second of static batching" in result.stdout

    def test_latency_is_of_every_iteration_but_the_first_ones(
        self, tiny_model_folder: Path
    ) -> None:
        asked = ["--batch-size", "2", "--output-len", "4", "--warmup-iters", "1", "--iters", "2"]
        runs = _runs(_bench("latency", tiny_model_folder, *asked, "--json"))
        assert [(run["requests"], run["output_tokens"]) for run in runs] == [(2, 8)] * 2
        assert all(run["reused_tokens"] == 0 for run in runs)
        result = _bench("latency", tiny_model_folder, *asked)
        assert "latency of a batch, ms" in result.stdout and "TPOT, ms" in result.stdout

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (["--num-prompts", "0"], "num_prompts=0"),
            (["--output-len", "300"], "the longest request has"),
            (["--dataset", "x.json", "--shared-prefix", "4"], "leave them out with a dataset"),
            (["--dataset", "nowhere.json"], "cannot be read"),
        ],
    )
    def test_what_cannot_be_measured_is_refused(
        self, tiny_model_folder: Path, options: list[str], message: str
    ) -> None:
        result = _bench("throughput", tiny_model_folder, *options)
        assert result.exit_code != 0 and message in result.output
