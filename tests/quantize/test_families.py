"""Every family, quantized: smoothing changes nothing, names are the hub's, the engine runs it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from qtool.calibration.experts import use_hub_names
from qtool.calibration.families import (
    FAMILIES,
    ModelFamily,
    SmoothingPair,
    find_family,
    head_dim,
    value_channels,
)
from qtool.calibration.meta_model import load_weights
from qtool.errors import ModelError
from qtool.formats.checkpoint import CheckpointReader, CheckpointWriter
from qtool.formats.tensor import QuantizedTensor
from qtool.quantize import smoothing
from qtool.quantize.options import QuantizeOptions
from qtool.quantize.pipeline import quantize_model
from qtool.quantize.workspace import Workspace
from qtool.runtime.loaded_model import load_model
from qtool.runtime.options import ModelOptions
from qtool.runtime.weight_source import WeightSource
from support.batches import run_whole
from support.offline import OFFLINE_VARIANTS
from support.variants import ref_logits, relative_error, token_ids

NATIVE = ModelOptions(device="cpu", dtype="fp32", cpu_compute="int8")
REFERENCE = ModelOptions(device="cpu", dtype="fp32", backend="reference")


@pytest.fixture(autouse=True)
def _quiet() -> None:
    transformers_logging.disable_progress_bar()


def _fold(
    block: nn.Module, pair: SmoothingPair, family: ModelFamily, config: dict[str, int], seed: int
) -> None:
    """Random scales through one pair, as the methods fold theirs."""
    targets = [block.get_submodule(name) for name in pair.targets]
    channels = targets[0].weight.shape[1]
    width = value_channels(config) if pair.shares_heads else channels
    scales = torch.rand(width, generator=torch.Generator().manual_seed(seed)) * 4 + 0.25
    source = block.get_submodule(pair.source)
    if isinstance(source, nn.Linear):
        weight, bias = smoothing.divide_rows(source.weight, source.bias, scales)
        source.weight.copy_(weight)
        if bias is not None:
            source.bias.copy_(bias)
    else:
        weight, scales = smoothing.divide_norm(
            source.weight, scales, family.norm_offset, torch.float32
        )
        source.weight.copy_(weight)
    if pair.shares_heads:
        scales = smoothing.spread_over_query_group(scales, head_dim(config), channels)
    for target in targets:
        target.weight.copy_(smoothing.multiply_columns(target.weight, scales))


@pytest.mark.parametrize("variant", OFFLINE_VARIANTS)
def test_smoothing_through_every_pair_leaves_the_logits_as_they_were(
    variant: str, model_factory: Callable[..., Path]
) -> None:
    folder = model_factory(**OFFLINE_VARIANTS[variant])
    with CheckpointReader(folder) as reader, torch.no_grad():
        family = find_family(reader.config)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        ids = torch.tensor([token_ids(60)])
        before = model(ids).logits
        use_hub_names(model, family)
        for prefix in family.block_prefixes(reader.config):
            block = model.get_submodule(prefix)
            load_weights(block, prefix, reader, torch.device("cpu"))
            for index, pair in enumerate(family.pairs):
                _fold(block, pair, family, reader.config, index)
        after = model(ids).logits
    assert relative_error(after, before) < 1e-4
    assert not torch.equal(after, before), "some scale was folded"


def test_every_family_is_among_the_variants() -> None:
    seen = {v.get("model_type", "llama") for v in OFFLINE_VARIANTS.values()}
    assert seen == set(FAMILIES)


METHODS: dict[str, dict[str, Any]] = {
    "rtn": {"group_size": "row"},
    "awq": {"group_size": "row"},
    "smoothquant": {},
    "fp8": {},
}


@pytest.mark.parametrize(
    ("variant", "method"),
    [
        *((variant, name) for variant in OFFLINE_VARIANTS for name in METHODS if name != "rtn"),
        ("mixtral", "rtn"),
        ("phi3", "rtn"),
    ],
)
def test_a_quantized_folder_has_the_hubs_names_and_runs_as_transformers_runs_its_weights(
    variant: str,
    method: str,
    model_factory: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder, out = model_factory(**OFFLINE_VARIANTS[variant]), tmp_path / "q"
    data = {"calibration": (__file__,), "samples": 2, "seq_len": 32}
    options = QuantizeOptions(method=method, device="cpu", **data, **METHODS[method])
    report = quantize_model(folder, out, options)
    with CheckpointReader(folder) as reader:
        family, config = find_family(reader.config), reader.config
    assert len(report.modules) == len(family.linears) * config["num_hidden_layers"]
    _write_dequantized(out, folder, tmp_path / "plain")
    ids = token_ids(40)
    with monkeypatch.context() as patch:
        patch.setattr("qtool.runtime.kernels.reference.round_input", lambda x, *_: x)
        exact = run_whole(load_model(out, REFERENCE).decoder, ids)
    assert relative_error(exact, ref_logits(tmp_path / "plain", ids)) < 1e-4
    # With activations rounded to 8 bits. Where that moves a token to another expert, its row is
    # another; so the bound is for the middle row. A tiny random model makes much of any noise:
    # FP8's 3 bits of fraction give up to .23, behind Gemma 3's norms of queries and keys.
    for rounding in (NATIVE, REFERENCE) if method in ("smoothquant", "fp8") else (NATIVE,):
        rounded = run_whole(load_model(out, rounding).decoder, ids)
        errors = (rounded - exact).norm(dim=1) / exact.norm(dim=1)
        assert 0 < float(errors.median()) < (0.3 if method == "fp8" else 0.08)


def _write_dequantized(quantized: Path, original: Path, out: Path) -> None:
    """The original's tensors, by its names and no others, with the values that the result has."""
    with (
        CheckpointReader(quantized) as reader,
        CheckpointReader(original) as names,
        CheckpointWriter(out) as writer,
    ):
        source = WeightSource(reader)
        for name in names.names():
            weight = source.weight(name.removesuffix(".weight")) if _is_linear(name) else None
            plain = source.tensor(name) if weight is None else weight
            if isinstance(plain, QuantizedTensor):
                plain = plain.dequantize()
            writer.add(name, plain.float())
        source.refuse_leftovers(tied_head=False)
        writer.finish(names.config)


