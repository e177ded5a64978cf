"""What is drawn of a run, layer by layer."""

from __future__ import annotations

from dataclasses import replace

import pytest

from qtool.quantize.plots import by_layer, draw_plots, lines, pictures
from qtool.quantize.report import ModuleRecord, Report


def _report(output_error: float | None) -> Report:
    records = tuple(
        ModuleRecord(
            name=f"model.layers.{layer}.mlp.up_proj",
            asked="W4",
            used="W4",
            weight_error=0.1 + layer,
            output_error=output_error,
            bits_per_weight=4.5,
            num_weights=10,
        )
        for layer in range(3)
    )
    return Report(
        method="gptq",
        scheme={},
        dtype="bfloat16",
        calibration=None,
        modules=records,
        qtool_version="0",
        activation_peaks={"model.layers.0.mlp.up_proj": 3.0},
    )


def test_values_are_drawn_by_layer_and_kind() -> None:
    values = {"model.layers.0.mlp.up": 1.0, "model.layers.1.mlp.up": 2.0, "lm_head": 3.0}
    assert by_layer(values) == {"up": [(0, 1.0), (1, 2.0)]}


def test_kinds_that_read_the_same_input_share_a_line() -> None:
    values = {
        f"model.layers.{layer}.{kind}": layer + (kind == "o")
        for layer in range(2)
        for kind in ("q", "k", "o")
    }
    assert lines(values) == [(["q", "k"], [(0, 0), (1, 1)]), (["o"], [(0, 1), (1, 2)])]


def test_of_a_layers_experts_the_largest_value_is_drawn() -> None:
    experts = {f"model.layers.0.mlp.experts.{n}.up": value for n, value in enumerate((1, 7, 3))}
    assert by_layer({**experts, "model.layers.1.mlp.experts.0.up": 2}) == {"up": [(0, 7), (1, 2)]}


def test_error_and_loss_have_a_picture_each() -> None:
    found = pictures(_report(0.2))
    assert list(found) == ["errors.png", "losses.png", "activations.png"]
    assert found["errors.png"].values["model.layers.2.mlp.up_proj"] == 2.1
    assert found["losses.png"].values["model.layers.2.mlp.up_proj"] == 0.2


def test_what_was_not_measured_is_not_drawn() -> None:
    assert list(pictures(replace(_report(None), activation_peaks={}))) == ["errors.png"]
    assert pictures(replace(_report(None), activation_peaks={}, modules=())) == {}


def test_a_picture_is_a_png_of_the_same_bytes_every_time() -> None:
    pytest.importorskip("matplotlib")
    plots = draw_plots(_report(0.2))
    assert all(data.startswith(b"\x89PNG") for data in plots.values())
    assert draw_plots(_report(0.2)) == plots
