"""What it is worth to solve towards the original's outputs: GPTQ with and without.

Quantizes a model twice, with the error of earlier layers made up for and, as plain GPTQ does,
with every layer keeping to its own output, and compares both with the original.

    python benchmarks/ablation.py MODEL_FOLDER --calibration valid.txt --text test.txt --samples 32
    python benchmarks/ablation.py ... --damping 0.01 0.1 0.3 1     # the fit's, each in turn
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import patch

from torch import Tensor

from qtool.quantize.gptq import AIM_DAMPING
from qtool.quantize.options import QuantizeOptions
from qtool.quantize.pipeline import quantize_model


def keep_weights(weights: Sequence[Tensor], *_: object) -> list[Tensor]:
    """Stands in for ``retarget``: each weight is its own aim."""
    return list(weights)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--calibration", required=True)
    parser.add_argument("--text", required=True)
    parser.add_argument("--method", default="gptq")
    parser.add_argument("--group-size", type=int, default=64)
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--windows", type=int, default=32)
    parser.add_argument("--damping", type=float, nargs="+", default=[AIM_DAMPING])
    arguments = parser.parse_args()
    options = QuantizeOptions(
        method=arguments.method,
        group_size=arguments.group_size,
        calibration=(arguments.calibration,),
        samples=arguments.samples,
        seq_len=512,
    )
    with tempfile.TemporaryDirectory() as folder:
        for damping in arguments.damping:
            out = Path(folder) / f"original, damping {damping:g}"
            with patch("qtool.quantize.gptq.AIM_DAMPING", damping):
                quantize_model(arguments.model, out, options)
            print(out.name, _quality(out, arguments), flush=True)
        plain = Path(folder) / "plain"
        with patch("qtool.quantize.block.retarget", keep_weights):
            quantize_model(arguments.model, plain, options)
        print(plain.name, _quality(plain, arguments), flush=True)


def _quality(folder: Path, arguments: argparse.Namespace) -> str:
    command = [sys.executable, "-m", "qtool", "eval", str(folder), "--json", "--quiet"]
    command += ["--reference", str(arguments.model), "--text", arguments.text]
    command += ["--windows", str(arguments.windows)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    figures = json.loads(done.stdout.splitlines()[-1])
    delta = figures["nll"] - figures["reference_nll"]
    return f"delta {delta:+.4f} KL {figures['kl']:.4f} top-1 {figures['top1_agreement']:.1%}"


if __name__ == "__main__":
    main()
