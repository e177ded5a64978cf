"""The copy of a model that is moved off its grid computes what the original does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

ROOT = Path(__file__).resolve().parents[2]


def test_a_moved_model_has_other_weights_and_the_same_logits(
    tiny_model_folder: Path, tmp_path: Path
) -> None:
    moved = tmp_path / "moved"
    script = ROOT / "benchmarks" / "off_grid.py"
    subprocess.run([sys.executable, str(script), str(tiny_model_folder), str(moved)], check=True)
    before = load_file(tiny_model_folder / "model.safetensors")
    after = load_file(moved / "model.safetensors")
    for name, tensor in before.items():
        changed = "layers" in name  # embedding, head and the last norm have no partner
        assert torch.equal(tensor, after[name]) != changed, name
    ids = torch.randint(4, 384, (2, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected, found = (
            AutoModelForCausalLM.from_pretrained(folder)(ids).logits
            for folder in (tiny_model_folder, moved)
        )
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
