"""lm-evaluation-harness with our engine as its model: windows, settings, errors, a whole run."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from qtool import LLM
from qtool.cli import main
from qtool.commands import harness
from qtool.commands.harness_model import HarnessModel, rolling_windows, sampling_params
from qtool.errors import RequestError, UsageError
from qtool.runtime.tokenizer import Tokenizer
from support.harness import write_tasks


def _requests(*arguments: tuple[Any, ...]) -> list[SimpleNamespace]:
    return [SimpleNamespace(args=each) for each in arguments]


@pytest.fixture(scope="module")
def adapter(tiny_model_folder: Path) -> Iterator[HarnessModel]:
    options = {"device": "cpu", "dtype": "fp32", "backend": "reference", "max_num_seqs": 4}
    with LLM(str(tiny_model_folder), **options) as llm:  # type: ignore[arg-type]
        yield HarnessModel(llm, Tokenizer.load(tiny_model_folder))


@pytest.mark.parametrize("max_tokens", [2, 3, 7, 100])
def test_windows_score_every_token_once_with_context_before_it(max_tokens: int) -> None:
    for count in range(20):
        ids = list(range(1, count + 1))
        windows = rolling_windows(ids, 0, max_tokens)
        assert [t for w in windows for t in w.token_ids[w.start :]] == ids
        assert all(1 <= w.start < len(w.token_ids) <= max_tokens for w in windows)
        # All but the first hold as much context as fits.
        assert all(len(w.token_ids) == max_tokens for w in windows[1:])


def test_the_windows_drawn_in_the_documentation() -> None:
    windows = rolling_windows([1, 2, 3, 4, 5], 0, 3)
    assert [(w.token_ids, w.start) for w in windows] == [
        ((0, 1, 2), 1),
        ((2, 3, 4), 1),
        ((3, 4, 5), 2),
    ]


@pytest.mark.parametrize(
    ("settings", "temperature", "max_tokens"),
    [
        ({}, 0, 256),
        ({"until": ["a", "b"], "max_gen_toks": 7}, 0, 7),
        ({"until": "a", "max_new_tokens": 3, "do_sample": False, "temperature": 0.7}, 0, 3),
        ({"temperature": 0.7, "max_tokens": 3}, 0.7, 3),
        ({"do_sample": True}, 1, 256),
        ({"do_sample": True, "temperature": 0.2, "top_p": 0.9}, 0.2, 256),
    ],
)
def test_a_tasks_settings_become_sampling_parameters(
    settings: dict[str, Any], temperature: float, max_tokens: int
) -> None:
    params = sampling_params(settings)
    assert (params.temperature, params.max_tokens) == (temperature, max_tokens)
    until = settings.get("until", ())
    assert params.stop_strings == ((until,) if isinstance(until, str) else tuple(until))


def test_settings_the_engine_does_not_have_are_refused_by_name() -> None:
    with pytest.raises(UsageError, match="num_beams=4, which this engine does not have"):
        sampling_params({"num_beams": 4})
    with pytest.raises(RequestError, match="top_p=2"):
        sampling_params({"top_p": 2})


def test_a_text_too_long_loses_its_beginning_and_is_counted(adapter: HarnessModel) -> None:
    chance = random.Random(0)
    words = [chance.choice(["quick", "lazy", "brown", "dog"]) for _ in range(400)]
    before = adapter.shortened
    long, again = adapter.loglikelihood(
        _requests((" ".join(words), " fox"), ("x " + " ".join(words), " fox"))
    )
    assert adapter.shortened == before + 2
    assert long == again, "what differs lies before the window"
    (text,) = adapter.generate_until(_requests((" ".join(words), {"max_gen_toks": 5})))
    assert text and adapter.shortened == before + 3
    with pytest.raises(UsageError, match="generates 256 tokens, the model's context holds 256"):
        adapter.generate_until(_requests(("a", {})))


def test_a_rolling_text_adds_up_over_its_windows(adapter: HarnessModel) -> None:
    assert adapter.loglikelihood_rolling(_requests(("",))) == [0.0]
    whole, other = adapter.loglikelihood_rolling(_requests(("The fox " * 150,), ("dog",)))
    assert whole < other < 0
    (single,) = adapter.loglikelihood(_requests(("", "dog")))
    assert other == single[0], "an empty context is the same token"


def test_no_requests_are_no_work(adapter: HarnessModel) -> None:
    assert adapter.loglikelihood([]) == adapter.generate_until([]) == []
    assert adapter.loglikelihood_rolling([]) == []


def test_without_the_package_the_error_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, tiny_model_folder: Path
) -> None:
    monkeypatch.setattr(harness, "find_spec", lambda name: None)
    result = CliRunner().invoke(main, ["eval", str(tiny_model_folder), "--harness", "arc_easy"])
    assert result.exit_code == 2
    assert "pip install 'qtool[lm-eval]'" in result.stderr


@pytest.mark.filterwarnings("default")
class TestTheWholeCommand:
    """The harness's own code runs here, and its warnings are not ours to mend."""

    @pytest.fixture
    def folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        tasks = pytest.importorskip("lm_eval.tasks")

        def only_ours(options: harness.HarnessOptions) -> Any:
            return tasks.TaskManager(include_path=options.include_path, include_defaults=False)

        # The index of the harness's own tasks takes seconds to build.
        monkeypatch.setattr(harness, "_task_manager", only_ours)
        write_tasks(tmp_path)
        return tmp_path

    def _invoke(self, folder: Path, model: Path, *arguments: str) -> Any:
        command = ["eval", str(model), "--include-path", str(folder), "--device", "cpu"]
        return CliRunner().invoke(main, [*command, *arguments])

    @pytest.mark.slow
    def test_both_models_are_shown_and_the_same_model_twice_is_equal(
        self, folder: Path, tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.undo()
        names = "mini_choice,mini_cloze,mini_roll,mini_gen"
        reference = ["--reference", str(tiny_model_folder), "--json", "--quiet"]
        result = self._invoke(folder, tiny_model_folder, "--harness", names, *reference)
        assert result.exit_code == 0, result.output
        (line,) = result.stdout.splitlines()
        facts = json.loads(line)
        assert facts["event"] == "result" and set(facts["tasks"]) == set(names.split(","))
        assert facts["tasks"] == facts["reference_tasks"]
        assert facts["tasks"]["mini_choice"]["acc_stderr,none"] > 0

    def test_a_table_goes_to_standard_output_and_the_limit_holds(
        self, folder: Path, tiny_model_folder: Path
    ) -> None:
        result = self._invoke(folder, tiny_model_folder, "--harness", "mini_cloze", "--limit", "2")
        assert result.exit_code == 0, result.output
        assert "perplexity" in result.stdout and "mini_cloze" in result.stdout
        assert "bootstrapping" not in result.stdout

    def test_an_unknown_task_is_named_before_the_model_is_loaded(
        self, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(harness, "open_llm", lambda *_: pytest.fail("loaded too early"))
        result = self._invoke(folder, tmp_path, "--harness", "mini_cloze,mini_clothes")
        assert (result.exit_code, result.stdout) == (2, "")
        assert "there is no task 'mini_clothes'" in result.stderr

    def test_a_task_whose_data_is_missing_is_named_before_the_model_is_loaded(
        self, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(harness, "open_llm", lambda *_: pytest.fail("loaded too early"))
        (folder / "data.jsonl").unlink()
        result = self._invoke(folder, tmp_path, "--harness", "mini_gen")
        assert (result.exit_code, result.stdout) == (1, "")
        assert "--harness mini_gen: cannot be loaded" in result.stderr

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (
                ["--harness", "a", "--tasks", "builtin-cloze"],
                "--tasks has no meaning with --harness",
            ),
            (["--harness", " , "], "no tasks: name at least one"),
            (["--harness", "a", "--windows", "3"], "--windows has no meaning with"),
        ],
    )
    def test_options_that_contradict_are_refused(
        self, folder: Path, arguments: list[str], message: str
    ) -> None:
        result = self._invoke(folder, folder, *arguments)
        assert result.exit_code == 2 and message in result.stderr

    def test_an_include_path_must_be_a_folder(self, tiny_model_folder: Path) -> None:
        command = ["eval", str(tiny_model_folder), "--harness", "a", "--include-path", "none"]
        result = CliRunner().invoke(main, command)
        assert result.exit_code == 2 and "none: is no folder" in result.stderr
