"""The command on a card does the same again, and says nothing of anybody's machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from qtool.quantize.card import command_line, model_card, public_name
from qtool.quantize.options import QuantizeOptions
from qtool.quantize.plots import by_layer
from qtool.quantize.report import Report


def test_only_what_differs_from_the_defaults_is_shown() -> None:
    assert command_line("org/model", QuantizeOptions()) == (
        "qtool quantize org/model --out OUT --method awq"
    )
    options = QuantizeOptions(
        method="rtn", bits=8, symmetric=True, ignore=("layers.0", "down_proj"), overwrite=True
    )
    assert command_line("smollm2-135m", options) == (
        "qtool quantize smollm2-135m --out OUT --method rtn --bits 8 --symmetric "
        "--ignore layers.0 --ignore down_proj"
    )
    assert command_line("m", QuantizeOptions(symmetric=False)).endswith("--asymmetric")


def test_paths_keep_their_last_part(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "my words.txt").write_text("x")
    options = QuantizeOptions(
        calibration=(f"{tmp_path}/my words.txt=2", "org/data@test:text", "builtin=0.5"),
        eval_text=str(tmp_path / "gone.txt"),
    )
    line = command_line(str(tmp_path / "model"), options)
    assert str(tmp_path) not in line
    assert "--calibration my words.txt=2 --calibration org/data@test:text" in line
    assert "--calibration builtin=0.5" in line and "--eval-text gone.txt" in line
    assert public_name(str(tmp_path / "model")) == "model"
    assert public_name("org/model") == "org/model"


@pytest.mark.parametrize(("name", "known"), [("org/model", True), ("model", False)])
def test_only_an_id_of_the_hub_is_a_base_model_for_the_hub(name: str, known: bool) -> None:
    report = Report(
        method="rtn",
        scheme={},
        dtype="bfloat16",
        calibration=None,
        modules=(),
        qtool_version="0",
        base_model=name,
    )
    report = _with_a_module(report)
    assert (f"base_model: {name}\n" in model_card(report)) == known
    assert model_card(report).startswith("---\n")


def _with_a_module(report: Report) -> Report:
    from dataclasses import replace

    from qtool.quantize.report import ModuleRecord

    record = ModuleRecord(
        name="a",
        asked="W4",
        used="W4",
        weight_error=0.1,
        bits_per_weight=4.5,
        num_weights=10,
    )
    return replace(report, modules=(record,))


def test_values_are_drawn_by_layer_and_kind() -> None:
    values = {"model.layers.0.mlp.up": 1.0, "model.layers.1.mlp.up": 2.0, "lm_head": 3.0}
    assert by_layer(values) == {"up": [(0, 1.0), (1, 2.0)]}
