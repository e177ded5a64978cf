"""Where calibration may round the factors of products, and that it ends there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from qtool.calibration.decoder_block import DecoderBlock
from qtool.calibration.products import exact_products, rounded_products
from qtool.quantize import gptq
from qtool.quantize.options import QuantizeOptions
from qtool.quantize.pipeline import Evaluated, quantize_model


def _precision() -> str:
    mkldnn: Any = torch.backends.mkldnn
    return str(mkldnn.matmul.fp32_precision)


def test_a_rounded_context_may_hold_an_exact_one_and_both_end() -> None:
    before = _precision()
    with rounded_products():
        assert _precision() == "bf16"
        with exact_products():
            assert _precision() == "ieee"
        assert _precision() == "bf16"
    assert _precision() == before


def test_an_error_ends_it_too() -> None:
    before = _precision()
    with pytest.raises(ZeroDivisionError), rounded_products():
        raise ZeroDivisionError
    assert _precision() == before


def test_held_out_windows_and_solves_are_exact_in_a_quantization(
    tiny_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = set[tuple[str, str]]()
    propagate, solve = DecoderBlock.propagate, gptq.solve_group

    def run(block: DecoderBlock) -> None:
        stream = "held out" if block.original_inputs is None else "calibration"
        seen.add((stream, _precision()))
        propagate(block)

    def solve_group(*arguments: Any) -> Any:
        seen.add(("solve", _precision()))
        return solve(*arguments)

    monkeypatch.setattr(DecoderBlock, "propagate", run)
    monkeypatch.setattr("qtool.quantize.block.solve_group", solve_group)
    texts = {"calibration": (__file__,), "eval_text": __file__, "eval_windows": 1}
    sizes = {"samples": 4, "seq_len": 32, "group_size": 32}
    options = QuantizeOptions(method="gptq", device="cpu", **texts, **sizes)
    evaluated = Evaluated("nothing", {})
    quantize_model(tiny_model_folder, tmp_path / "out", options, evaluator=lambda *_: evaluated)
    assert seen == {("held out", "ieee"), ("calibration", "bf16"), ("solve", "ieee")}


def test_sums_stay_in_float32_and_factors_lose_no_more_than_bfloat16_does() -> None:
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(512, 512, generator=generator) for _ in range(2))
    with rounded_products():
        found = x @ y
    with exact_products():
        exact = x @ y
    reference = x.double() @ y.double()
    assert (exact - reference).abs().max() < 1e-3
    # Two factors of 8 bits each; the errors of 512 terms have random signs, a quarter of a million
    # sums go to five deviations of .0016 a term.
    bound = 6 * 2**-9 * (x.abs().double().square() @ y.abs().double().square()).sqrt()
    assert ((found - reference).abs() < bound + 1e-3).all()
