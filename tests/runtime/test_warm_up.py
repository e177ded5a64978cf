"""Loading a model compiles what its steps launch: all of that, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from qtool.formats.reader import CheckpointReader
from qtool.quantize.options import QuantizeOptions
from qtool.quantize.pipeline import quantize_model
from qtool.runtime.batch import Batch, QuerySpan
from qtool.runtime.kernels.reference import ReferenceBackend
from qtool.runtime.loader import load_decoder
from qtool.runtime.moe import MixtureOfExperts
from qtool.runtime.warm_up import QueriesOnly, warm_up
from support.families import FAMILY_VARIANTS, IN_BLOCKS

pytest.importorskip("triton")
from qtool.runtime.kernels.triton import backend as backends
from qtool.runtime.kernels.triton.target import sample_target
from support.specializations import recorded_forms

CPU = torch.device("cpu")
W4 = {"method": "rtn", "group_size": 32}
W8 = {"method": "rtn", "bits": 8, "group_size": "row", "symmetric": True}
W8A8 = {"method": "rtn", "layers": ("re:.*=w8a8",), "symmetric": True}
STATIC = {"method": "rtn", "layers": ("re:.*=w8a8-static",), "symmetric": True}
BLOCKS = {"method": "fp8", "granularity": "block"}
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "W4": ("sm_90", "llama", W4),
    "W4, norms of heads": ("gfx942", "qwen3", W4),
    "W8, norms on both sides": ("sm_80", "gemma3", W8),
    "W8A8": ("sm_90", "llama", W8A8),
    "W8A8, static": ("sm_90", "qwen3", STATIC),
    "W8A8, norms on both sides": ("sm_80", "gemma3", W8A8),
    "FP8": ("sm_90", "llama", {"method": "fp8"}),
    "FP8 in float16": ("sm_80", "llama", {"method": "fp8"}),
    "FP8 blocks": ("sm_90", "qwen3", BLOCKS),
    "FP8 blocks in float16": ("sm_80", "qwen3", BLOCKS),
    "FP8 weights": ("sm_90", "llama", {"method": "fp8", "layers": ("re:.*=fp8-weights",)}),
    "W4, experts": ("sm_90", "mixtral", W4),
    "W8A8, experts, a shared one": ("sm_90", "qwen2_moe", W8A8),
    "FP8 blocks, experts": ("sm_90", "mixtral", BLOCKS),
    "FP8 blocks, experts in float16": ("sm_80", "mixtral", BLOCKS),
    "FP8 blocks, experts apart": ("sm_90", "qwen3_moe", BLOCKS),
}


def _batch(lengths: tuple[int, ...], logit_rows: tuple[int, ...]) -> Batch:
    """Rows of sequences at any position, for a cache that is not there."""
    total, spans, first = sum(lengths), [], 0
    for length in lengths:
        spans.append(QuerySpan(first, length, length))
        first += length
    rows = torch.arange(total)
    tables = torch.zeros(len(lengths), 1, dtype=torch.int64)
    return Batch(rows % 7, rows % 32, rows, tuple(spans), tables, torch.tensor(logit_rows).long())


# Tokens of a step's sequences, and the rows whose logits are wanted: decode steps, prompts and
# both, in every bucket, at its ends and odd; a prompt's first chunk, which nobody samples from.
STEPS = (
    *((lengths, (0,)) for lengths in ((1,), (2,), (7,), (8,), (9,), (16,), (17,), (32,), (33,))),
    *((lengths, (0,)) for lengths in ((64,), (65,), (128,), (129,), (250,), (257,), (512,))),
    *((lengths, (0,)) for lengths in ((513,), (1000,), (1024,), (1025,), (1700,))),
    ((1, 1, 1), (0, 1, 2)),
    ((1, 1, 40, 1), (0, 1, 41, 42)),
    ((300,), ()),
)


@pytest.mark.parametrize("case", CASES)
def test_the_forms_that_steps_launch_are_those_that_loading_compiled(
    case: str,
    model_factory: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arch, family, options = CASES[case]
    variant = FAMILY_VARIANTS.get(family, {}) | (IN_BLOCKS if options == BLOCKS else {})
    source = model_factory(dtype=torch.float16, **variant)
    chosen = QuantizeOptions(samples=2, seq_len=32, device="cpu", **options)
    quantize_model(source, tmp_path / "q", chosen)
    monkeypatch.setattr(backends, "is_interpreted", lambda: False)
    backend = backends.TritonBackend(CPU, torch.float16, sample_target(arch))
    with recorded_forms() as compiled, CheckpointReader(tmp_path / "q") as reader:
        decoder, _ = load_decoder(reader, backend)
    mlps = [layer.mlp for layer in decoder.layers]
    mixtures = [mlp for mlp in mlps if isinstance(mlp, MixtureOfExperts)]
    assert bool(mixtures) == ("experts" in case)
    assert all(bool(mixture.together) == ("apart" not in case) for mixture in mixtures)
    with recorded_forms() as served:
        for lengths, logit_rows in STEPS:
            decoder.forward(_batch(lengths, logit_rows), QueriesOnly())
    assert {form[0] for form in served} >= {"rms_norm_kernel"}
    assert served == compiled


def test_what_compiles_nothing_is_not_run(tiny_model_folder: Path) -> None:
    with CheckpointReader(tiny_model_folder) as reader:
        decoder, _ = load_decoder(reader, ReferenceBackend(CPU, torch.float32))

    def refused(*_: object) -> None:
        raise AssertionError("a step")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(decoder), "forward", refused)
        warm_up(decoder)
