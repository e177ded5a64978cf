"""One table of formats: what a folder says about itself, and what is no format of ours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from qtool.commands.cli_options import FORMAT_NAMES
from qtool.errors import CheckpointError, UsageError
from qtool.formats.checkpoint import CheckpointReader
from qtool.formats.dequantized import DequantizedReader
from qtool.formats.kv_scales import static_scheme
from qtool.formats.registry import (
    READERS,
    WRITERS,
    quantization_block,
    quantizes_weights,
    stored_linears,
    writer_of,
)
from qtool.formats.scheme import fp8_scheme, weight_scheme
from support.foreign import awq_tensors, gptq_tensors, random_grid
from support.peers import FIXTURES


def _folder(
    path: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor] | None = None
) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    save_file(tensors or {"x": torch.zeros(1)}, path / "model.safetensors")
    return path


def test_the_command_line_knows_every_format_that_is_written() -> None:
    assert tuple(WRITERS) == FORMAT_NAMES
    assert set(WRITERS) < set(READERS)
    with pytest.raises(UsageError, match="format='gguf': choose one of compressed-tensors, awq"):
        writer_of("gguf")


@pytest.mark.parametrize(
    ("name", "content", "tensors"),
    [
        (
            "quant_config.json",
            {"w_bit": 4, "q_group_size": 8, "zero_point": True, "version": "GEMM"},
            awq_tensors(random_grid(4, 16, 8, 8)),
        ),
        (
            "quantize_config.json",
            {"bits": 4, "group_size": 8, "desc_act": False, "sym": False},
            gptq_tensors(random_grid(4, 16, 8, 8), 1),
        ),
        (
            "hf_quant_config.json",
            {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}},
            {
                "weight": torch.ones(16, 8).to(torch.float8_e4m3fn),
                "weight_scale": torch.tensor(0.5),
                "input_scale": torch.tensor(1.0),
            },
        ),
    ],
)
def test_old_exports_say_what_they_are_in_a_file_of_their_own(
    name: str, content: dict[str, Any], tensors: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    named = {f"model.a.{local}": tensor for local, tensor in tensors.items()}
    folder = _folder(tmp_path / "model", {}, named)
    (folder / name).write_text(json.dumps(content))
    with DequantizedReader(folder) as reader:
        assert reader.linears.modules() == ["model.a"]
        assert "model.a.weight" in reader
        assert reader.get("model.a.weight").ndim == 2


def test_a_plain_folder_has_no_quantized_linears(tmp_path: Path) -> None:
    folder = _folder(tmp_path / "model", {"model_type": "llama"})
    with CheckpointReader(folder) as reader:
        assert stored_linears(reader) is None
        assert quantization_block(folder, reader.config) is None
        assert not quantizes_weights(folder, reader.config)
    with pytest.raises(CheckpointError, match="is not quantized; read it as it is"):
        DequantizedReader(folder)


def test_scales_of_the_cache_are_no_quantized_weights(tmp_path: Path) -> None:
    block = {
        "quant_method": "compressed-tensors",
        "format": "dense",
        "config_groups": {},
        "kv_cache_scheme": static_scheme(per_head=False),
    }
    folder = _folder(tmp_path / "model", {"quantization_config": block})
    with CheckpointReader(folder) as reader:
        linears = stored_linears(reader)
        assert linears is not None and linears.modules() == []
        assert not quantizes_weights(folder, reader.config)
    for changes in ({"config_groups": {"group_0": {}}}, {"quant_method": "gptq"}):
        assert quantizes_weights(folder, {"quantization_config": block | changes})


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ({"quant_method": "bitsandbytes"}, "quantization 'bitsandbytes'; this version reads"),
        ({"bits": 4}, "quantization 'None'"),
        ("awq", "quantization_config is 'awq'; it is a JSON object"),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "pack-quantized",
                "config_groups": [1],
            },
            "is damaged",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "pack-quantized",
                "config_groups": {"g": {"targets": 3, "weights": "x"}},
            },
            "is damaged",
        ),
        ({"quant_method": "fp8", "weight_block_size": 128}, "is damaged"),
    ],
)
def test_what_is_no_format_of_ours_is_refused_by_name(
    block: Any, message: str, tmp_path: Path
) -> None:
    folder = _folder(tmp_path / "model", {"quantization_config": block})
    with CheckpointReader(folder) as reader, pytest.raises(CheckpointError, match=message):
        stored_linears(reader)


def test_linears_of_a_checkpoint_are_listed_without_reading_it() -> None:
    with CheckpointReader(FIXTURES / "gptq-v2-asym") as reader:
        linears = stored_linears(reader)
        assert linears is not None
        names = linears.modules()
        assert len(names) == 14 and "model.layers.1.mlp.down_proj" in names
        assert linears.parts(names[0]) == {
            local: f"{names[0]}.{local}" for local in ("qweight", "qzeros", "scales", "g_idx")
        }
        assert not linears.is_quantized("lm_head") and not linears.notes()


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group_size", [64, None])
@pytest.mark.parametrize("format", ["awq", "gptq"])
def test_transformers_understands_our_configs(
    format: str, group_size: int | None, symmetric: bool
) -> None:
    from transformers.quantizers.auto import AutoQuantizationConfig

    schemes = {"model.layers.0.mlp.up_proj": weight_scheme(4, symmetric, group_size)}
    block = WRITERS[format].quantization_config(schemes, ["lm_head"])
    parsed = AutoQuantizationConfig.from_dict(block)
    assert (parsed.quant_method, parsed.bits) == (format, 4)
    assert parsed.group_size == (group_size or -1)
    if format == "gptq":
        assert (parsed.sym, parsed.format) == (symmetric, "gptq" if symmetric else "gptq_v2")
    else:
        assert (parsed.zero_point, parsed.format) == (True, "gemm")


def test_transformers_understands_our_config_of_fp8_blocks() -> None:
    from transformers.quantizers.auto import AutoQuantizationConfig

    schemes = {"model.layers.0.mlp.up_proj": fp8_scheme("block")}
    block = WRITERS["fp8"].quantization_config(schemes, ["lm_head"])
    parsed = AutoQuantizationConfig.from_dict(block)
    assert list(parsed.weight_block_size) == [128, 128]
    assert (parsed.activation_scheme, parsed.modules_to_not_convert) == ("dynamic", ["lm_head"])
