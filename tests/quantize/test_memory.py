"""What a run holds does not grow with the blocks that are done, and a solve holds few matrices."""

from __future__ import annotations

import gc
import platform
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from qtool.quantize import block as block_steps
from qtool.quantize import gptq
from qtool.quantize.options import QuantizeOptions
from qtool.quantize.phases import resident_memory, return_free_memory
from qtool.quantize.pipeline import Progress, quantize_model
from qtool.quantize.workspace import Workspace

LAYERS = 4
MAPS = Path("/proc/self/maps")


@pytest.fixture
def only_new_objects() -> Iterator[None]:
    """The collector sees nothing that is older, and collects nothing: cycles stay."""
    gc.collect()
    gc.freeze()
    gc.disable()
    yield
    gc.enable()
    gc.unfreeze()


def _bytes_of(tensors: Iterable[object]) -> int:
    """Memory behind tensors, each storage once; those on meta have none."""
    real = [t for t in tensors if isinstance(t, Tensor) and not t.is_meta]
    storages = [tensor.untyped_storage() for tensor in real]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _quantize(source: Path, tmp_path: Path, method: str, told: Callable[[Progress], None]) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 60, encoding="utf-8")
    options = QuantizeOptions(
        method=method,
        kv_cache="fp8" if method == "none" else None,
        calibration=(str(text),),
        samples=3,
        seq_len=16,
        device="cpu",
    )
    quantize_model(source, tmp_path / "q", options, told)


@pytest.mark.parametrize("method", ["rtn", "gptq", "awq", "awq+gptq", "none"])
def test_nothing_of_a_block_is_held_when_it_is_done(
    method: str, model_factory: Callable[..., Path], tmp_path: Path, only_new_objects: None
) -> None:
    held: list[int] = []

    def told(step: Progress) -> None:
        if step.phase == "quantize":
            held.append(_bytes_of(gc.get_objects()))

    _quantize(model_factory(layers=LAYERS), tmp_path, method, told)
    assert len(held) == LAYERS
    # The last state holds no samples: calibration ends there.
    assert held[1:-1] == held[:1] * (LAYERS - 2)
    assert held[-1] <= held[0]


def test_a_solve_begins_with_the_same_memory_in_every_block(
    model_factory: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    only_new_objects: None,
) -> None:
    held: list[int] = []
    factorize = gptq.factorize

    def watched(hessian: Tensor) -> gptq.Factor | None:
        held.append(_bytes_of(gc.get_objects()))
        return factorize(hessian)

    monkeypatch.setattr(block_steps, "factorize", watched)
    _quantize(model_factory(layers=LAYERS), tmp_path, "gptq", lambda _: None)
    by_block = torch.tensor(held).view(LAYERS, -1)
    assert (by_block == by_block[0]).all(), by_block


def test_the_original_is_gone_before_a_blocks_last_solve(
    model_factory: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    only_new_objects: None,
) -> None:
    gone: list[bool] = []
    observe = Workspace.observe_beside_original

    def watched(work: Workspace, groups: list[tuple[str, ...]]) -> None:
        assert work.block.original is not None
        original = weakref.ref(work.block.original)
        observe(work, groups)
        gone.append(original() is None)

    monkeypatch.setattr(Workspace, "observe_beside_original", watched)
    _quantize(model_factory(layers=LAYERS), tmp_path, "gptq", lambda _: None)
    # Queries, keys and values; the attention's output; gate and up; down.
    assert gone == [False, False, False, True] * LAYERS


@pytest.mark.skipif(not MAPS.exists(), reason="Linux shows what is mapped")
def test_no_file_of_the_source_is_mapped_while_a_block_is_worked_on(
    model_factory: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = model_factory(layers=2)
    mapped: list[bool] = []
    observe = Workspace.observe_beside_original

    def watched(work: Workspace, groups: list[tuple[str, ...]]) -> None:
        mapped.append(str(source) in MAPS.read_text())
        observe(work, groups)

    monkeypatch.setattr(Workspace, "observe_beside_original", watched)
    _quantize(source, tmp_path, "gptq", lambda _: None)
    assert len(mapped) == 8 and not any(mapped)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be asked")
def test_memory_that_the_heap_keeps_goes_back_to_the_system() -> None:
    parts = [torch.ones(2**14) for _ in range(2**11)]  # 64 KiB each, 128 MiB in all
    whole = resident_memory()
    parts[:-1] = []  # the last one keeps the heap from shrinking by itself
    return_free_memory()
    assert resident_memory() < whole - 100 * 2**20


class _Held(TorchDispatchMode):
    """Notes the most bytes that results of operations hold at a time, beside what is given."""

    def __init__(self, given: Tensor) -> None:
        super().__init__()
        self.most = 0
        self._given = given
        self._results: list[weakref.ref[Tensor]] = []

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        new = [weakref.ref(leaf) for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self._results = [ref for ref in self._results if ref() is not None] + new
        held = _bytes_of([self._given, *(ref() for ref in self._results)])
        self.most = max(self.most, held - self._given.nbytes)
        return result


@pytest.mark.parametrize(
    ("step", "matrices"),
    [
        (gptq.factorize, 3),
        (lambda h: gptq.retarget([h[:2]], h, 1000, h), 2),
    ],
)
def test_a_solve_holds_few_matrices_of_the_inputs_size(
    step: Callable[[Tensor], object], matrices: int
) -> None:
    """Beside those it is given; of an MLP in a 7B model each has 485 MB."""
    columns = 256
    x = torch.randn(2 * columns, columns, generator=torch.Generator().manual_seed(0))
    hessian = x.T @ x / x.shape[0]
    with _Held(hessian) as held:
        step(hessian)
    assert held.most < (matrices + 0.5) * hessian.nbytes