def _is_linear(name: str) -> bool:
    return ".layers." in name and name.endswith(".weight") and "norm" not in name


def test_routers_are_named_as_not_quantized_and_keep_their_bits(
    model_factory: Callable[..., Path], tmp_path: Path
) -> None:
    folder = model_factory(**OFFLINE_VARIANTS["qwen2_moe"])
    quantize_model(folder, tmp_path / "q", QuantizeOptions(method="rtn", group_size="row"))
    routers = [f"model.layers.{i}.mlp.{n}" for i in (0, 1) for n in ("gate", "shared_expert_gate")]
    with CheckpointReader(folder) as source, CheckpointReader(tmp_path / "q") as result:
        ignored = result.config["quantization_config"]["ignore"]
        for router in routers:
            assert router in ignored
            assert torch.equal(source.get(f"{router}.weight"), result.get(f"{router}.weight"))


@pytest.mark.parametrize("variant", ["mixtral", "qwen2_moe", "qwen3_moe"])
def test_an_expert_that_no_token_is_sent_to_is_calibrated_on_all_of_them(
    variant: str, model_factory: Callable[..., Path], tmp_path: Path
) -> None:
    folder = model_factory(**OFFLINE_VARIANTS[variant] | {"num_local_experts": 5})
    with CheckpointReader(folder) as reader:
        family = find_family(reader.config)
    assert family.experts is not None
    router = f"{family.blocks}.0.{family.routers[0]}.weight"
    tensors = load_file(folder / "model.safetensors")
    # Of a, -a, b and -b two logits are positive, whatever the token: the fifth expert's is 0.
    a, zero, b = tensors[router][0], torch.zeros(64), tensors[router][3]
    tensors[router] = torch.stack((a, zero, -a, b, -b))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    data = {"calibration": (__file__,), "samples": 2, "seq_len": 32, "device": "cpu"}
    options = QuantizeOptions(method="gptq", group_size=32, strict=True, **data)
    report = quantize_model(folder, tmp_path / "q", options)
    names = {f"{family.blocks}.0.{name}" for name in family.experts.linears(1)}
    unseen = [record for record in report.modules if record.name in names]
    assert len(unseen) == 3
    for record in unseen:
        assert record.tokens == 64 and record.fallback is None
        assert record.output_error is not None and 0 < record.output_error < record.weight_error


@pytest.mark.parametrize("variant", ["mixtral", "qwen2_moe"])
def test_experts_measured_in_one_pass_become_what_they_become_one_by_one(
    variant: str,
    model_factory: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = model_factory(**OFFLINE_VARIANTS[variant])
    passes: list[int] = []
    observe = Workspace.observe_beside_original

    def watched(work: Workspace, groups: list[tuple[str, ...]]) -> None:
        passes.append(len(groups))
        observe(work, groups)

    monkeypatch.setattr(Workspace, "observe_beside_original", watched)
    data = {"calibration": (__file__,), "samples": 3, "seq_len": 32, "device": "cpu"}
    options = QuantizeOptions(method="gptq", group_size=32, **data)
    files = []
    for room in (2**30, 0):
        monkeypatch.setattr("qtool.quantize.workspace.KEPT_BYTES", room)
        quantize_model(folder, tmp_path / str(room), options)
        files.append((tmp_path / str(room) / "model.safetensors").read_bytes())
    assert files[0] == files[1]
    groups = {"mixtral": (3, 4), "qwen2_moe": (4, 6)}[variant]  # before the last linears, and those
    together, alone = [*[1] * groups[0], groups[1]] * 2, [1] * sum(groups) * 2
    assert passes == together + alone


def test_blocks_of_two_kinds_are_refused_by_the_name_of_the_key() -> None:
    config = {"model_type": "qwen3_moe", "num_experts": 4, "num_hidden_layers": 4}
    assert len(find_family(config | {"mlp_only_layers": []}).linears) == 4 + 3 * 4
    with pytest.raises(ModelError, match="mlp_only_layers=\\[2\\]"):
        find_family(config | {"mlp_only_layers": [2]})
    with pytest.raises(ModelError, match="decoder_sparse_step=2"):
        find_family(config | {"decoder_sparse_step": 2})
