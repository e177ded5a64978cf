"""Decoders without a row in :mod:`qtool.calibration.families`: their linears, found by running one.

A standard decoder is a list of blocks of one kind whose matrices are all ``nn.Linear``, each used
once for every token, under the names that the checkpoint has. What reads what is seen in a pass
over four tokens in which linears and embeddings stand aside, so it takes no weights and no memory.
Nothing tells a norm that may be scaled from one that may not: there are no smoothing pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from qtool.calibration.families import FAMILIES, ModelFamily, find_family
from qtool.calibration.meta_model import build_on_meta
from qtool.errors import ModelError
from qtool.formats.checkpoint import CheckpointReader

# Names on disk of heads that are not tied; in memory all are the first.
HEADS = ("lm_head", "embed_out")

# What every size of a run is reckoned from.
_KEYS = ("hidden_size", "num_attention_heads", "num_hidden_layers")

_TOKENS = 4


def family_of(reader: CheckpointReader) -> ModelFamily:
    """The row of a checkpoint's family, or one that is made for it.

    Raises:
        ModelError: it has none, and is no standard decoder; says what it is not.
    """
    if reader.config.get("model_type") in FAMILIES:
        return find_family(reader.config)
    if missing := [key for key in _KEYS if key not in reader.config]:
        raise _no_standard(reader.config, f"its config has no {missing[0]}")
    model = build_on_meta(reader.folder)
    path, blocks = _block_list(model, reader.config)
    _check_matrices(path, blocks, reader)
    trunk, _, _ = path.rpartition(".")
    embedding, head = _ends(model, trunk, reader)
    return ModelFamily(
        model_type=str(reader.config["model_type"]),
        blocks=path,
        linear_groups=(groups := _trace(model, trunk, blocks[0], reader.config)),
        pairs=(),
        unclipped=groups[0],
        embedding=embedding,
        head=head,
        ties_head=bool(model.config.tie_word_embeddings),  # type: ignore[union-attr]
    )


def _no_standard(config: Mapping[str, Any], reason: str) -> ModelError:
    return ModelError(
        f"model_type={config.get('model_type')!r}: {reason}, so it is no standard decoder; "
        f"supported are these, and {', '.join(sorted(FAMILIES))}"
    )


def _block_list(model: nn.Module, config: Mapping[str, Any]) -> tuple[str, list[nn.Module]]:
    count = config["num_hidden_layers"]
    found = [
        (name, list(module.children()))
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == count and _linears(module)
    ]
    if len(found) != 1:
        raise _no_standard(config, f"it has {len(found)} lists of {count} blocks with linears")
    path, blocks = found[0]
    first = _linears(blocks[0])
    for index, block in enumerate(blocks):
        if _linears(block) != first:
            raise _no_standard(config, f"{path}.{index} has other linears than {path}.0")
    return path, blocks


def _linears(module: nn.Module) -> list[str]:
    return [name for name, child in module.named_modules() if type(child) is nn.Linear]


def _check_matrices(path: str, blocks: list[nn.Module], reader: CheckpointReader) -> None:
    """All matrices are those of linears, and the checkpoint has them under the same names."""
    linears = set(_linears(blocks[0]))
    for name, parameter in blocks[0].named_parameters():
        if parameter.ndim > 1 and name.rpartition(".")[0] not in linears:
            raise _no_standard(reader.config, f"{path}.0.{name} is a matrix of no linear")
    for index, block in enumerate(blocks):
        for name in block.state_dict():
            if f"{path}.{index}.{name}" not in reader:
                raise _no_standard(
                    reader.config,
                    f"the checkpoint has no {path}.{index}.{name}, as transformers has",
                )


def _ends(model: nn.Module, trunk: str, reader: CheckpointReader) -> tuple[str, str]:
    """Names of the embedding beside the blocks and, on disk, of the head."""
    head, table = model.get_output_embeddings(), model.get_input_embeddings()  # type: ignore[operator]
    names: dict[nn.Module | None, str] = {m: name for name, m in model.named_modules()}
    parent, _, name = names[table].rpartition(".")
    tied = bool(model.config.tie_word_embeddings)  # type: ignore[union-attr]
    found = [HEADS[0]] if tied else [h for h in HEADS if f"{h}.weight" in reader]
    missing = [] if found else [f"{HEADS[0]}.weight"]
    missing += [] if f"{names[table]}.weight" in reader else [f"{names[table]}.weight"]
    if missing or parent != trunk or head is None:
        reason = f"the checkpoint has no {missing[0] if missing else HEADS[0]}, as transformers has"
    elif tied and head.bias is not None:
        reason = "its head is its embedding and has a bias"
    else:
        return name, found[0]
    raise _no_standard(reader.config, reason)


def _trace(
    model: nn.Module, trunk: str, block: nn.Module, config: Mapping[str, Any]
) -> tuple[tuple[str, ...], ...]:
    """The block's linears in the order in which they run; those of one input are a group."""
    calls: list[tuple[nn.Module, Tensor]] = []  # inputs are kept, so that each is itself alone
    _stand_aside(model, calls)
    ids = torch.zeros(1, _TOKENS, dtype=torch.int64)
    try:
        with torch.no_grad():
            model.get_submodule(trunk)(input_ids=ids, use_cache=False)
    except Exception as error:  # whatever the code of a family raises without its weights
        raise _no_standard(config, f"its blocks use weights by other ways ({error})") from error
    names = {module: name for name, module in block.named_modules()}
    groups: dict[int, list[str]] = {}
    for module, x in calls:
        if module in names:
            groups.setdefault(id(x), []).append(names[module])
    found = [name for group in groups.values() for name in group]
    for name in _linears(block):
        if found.count(name) != 1:
            raise _no_standard(config, f"{name} runs {found.count(name)} times a token")
    return tuple(map(tuple, groups.values()))


def _stand_aside(model: nn.Module, calls: list[tuple[nn.Module, Tensor]]) -> None:
    """Let linears and embeddings put out zeros and note their calls; vectors become ones."""
    for module in list(model.modules()):
        forward = _stand_in(module, calls)
        if forward is not None:
            module.forward = forward
            continue
        for name, parameter in module.named_parameters(recurse=False):
            ones = torch.ones(parameter.shape)
            module.register_parameter(name, nn.Parameter(ones, requires_grad=False))


def _stand_in(
    module: nn.Module, calls: list[tuple[nn.Module, Tensor]]
) -> Callable[..., Tensor] | None:
    """Zeros of the shape that a linear or an embedding puts out; ``None`` for others."""
    if isinstance(module, nn.Embedding):
        rows = torch.zeros(1, _TOKENS, module.embedding_dim)
        return lambda *_, **__: rows.clone()
    if not isinstance(module, nn.Linear):
        return None
    width = module.out_features

    def forward(x: Tensor) -> Tensor:
        calls.append((module, x))
        return x.new_zeros(*x.shape[:-1], width)

    return forward
