"""A block being rewritten: folding changes neither what it computes nor what is known of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from qtool.calibration.families import find_family
from qtool.calibration.walk import walk_blocks
from qtool.formats.checkpoint import CheckpointReader
from qtool.quantize.job import Job
from qtool.quantize.plan import plan_schemes
from qtool.quantize.schemes import IntegerWeights, SchemesAsked
from qtool.quantize.workspace import Workspace
from support.offline import OFFLINE_VARIANTS
from support.variants import relative_error

CPU = torch.device("cpu")


@pytest.fixture
def ids() -> Tensor:
    return torch.randint(4, 384, (4, 32), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("variant", OFFLINE_VARIANTS)
def test_folding_every_pair_keeps_outputs_and_statistics_true(
    variant: str, ids: Tensor, model_factory: Callable[..., Path]
) -> None:
    with CheckpointReader(model_factory(**OFFLINE_VARIANTS[variant])) as reader, torch.no_grad():
        family = find_family(reader.config)
        asked = SchemesAsked(default=IntegerWeights(4, None, "row"))
        schemes = plan_schemes(reader, reader.config, family, asked)
        job = Job(reader, family, schemes, torch.float32, CPU, ids)
        block = next(walk_blocks(reader, family, ids, CPU))
        work = Workspace.of(block, job)
        work.observe_for_search()
        before = torch.cat(list(block.run()))
        generator = torch.Generator().manual_seed(1)
        for pair in family.pairs:
            features = torch.empty(work.linear(pair.targets[0]).in_features)
            width = work.tie(pair, features, "max").numel()
            work.fold(pair, torch.rand(width, generator=generator) * 4 + 0.25)
        after = torch.cat(list(block.run()))
        assert relative_error(after, before) < 1e-5 and not torch.equal(after, before)
        kept = dict(work.inputs)
        work.observe_for_search()
        for name, found in work.inputs.items():
            # Moments of the input that the folded block really has, channel by channel.
            assert relative_error(kept[name].hessian, found.hessian) < 1e-4, name
            torch.testing.assert_close(kept[name].peak, found.peak, rtol=1e-4, atol=1e-5)
