"""Records, their JSON form and the summary."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch

from qtool.formats.scheme import WeightScheme
from qtool.quantize.options import QuantizeOptions
from qtool.quantize.pipeline import Progress, quantize_model
from qtool.quantize.report import ModuleRecord, Report, module_record, summary_rows
from qtool.quantize.rtn import quantize_rtn


def _record(name: str, error: float, fallback: str | None = None) -> ModuleRecord:
    return ModuleRecord(
        name=name,
        asked="W4 asym g64 awq",
        used="W4 asym g64 awq",
        weight_error=0.1,
        output_error=error,
        tokens=64,
        bits_per_weight=4.5,
        num_weights=100,
        fallback=fallback,
    )


def _report(*records: ModuleRecord) -> Report:
    return Report(
        method="awq",
        scheme={},
        dtype="bfloat16",
        calibration=None,
        modules=records,
        qtool_version="0",
    )


def test_a_record_holds_the_error_and_the_bits_really_stored() -> None:
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    quantized = quantize_rtn(weight, WeightScheme(4, False, "group", 32), torch.bfloat16)
    record = module_record("m.q_proj", "rtn", weight, quantized)
    expected = (quantized.dequantize() - weight).square().sum() / weight.square().sum()
    assert abs(record.weight_error - float(expected.sqrt())) < 1e-6
    assert record.bits_per_weight == 4 + (16 + 4) / 32
    assert record.asked == record.used == "W4 asym g32 rtn"


def test_a_weight_of_zeros_has_no_error() -> None:
    weight = torch.zeros(4, 32)
    quantized = quantize_rtn(weight, WeightScheme(4, False, "group", 32), torch.bfloat16)
    assert module_record("m", "rtn", weight, quantized).weight_error == 0


def test_the_summary_has_a_row_a_kind_with_the_worst_module_by_name() -> None:
    report = _report(
        _record("model.layers.0.mlp.up_proj", 0.1),
        _record("model.layers.0.mlp.down_proj", 0.2),
        _record("model.layers.1.mlp.up_proj", 0.3, fallback="singular"),
    )
    up, down = summary_rows(report)
    assert (up.kind, up.count, up.fallbacks) == ("up_proj", 2, 1)
    assert up.worst == "model.layers.1.mlp.up_proj" and abs(up.output_error - 0.2) < 1e-9
    assert (down.kind, down.count, down.fallbacks) == ("down_proj", 1, 0)
    assert [record.name for record in report.fallbacks] == ["model.layers.1.mlp.up_proj"]


def test_a_report_is_json() -> None:
    values = json.loads(json.dumps(_report(_record("a", 0.1)).to_dict()))
    assert values["bits_per_weight"] == 4.5
    assert values["modules"][0]["fallback"] is None


def test_pairs_that_were_left_out_are_said_in_the_run_and_in_the_report(
    model_factory: Callable[..., Path], tmp_path: Path
) -> None:
    folder = model_factory(
        model_type="qwen3_moe", num_experts=3, num_experts_per_tok=2, moe_intermediate_size=32
    )
    data = {"calibration": (__file__,), "samples": 2, "seq_len": 32, "device": "cpu"}
    options = QuantizeOptions(group_size=32, ignore=("layers.1.self_attn",), **data)
    notes: list[str] = []

    def listen(step: Progress) -> None:
        if step.phase == "format":
            notes.append(step.detail)

    report = quantize_model(folder, tmp_path / "q", options, listen)
    assert [(pair.source, pair.targets) for pair in report.skipped_pairs] == [
        ("post_attention_layernorm -> mlp.experts", ()),
        ("model.layers.1.input_layernorm", tuple(f"self_attn.{n}_proj" for n in "qkv")),
        ("model.layers.1.self_attn.v_proj", ("self_attn.o_proj",)),
    ]
    assert "the norm also feeds the router" in notes[0] and len(notes) == 3
    assert notes[2].startswith("not smoothed: v_proj -> self_attn.o_proj: self_attn.o_proj, ")
    assert report.to_dict()["skipped_pairs"][2]["reason"].endswith("stays as it is")


def test_the_scheme_of_a_report_is_that_of_most_modules(
    tiny_model_folder: Path, tmp_path: Path
) -> None:
    options = QuantizeOptions(method="rtn", group_size=32, layers=("re:.*[qkv]_proj=w8",))
    report = quantize_model(tiny_model_folder, tmp_path / "q", options)
    assert report.modules[0].used == "W8 sym g64 rtn"
    assert report.scheme is not None and report.scheme["bits"] == 4
