"""What a decoder layer launches on a GPU, attention and rotation aside, in its order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from qtool.quantize.options import QuantizeOptions
from qtool.quantize.pipeline import quantize_model
from qtool.runtime.kernels.backend import Stream
from qtool.runtime.kernels.reference import ReferenceBackend
from qtool.runtime.loaded_model import load_model
from qtool.runtime.model import Decoder
from qtool.runtime.options import ModelOptions
from qtool.runtime.scheduled_step import Chunk
from support.batches import batch_of, make_sequence, run_whole
from support.families import FAMILY_VARIANTS
from support.gemm import make_input, relative_error

pytest.importorskip("triton")
from triton.runtime.interpreter import InterpretedFunction

from qtool.runtime.kernels.triton.backend import TritonBackend

MEMORY = {"empty", "empty_strided", "new_empty"}


class Launches(TorchDispatchMode):
    """Names of kernels, and of torch's operations that compute something, as they come."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self._paused = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        name = func.overloadpacket.__name__
        if not self._paused and not func.is_view and name not in MEMORY:
            self.names.append(f"torch {name}")
        return func(*args, **kwargs or {})

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What runs here is not counted."""
        self._paused = True
        yield
        self._paused = False


class _QueriesOnly:
    """In the cache's place: attention that gives the queries back."""

    def __init__(self, launches: Launches) -> None:
        self._launches = launches

    def attend(self, layer: int, q: Tensor, *others: object) -> Tensor:
        with self._launches.paused():
            return q.clone()


def _layer_launches(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Of a layer that stands behind another one."""
    launches, run = Launches(), InterpretedFunction.run

    def recorded(self: Any, *args: Any, **kwargs: Any) -> None:
        launches.names.append(self.fn.__name__)
        with launches.paused():
            run(self, *args, **kwargs)

    monkeypatch.setattr(InterpretedFunction, "run", recorded)
    hidden, config = decoder.config.hidden_size, decoder.config
    layer = decoder.layers[-1]
    update = make_input(3, hidden, decoder.dtype)
    stream = Stream(make_input(3, hidden, torch.float32), update, layer.mlp_out_norm)
    batch = batch_of(Chunk(make_sequence([1, 2, 3], 0), 0, 3))
    cache: Any = _QueriesOnly(launches)
    rotary: Any = (None,) * len(decoder.rotary)
    with launches, torch.inference_mode():
        layer(stream, rotary, 1, batch, cache, config, decoder.backend)
    return launches.names


@pytest.fixture
def load(model_factory: Callable[..., Path], tmp_path: Path) -> Callable[..., Decoder]:
    """``load(family, options, backend)``: a quantized tiny model."""

    def build(family: str, backend: str = "triton", **options: Any) -> Decoder:
        folder = tmp_path / "q"
        if not folder.exists():
            source = model_factory(dtype=torch.float16, **FAMILY_VARIANTS.get(family, {}))
            chosen = QuantizeOptions(samples=2, seq_len=32, device="cpu", **options)
            quantize_model(source, folder, chosen)
        chosen = ModelOptions(device="cpu", backend=backend, dtype="fp16", self_check=False)
        return load_model(folder, chosen).decoder

    return build


NORM, ROUND, HEADS, GATED = (
    "rms_norm_kernel",
    "round_input_kernel",
    "norm_heads_kernel",
    "gated_kernel",
)
BYTES, WORDS = "byte_gemm_kernel", "weight_gemm_kernel"
W4 = {"method": "rtn", "group_size": 32}
W8A8 = {"method": "rtn", "layers": ("re:.*=w8a8",), "symmetric": True}
BEHIND_A_NORM = [NORM, BYTES, ROUND, BYTES]
CASES: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "W4": ("llama", W4, [NORM, WORDS, WORDS] * 2),
    "W8A8": ("llama", W8A8, BEHIND_A_NORM * 2),
    "FP8": ("llama", {"method": "fp8"}, BEHIND_A_NORM * 2),
    "W8A8, norms of queries and keys": (
        "qwen3",
        W8A8,
        [NORM, BYTES, HEADS, ROUND, BYTES, *BEHIND_A_NORM],
    ),
    "W8A8, norms on both sides": (
        "gemma3",
        W8A8,
        [NORM, BYTES, HEADS, ROUND, BYTES, NORM, BYTES, GATED, ROUND, BYTES],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_additions_norms_and_rounding_share_a_launch(
    case: str, load: Callable[..., Decoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    family, options, expected = CASES[case]
    assert _layer_launches(load(family, **options), monkeypatch) == expected


READ_BACK = {"torch _local_scalar_dense", "torch nonzero", "torch bincount"}


@pytest.mark.parametrize(("options", "products"), [(W4, [WORDS]), (W8A8, [ROUND, BYTES])])
def test_a_mixture_launches_the_same_for_any_choice_and_reads_nothing_back(
    options: dict[str, Any],
    products: list[str],
    load: Callable[..., Decoder],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = _layer_launches(load("mixtral", **options), monkeypatch)
    kernels = [name for name in names if not name.startswith("torch ")]
    attention = [NORM, products[-1], *products]
    assert kernels == [*attention, NORM, "route_kernel", *2 * products, "combine_kernel"]
    assert not READ_BACK & set(names)


def test_without_the_seam_there_are_more_launches(
    load: Callable[..., Decoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = load("gemma3", **W8A8)
    together = len(_layer_launches(decoder, monkeypatch))
    for name in ("norm_for", "norm_heads"):
        monkeypatch.setattr(TritonBackend, name, getattr(ReferenceBackend, name))
    assert len(_layer_launches(decoder, monkeypatch)) >= together + 9


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_families_with_more_norms_are_the_references(
    family: str, load: Callable[..., Decoder]
) -> None:
    ids = torch.randint(0, 384, (16,), generator=torch.Generator().manual_seed(4)).tolist()
    ours, theirs = (load(family, backend, **W8A8) for backend in ("triton", "reference"))
    assert relative_error(run_whole(ours, ids), run_whole(theirs, ids).double()) < 0.05
