"""Every method from folder to folder: what it reaches, what it leaves, what it owns up to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from qtool.calibration.families import find_family
from qtool.calibration.walk import walk_blocks
from qtool.commands.cli_options import METHOD_NAMES
from qtool.formats.checkpoint import CheckpointReader
from qtool.quantize import gptq
from qtool.quantize.block import quantize_block
from qtool.quantize.job import Job
from qtool.quantize.methods import METHODS
from qtool.quantize.options import QuantizeOptions
from qtool.quantize.plan import plan_schemes

CALIBRATED = [name for name, method in METHODS.items() if method.needs_calibration]
BATCHES = ("qtool.calibration.decoder_block.BATCH_TOKENS",)


@pytest.fixture(scope="module")
def ids() -> Tensor:
    return torch.randint(4, 384, (12, 24), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def loud_folder(model_factory: Callable[..., Path]) -> Path:
    """A model with a few loud input channels, as real ones have."""
    from safetensors.torch import load_file, save_file

    folder = model_factory(bias=True)
    tensors = load_file(folder / "model.safetensors")
    for name in tensors:
        if name.endswith("layernorm.weight"):
            tensors[name][::7] *= 12
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _job(folder: Path, ids: Tensor | None, options: QuantizeOptions) -> Job:
    reader = CheckpointReader(folder)
    family = find_family(reader.config)
    schemes = plan_schemes(reader, reader.config, family, options.schemes)
    return Job(reader, family, schemes, torch.bfloat16, torch.device("cpu"), ids)


def _output_errors(folder: Path, ids: Tensor, method: str, **options: Any) -> Tensor:
    """Relative output error of each linear of the first block."""
    job = _job(folder, ids, QuantizeOptions(method=method, **options))
    with torch.no_grad():
        block = next(walk_blocks(job.reader, job.family, ids, job.device, originals=True))
        records = quantize_block(block, job, METHODS[method].recipe).records
    return torch.tensor([record.output_error for record in records])


def test_the_command_line_knows_every_method() -> None:
    assert list(METHODS) == list(METHOD_NAMES)


@pytest.mark.parametrize("symmetric", [True, False])
def test_each_step_lowers_the_output_error_of_linears(
    symmetric: bool, loud_folder: Path, ids: Tensor
) -> None:
    errors = {
        method: _output_errors(loud_folder, ids, method, group_size=32, symmetric=symmetric)
        for method in ("rtn", "rtn+clip", "gptq", "awq", "awq+gptq")
    }
    # Nothing is clipped in q and k; the others' groups are judged on the very tokens measured.
    assert (errors["rtn+clip"] <= errors["rtn"] * 1.01).all()
    assert errors["rtn+clip"][3:].mean() < 0.98 * errors["rtn"][3:].mean()
    assert (errors["gptq"] < 0.9 * errors["rtn"]).all()
    assert errors["gptq"].mean() < 0.7 * errors["rtn"].mean()
    assert errors["awq"].mean() < 0.98 * errors["rtn+clip"].mean()
    assert errors["awq+gptq"].mean() < 0.8 * errors["awq"].mean()


@pytest.mark.parametrize("method", CALIBRATED)
def test_records_say_what_each_linear_got(method: str, loud_folder: Path, ids: Tensor) -> None:
    job = _job(loud_folder, ids, QuantizeOptions(method=method))
    with torch.no_grad():
        blocks = list(METHODS[method].run(job))
    records = [record for block in blocks for record in block.records]
    assert [record.name for record in records] == list(job.schemes)
    for record in records:
        assert record.asked == record.used == f"{job.schemes[record.name].describe()} {method}"
        assert record.fallback is None and record.regularization is None
        assert record.tokens == ids.numel()
        assert (record.awq_ratio is not None) == ("awq" in method)
        assert (record.smoothquant_strength is not None) == ("smoothquant" in method)


@pytest.mark.parametrize("method", CALIBRATED)
def test_the_batch_size_changes_statistics_by_rounding_at_most(
    method: str, loud_folder: Path, ids: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = _job(loud_folder, ids, QuantizeOptions(method=method))
    found = []
    for tokens in (24, 10_000):
        with monkeypatch.context() as patch, torch.no_grad():
            for target in BATCHES:
                patch.setattr(target, tokens)
            found.append(next(iter(METHODS[method].run(job))))
    first, second = found
    for name, tensor in first.weights.items():
        # A solve answers to each error before it: one code that rounding has turned over moves
        # every later target, so that only errors can be compared there.
        if METHODS[method].recipe.solve and "self_attn" not in name:
            continue
        same = (tensor.codes.float() == second.weights[name].codes.float()).float().mean()
        assert same > 0.97, name
    for one, other in zip(first.records, second.records, strict=True):
        assert one.output_error == pytest.approx(other.output_error, rel=0.02), one.name


def test_the_order_of_samples_changes_nothing(loud_folder: Path, ids: Tensor) -> None:
    from qtool.calibration.data import canonical_order

    shuffled = ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(3))]
    assert not torch.equal(shuffled, ids)
    assert torch.equal(canonical_order(shuffled), canonical_order(ids))


def test_in_a_block_later_linears_see_what_earlier_ones_became(
    loud_folder: Path, ids: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = replace(_job(loud_folder, ids, QuantizeOptions(method="gptq")), dtype=torch.float32)
    hessians: list[Tensor] = []
    solve = gptq.solve_group

    def spy(weights: Any, nearest: Any, hessian: Tensor, factor: Any) -> Any:
        hessians.append(hessian)
        return solve(weights, nearest, hessian, factor)

    monkeypatch.setattr("qtool.quantize.block.solve_group", spy)
    with torch.no_grad():
        block = next(walk_blocks(job.reader, job.family, ids, job.device, originals=True))
        before = _second_moments(block, job.family)
        quantize_block(block, job, METHODS["gptq"].recipe)
        block.release()
        after = _second_moments(block, job.family)
    assert len(hessians) == 4
    torch.testing.assert_close(hessians[0], before[0])
    for found, plain, propagated in list(zip(hessians, before, after, strict=True))[1:]:
        torch.testing.assert_close(found, propagated, rtol=1e-4, atol=1e-5)
        assert (found - plain).abs().max() > 1e-3


def _second_moments(block: Any, family: Any) -> list[Tensor]:
    """Of each group's input, gathered with hooks of our own, in float64."""
    sums = {group[0]: torch.zeros(()) for group in family.linear_groups}

    def add(name: str) -> Callable[[Any, tuple[Tensor, ...]], None]:
        def hook(_: Any, args: tuple[Tensor, ...]) -> None:
            x = args[0].flatten(0, -2).double()
            sums[name] = sums[name] + x.T @ x

        return hook

    hooks = [block.module.get_submodule(name).register_forward_pre_hook(add(name)) for name in sums]
    for _ in block.run():
        pass
    for hook in hooks:
        hook.remove()
    return [(total / block.num_tokens).float() for total in sums.values()]


