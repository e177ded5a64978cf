"""Tests run the checkout's code, offline, on few threads; kernels for GPUs are interpreted.

The order of this file matters: what reads an environment variable comes after its setting.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]

# Read once, when huggingface_hub, datasets and tokenizers are imported.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# Read when ``@triton.jit`` runs. Importing triton runs it on triton's own functions, and
# transformers imports triton, so this stands before both. With a GPU too: tensors of tests lie in
# the CPU's memory, and benchmarks/gpu_check.py is what checks kernels on a GPU.
os.environ.setdefault("TRITON_INTERPRET", "1")

# A shell starts background jobs with SIGINT ignored, which the processes that tests interrupt would
# inherit; a handler they do not.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Tiny models: a second thread only waits, and on a busy machine it waits for long.
torch.set_num_threads(1)

# The same examples on every run, no time limit that a busy machine would break, nothing on disk.
hypothesis.settings.register_profile("qtool", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("qtool")


def _register_checkout() -> None:
    """Make ``import qtool`` mean this folder, whether or not a copy is installed."""
    spec = importlib.util.spec_from_file_location(
        "qtool", ROOT / "__init__.py", submodule_search_locations=[str(ROOT)]
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["qtool"] = module
    spec.loader.exec_module(module)


_register_checkout()

from support.models import make_model  # noqa: E402

ModelFactory = Callable[..., Path]


@pytest.fixture(scope="session")
def model_factory(tmp_path_factory: pytest.TempPathFactory) -> ModelFactory:
    """``model_factory(folder=None, **settings)``: a new model folder on every call.

    The settings are those of :func:`support.models.make_model`.
    """

    def build(folder: Path | None = None, **settings: object) -> Path:
        return make_model(folder or tmp_path_factory.mktemp("model"), **settings)

    return build


@pytest.fixture(scope="session")
def tiny_model_folder(model_factory: ModelFactory) -> Path:
    """A Llama with grouped queries, tied embeddings, 2 layers, hidden size 64, float32.

    Shared by the whole session: read it, never write into it.
    """
    return model_factory()


@pytest.fixture(scope="session")
def checkout_env() -> dict[str, str]:
    """Environment for a subprocess in which ``import qtool`` is this checkout."""
    return {**os.environ, "PYTHONPATH": str(ROOT / ".typecheck")}


@pytest.fixture(scope="session", autouse=True)
def checked_engines() -> Iterator[None]:
    """Every engine of every test has its books checked before and after each step."""
    from qtool.runtime.engine import Engine

    step = Engine.step

    def checked(engine: Engine) -> list[object]:
        engine.check_integrity()
        deltas = step(engine)
        engine.check_integrity()
        return deltas  # type: ignore[return-value]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "step", checked)
        yield


@pytest.fixture
def expecting_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that keep no room for output, so that their requests preempt one another."""
    from qtool.runtime.admission import Admission
    from qtool.runtime.sequence import Sequence

    def expected_end(_: Admission, sequence: Sequence) -> int:
        return sequence.num_tokens + 1

    monkeypatch.setattr(Admission, "_expected_end", expected_end)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests marked ``gpu`` where there is none."""
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
