"""``lm_eval --model local-completions`` against our server scores what our own adapter scores."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from qtool import LLM
from qtool.commands.harness import harness_model
from support.harness import UNTIL, write_tasks
from support.real_server import RealServer, real_server

# The harness's own code runs here, and its warnings are not ours to mend.
pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture(scope="module")
def server(tiny_model_folder: Path) -> Iterator[RealServer]:
    pytest.importorskip("lm_eval")
    pytest.importorskip("tenacity")
    with real_server(tiny_model_folder) as running:
        yield running


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, list[str]]:
    from lm_eval.tasks import TaskManager

    # Its standard errors of perplexities would fork a process full of threads.
    monkeypatch.setenv("DISABLE_MULTIPROC", "1")
    names = write_tasks(tmp_path)
    return TaskManager(include_path=str(tmp_path), include_defaults=False), names


def _evaluate(model: Any, tasks: tuple[Any, list[str]], **settings: Any) -> dict[str, Any]:
    from lm_eval import simple_evaluate

    manager, names = tasks
    results = simple_evaluate(
        model=model, tasks=names, task_manager=manager, bootstrap_iters=1000, **settings
    )
    assert results is not None
    return {
        "metrics": results["results"],
        "answers": {
            name: [sample["filtered_resps"] for sample in samples]
            for name, samples in results["samples"].items()
        },
    }


def _client_settings(server: RealServer, folder: Path, **settings: Any) -> dict[str, Any]:
    return {
        "model": "tiny",
        "base_url": f"{server.url}/v1/completions",
        "tokenizer": str(folder),
        "tokenizer_backend": "huggingface",
        "max_length": 256,
        "max_retries": 1,
        **settings,
    }


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="token ids, one by one", marks=pytest.mark.slow),
        pytest.param({"batch_size": 3}, id="batches of token ids"),
        pytest.param({"num_concurrent": 4}, id="at once", marks=pytest.mark.slow),
        pytest.param({"tokenized_requests": False}, id="texts"),
    ],
)
def test_scores_and_texts_equal_those_of_the_adapter(
    settings: dict[str, Any],
    server: RealServer,
    tiny_model_folder: Path,
    tasks: tuple[Any, list[str]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.ERROR)
    manager, names = tasks
    if settings.get("tokenized_requests") is False:
        # Windows of a long text would be decoded and tokenized anew.
        names = [name for name in names if name != "mini_roll"]
    batch_size = settings.pop("batch_size", 1)
    client_settings = _client_settings(server, tiny_model_folder, **settings)
    remote = _evaluate(
        "local-completions", (manager, names), model_args=client_settings, batch_size=batch_size
    )
    options = {"device": "cpu", "dtype": "fp32", "backend": "reference"}
    with LLM(str(tiny_model_folder), **options) as llm:  # type: ignore[arg-type]
        local = _evaluate(harness_model(llm, server.tokenizer), (manager, names))
    assert set(remote["answers"]) == set(names)
    for name in names:
        expected_answers = _flat(local["answers"][name])
        assert len(expected_answers) >= 5 and all(answer != "" for answer in expected_answers)
        assert _flat(remote["answers"][name]) == pytest.approx(expected_answers), name
        for metric, value in local["metrics"][name].items():
            expected = pytest.approx(value, nan_ok=True) if isinstance(value, float) else value
            assert remote["metrics"][name][metric] == expected, (name, metric)


def _flat(answers: Any) -> Any:
    """Numbers of nested answers as one list; texts as they are."""
    if isinstance(answers, list | tuple):
        flat = [_flat(item) for item in answers]
        return [x for item in flat for x in (item if isinstance(item, list) else [item])]
    return answers


def test_the_tasks_stop_strings_reach_the_engine(server: RealServer) -> None:
    assert len(UNTIL) > 10
    answer = server.post("/v1/completions", prompt="The", stop=UNTIL, temperature=0)
    assert answer.status_code == 200
