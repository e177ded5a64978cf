"""A transformers model without its weights, whose parts are given theirs and give them back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from qtool.calibration.experts import use_hub_names
from qtool.calibration.families import FAMILIES
from qtool.calibration.weights import read_weight
from qtool.errors import CheckpointError, ModelError
from qtool.formats.checkpoint import CheckpointReader

# Of what transformers says it is the beginning that matters; it may list all its models.
REASON_WIDTH = 300


class _EmptyOnMeta(TorchFunctionMode):
    """``torch.empty`` allocates on meta: parameters take no memory, computed buffers are real.

    A plain ``torch.device("meta")`` would also lose the rotary tables, which no checkpoint holds.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.empty:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


def build_on_meta(folder: Path) -> nn.Module:
    """The transformers model of a folder: parameters on meta, buffers real, float32, for inference.

    Raises:
        ModelError: the config is not one transformers can build.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        with _EmptyOnMeta():
            model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    except (OSError, ValueError, TypeError, KeyError, StrictDataclassError) as error:
        reason = shorten(str(error), REASON_WIDTH)
        raise ModelError(f"{folder}: transformers cannot build this model ({reason})") from None
    if family := FAMILIES.get(config.model_type):
        use_hub_names(model, family)
    release_weights(model)
    return model.eval().requires_grad_(False)


def load_weights(
    module: nn.Module, prefix: str, reader: CheckpointReader, device: torch.device
) -> None:
    """Read a module's parameters and persistent buffers from the checkpoint, in float32.

    Raises:
        CheckpointError: one is missing, or has another shape than the config says.
        QuantizationError: one holds NaN or infinity.
    """
    weights = {}
    for name, wanted in module.state_dict().items():
        weights[name] = read_weight(reader, f"{prefix}.{name}", device)
        if weights[name].shape != wanted.shape:
            raise CheckpointError(
                f"{prefix}.{name} has shape {list(weights[name].shape)}, and by config.json it has "
                f"{list(wanted.shape)}: they are of different models; copy both again"
            )
    reader.close()  # a memory map counts as memory as far as it was read
    module.load_state_dict(weights, assign=True)


def release_weights(module: nn.Module) -> None:
    """Give the memory of all parameters back."""
    weights = {name: tensor.to("meta") for name, tensor in module.state_dict().items()}
    module.load_state_dict(weights, assign=True)