def test_a_layer_whose_modules_all_fall_back_is_rounded_and_named(
    loud_folder: Path, ids: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qtool.quantize.block.factorize", lambda _: None)
    job = _job(loud_folder, ids, QuantizeOptions(method="gptq"))
    with torch.no_grad():
        block = next(iter(METHODS["gptq"].run(job)))
        plain = next(iter(METHODS["rtn"].run(replace(job, ids=None))))
    for record in block.records:
        assert record.asked.endswith(" gptq") and record.used.endswith(" rtn")
        assert record.fallback is not None and "calibrate on other text" in record.fallback
        assert torch.equal(block.weights[record.name].codes, plain.weights[record.name].codes)


def test_a_channel_that_never_fires_keeps_its_weights_rounded(
    model_factory: Callable[..., Path], ids: Tensor
) -> None:
    from safetensors.torch import load_file, save_file

    folder = model_factory()
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.input_layernorm.weight"][5] = 0
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    options = QuantizeOptions(method="gptq", group_size=32)
    job = _job(folder, ids, options)
    with torch.no_grad():
        solved = next(iter(METHODS["gptq"].run(job))).weights
        plain = next(iter(METHODS["rtn"].run(replace(job, ids=None)))).weights
    name = "model.layers.0.self_attn.q_proj"
    assert torch.equal(solved[name].codes[:, 5], plain[name].codes[:, 5])
    assert not torch.equal(solved[name].codes, plain[name].codes)


@pytest.mark.parametrize("activations", ["dynamic", "static"])
def test_smoothing_is_never_worse_than_rounding_the_same_scheme(
    activations: str, loud_folder: Path, ids: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    from qtool.quantize import smooth_block

    losses: list[tuple[float, float, float]] = []
    search = smooth_block.smoothquant.search_scales

    def spy(*args: Any) -> Any:
        choice = search(*args)
        losses.append((choice.ratio, choice.loss, choice.identity_loss))
        return choice

    monkeypatch.setattr(smooth_block.smoothquant, "search_scales", spy)
    job = _job(loud_folder, ids, QuantizeOptions(method="smoothquant", activations=activations))
    with torch.no_grad():
        list(METHODS["smoothquant"].run(job))
    assert len(losses) == 8 and all(loss <= identity for _, loss, identity in losses)
    # The loud channels of the norms' outputs are worth smoothing.
    assert all(ratio > 0 and loss < 0.7 * identity for ratio, loss, identity in losses[::4])


def test_fused_linears_share_the_static_scale_of_their_input(
    loud_folder: Path, ids: Tensor
) -> None:
    options = QuantizeOptions(method="fp8", granularity="tensor")
    job = _job(loud_folder, ids, options)
    with torch.no_grad():
        walked = next(walk_blocks(job.reader, job.family, ids, job.device, originals=True))
        peaks: dict[str, float] = {}

        def note(name: str) -> Callable[[Any, tuple[Tensor, ...]], None]:
            def hook(_: Any, args: tuple[Tensor, ...]) -> None:
                peaks[name] = float(args[0].abs().max())

            return hook

        for name in job.family.linears:
            walked.module.get_submodule(name).register_forward_pre_hook(note(name))
        list(walked.run())
        block = next(iter(METHODS["fp8"].run(job)))
    for name in job.family.linears:
        scale = block.weights[f"model.layers.0.{name}"].input_scale
        assert scale is not None and scale.dtype == torch.bfloat16
        assert float(scale) == pytest.approx(peaks[name] / 448, rel=0.005)
