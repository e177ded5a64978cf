"""Solving methods aim at what the original puts out, whatever has drifted on the way."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from qtool.calibration.decoder_block import DecoderBlock
from qtool.calibration.families import find_family
from qtool.calibration.walk import walk_blocks
from qtool.formats.checkpoint import CheckpointReader
from qtool.quantize.gptq import retarget
from qtool.quantize.job import Job
from qtool.quantize.methods import METHODS
from qtool.quantize.options import QuantizeOptions
from qtool.quantize.plan import plan_schemes
from qtool.quantize.workspace import SolveInputs, Workspace
from support.offline import OFFLINE_VARIANTS

CPU = torch.device("cpu")
DENSE = [
    name for name, settings in OFFLINE_VARIANTS.items() if "experts" not in str(settings).lower()
]


@pytest.fixture(scope="module")
def ids() -> Tensor:
    return torch.randint(4, 384, (24, 24), generator=torch.Generator().manual_seed(0))


def _job(folder: Path, ids: Tensor) -> Job:
    reader = CheckpointReader(folder)
    family = find_family(reader.config)
    options = QuantizeOptions(method="gptq", group_size=32)
    schemes = plan_schemes(reader, reader.config, family, options.schemes)
    return Job(reader, family, schemes, torch.bfloat16, CPU, ids)


def _stream_error(block: DecoderBlock, original: Tensor) -> Tensor:
    """Mean square of how far the block's output is from the original's."""
    return (torch.cat(list(block.run())) - original).square().mean()


@pytest.mark.parametrize("variant", DENSE)
def test_what_writes_the_residual_stream_is_moved_to_undo_its_error(
    variant: str, model_factory: Callable[..., Path], ids: Tensor
) -> None:
    job = _job(model_factory(**OFFLINE_VARIANTS[variant]), ids)
    with torch.no_grad():
        block = next(iter(job.blocks(originals=True)))
        noise = torch.randn(block.inputs.shape, generator=torch.Generator().manual_seed(1))
        original = torch.cat(list(block.run()))
        block.inputs.add_(0.1 * block.inputs.std() * noise)
        work = Workspace.of(block, job)
        block.keep_original()
        for name in work.family.sums:
            before = _stream_error(block, original)
            work.observe_beside_original([(name,)])
            inputs = work.inputs[name]
            assert isinstance(inputs, SolveInputs) and inputs.shortfall is not None
            weight = work.linear(name).weight
            (target,) = retarget(
                [weight], inputs.hessian, inputs.tokens, inputs.drift, inputs.shortfall
            )
            weight.copy_(target)
            assert _stream_error(block, original) < 0.98 * before, name
        # The original has run to its end beside the last linear.
        assert block.original_inputs is not None
        torch.testing.assert_close(block.original_inputs, original, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kept_bytes", [0, 2**30])
@pytest.mark.parametrize("variant", DENSE)
def test_what_is_replayed_is_what_the_block_would_compute(
    variant: str,
    kept_bytes: int,
    model_factory: Callable[..., Path],
    ids: Tensor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("qtool.quantize.workspace.KEPT_BYTES", kept_bytes)
    monkeypatch.setattr("qtool.calibration.decoder_block.BATCH_TOKENS", 5 * ids.shape[1])
    job = replace(_job(model_factory(**OFFLINE_VARIANTS[variant]), ids), dtype=torch.float32)
    with torch.no_grad():
        block = next(iter(job.blocks(originals=True)))
        assert block.original_inputs is not None
        block.inputs.add_(0.1 * torch.randn(block.inputs.shape))
        inputs, originals = block.inputs.clone(), block.original_inputs.clone()
        original = copy.deepcopy(block.module)
        _quantize(block, job)
        block.propagate()
        found, then = block.inputs.clone(), block.original_inputs.clone()
        block.release()
        block.inputs.copy_(inputs)
        torch.testing.assert_close(found, torch.cat(list(block.run())), rtol=1e-5, atol=1e-5)
        block.module = original
        block.inputs.copy_(originals)
        torch.testing.assert_close(then, torch.cat(list(block.run())), rtol=1e-5, atol=1e-5)


def test_a_solved_model_ends_nearer_to_the_original_than_one_solved_layer_by_layer(
    model_factory: Callable[..., Path], ids: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = _job(model_factory(layers=4), ids)

    def final_error() -> float:
        with torch.no_grad():
            blocks = walk_blocks(job.reader, job.family, ids, CPU, originals=True)
            for block in blocks:
                _quantize(block, job)
                if block.index == 3:
                    assert block.original_inputs is not None  # by now the original's outputs
                    return float(_stream_error(block, block.original_inputs))
        raise AssertionError("the model has four blocks")

    aimed = final_error()
    monkeypatch.setattr("qtool.quantize.block.retarget", lambda weights, *_: list(weights))
    assert aimed < 0.9 * final_error()


def _quantize(block: DecoderBlock, job: Job) -> Any:
    from qtool.quantize.block import quantize_block

    return quantize_block(block, job, METHODS["gptq"].recipe)


def test_where_nothing_was_rounded_before_there_is_nothing_to_make_up_for(
    tiny_model_folder: Path, ids: Tensor
) -> None:
    job = _job(tiny_model_folder, ids)
    with torch.no_grad():
        work = Workspace.of(block := next(iter(job.blocks(originals=True))), job)
        block.keep_original()
        for group in work.groups:
            work.observe_beside_original([group])
            inputs = work.inputs[group[0]]
            assert isinstance(inputs, SolveInputs)
            assert not inputs.drift.any()
            assert inputs.shortfall is None or not inputs.shortfall.any()
