"""What a ``quantization_config`` says of each linear, for every method with rules of ours.

A claim is only what the config says. Whether the disk holds it is asked elsewhere.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from qtool.errors import CheckpointError, UsageError
from qtool.formats.patterns import LINEAR, regex_problem, target_matches
from qtool.formats.scheme import BLOCK_SIZE, ActivationScheme, WeightScheme
from qtool.formats.validation.claim import Claim

# What a config says of the linear of a full name; ``None``: it stays as it is.
Claims = Callable[[str], Claim | None]


def claims_of(block: Mapping[str, Any]) -> Claims:
    """Understand a quantization config.

    Raises:
        CheckpointError: a method without rules, or values that mean nothing.
    """
    method = block.get("quant_method")
    if not isinstance(method, str) or method not in _METHODS:
        raise CheckpointError(f"quant_method {method!r}; known are {', '.join(_METHODS)}")
    try:
        return _METHODS[method](block)
    except (LookupError, TypeError, ValueError, AttributeError, re.error) as error:
        raise CheckpointError(f"{method}: {type(error).__name__} {error}") from None


def _claim(
    layout: str,
    bits: int,
    type: str,
    symmetric: bool,
    strategy: str,
    group_size: int | None = None,
    activations: ActivationScheme | None = None,
    block: Sequence[int] | None = None,
    **more: Any,
) -> Claim:
    edges = (int(block[0]), int(block[1])) if block else (BLOCK_SIZE, BLOCK_SIZE)
    size = group_size if strategy == "group" else None
    values: dict[str, Any] = {
        "bits": 4 if bits == 2 else bits,  # codes of 2 bits are read as codes of 4
        "symmetric": symmetric,
        "strategy": strategy,
        "group_size": size,
        "type": type,
        "activations": activations,
    }
    try:
        scheme: WeightScheme | None = WeightScheme(**values)
    except UsageError:
        scheme = None
    if strategy == "block" and edges != (BLOCK_SIZE, BLOCK_SIZE):
        scheme = None
    return Claim(layout, bits, type, symmetric, strategy, size, edges, scheme=scheme, **more)


def _compressed_tensors(block: Mapping[str, Any]) -> Claims:
    ignore = _strings(block.get("ignore"))
    groups: list[tuple[tuple[str, ...], Claim]] = []
    for group in dict(block["config_groups"]).values():
        if group.get("weights") is None:
            continue  # a group of attention or activations alone
        layout = group.get("format") or block["format"]
        groups.append((_strings(group["targets"]), _compressed_claim(group, layout)))

    ignored = _matcher(ignore)
    exact = [(_matcher(t for t in targets if t != LINEAR), claim) for targets, claim in groups]
    by_class = next((claim for targets, claim in groups if LINEAR in targets), None)

    def claims(module: str) -> Claim | None:
        if ignored(module):
            return None
        return next((claim for matches, claim in exact if matches(module)), by_class)

    for pattern in (*ignore, *(target for targets, _ in groups for target in targets)):
        if problem := regex_problem(pattern):
            raise ValueError(f"{pattern!r} is no regular expression ({problem})")
    return claims


def _matcher(targets: Iterable[str]) -> Callable[[str], bool]:
    """:func:`target_matches` for any of many: full names, of which a list may have thousands, by
    look-up."""
    names = frozenset(targets)
    patterns = [target for target in names if target.startswith("re:") or target == LINEAR]
    return lambda module: module in names or any(target_matches(t, module) for t in patterns)


def _compressed_claim(group: Mapping[str, Any], layout: str) -> Claim:
    weights, inputs = group["weights"], group.get("input_activations")
    static = inputs is not None and not inputs.get("dynamic", False)
    return _claim(
        layout,
        int(weights.get("num_bits", 8)),
        weights.get("type", "int"),
        bool(weights.get("symmetric", True)),
        weights.get("strategy") or ("group" if weights.get("group_size") else "tensor"),
        weights.get("group_size"),
        _activations(inputs),
        weights.get("block_structure"),
        static_input=static,
    )


def _activations(inputs: Mapping[str, Any] | None) -> ActivationScheme | None:
    if inputs is None:
        return None
    try:
        return ActivationScheme(inputs.get("type", "int"), inputs.get("strategy") or "tensor")
    except UsageError as error:
        raise ValueError(str(error)) from None


def _awq(block: Mapping[str, Any]) -> Claims:
    skipped = _strings(block.get("modules_to_not_convert"))
    bits, size = _first(block, "bits", "w_bit"), _first(block, "group_size", "q_group_size")
    # A symmetric file is one whose zeros are all 8: the format has no other sign of it.
    claim = _claim("awq", int(bits), "int", False, *_grouped(int(size)))

    def claims(module: str) -> Claim | None:
        head = module.endswith("lm_head") and not block.get("lm_head", False)
        return None if head or any(part in module for part in skipped) else claim

    return claims


def _gptq(block: Mapping[str, Any]) -> Claims:
    inside = [re.escape(name) for name in _flat(block.get("modules_in_block_to_quantize"))]
    only = re.compile("|".join(rf".*\.{name}$" for name in inside)) if inside else None
    dynamic = dict(block.get("dynamic") or {})
    for pattern in dynamic:
        re.compile(pattern.removeprefix("-:").removeprefix("+:"))

    def one(values: Mapping[str, Any]) -> Claim:
        grid = _grouped(int(values["group_size"]))
        return _claim("gptq", int(values["bits"]), "int", bool(values["sym"]), *grid)

    base = one(block)

    def claims(module: str) -> Claim | None:
        head = module.endswith("lm_head") and not block.get("lm_head", False)
        if head or (only is not None and not only.match(module)):
            return None
        for pattern, values in dynamic.items():
            if re.match(pattern.removeprefix("-:").removeprefix("+:"), module):
                return None if pattern.startswith("-:") else one({**block, **(values or {})})
        return base

    return claims


def _fp8(block: Mapping[str, Any]) -> Claims:
    edges = block.get("weight_block_size")
    static = block.get("activation_scheme") == "static"
    inputs = "group" if edges else "tensor" if static else "token"
    claim = _claim(
        "fp8-block" if edges else "fp8-tensor",
        8,
        "float",
        True,
        "block" if edges else "tensor",
        activations=ActivationScheme("float", inputs),  # type: ignore[arg-type]
        block=edges,
        static_input=static,
    )
    skipped = block.get("ignored_layers") or block.get("modules_to_not_convert")
    return _unless_named(_strings(skipped), claim)


def _fbgemm(block: Mapping[str, Any]) -> Claims:
    inputs = ActivationScheme("float", "token")
    claim = _claim("fbgemm", 8, "float", True, "channel", activations=inputs)
    return _unless_named(_strings(block.get("modules_to_not_convert")), claim)


def _modelopt(block: Mapping[str, Any]) -> Claims:
    values = block.get("quantization") or block
    algorithm = values["quant_algo"]
    if algorithm != "FP8":
        raise ValueError(f"quant_algo {algorithm!r}; rules are there for FP8")
    inputs = ActivationScheme("float", "tensor")
    claim = _claim("modelopt", 8, "float", True, "tensor", activations=inputs, static_input=True)
    skipped = _strings(values.get("exclude_modules") or values.get("ignore"))

    def claims(module: str) -> Claim | None:
        return None if any(fnmatchcase(module, p) or p in module for p in skipped) else claim

    return claims


def _unless_named(skipped: Iterable[str], claim: Claim) -> Claims:
    """The claim for every module but those named in full, by their end, or by a parent."""
    names = tuple(skipped)

    def claims(module: str) -> Claim | None:
        around = f".{module}."
        return None if any(f".{name}." in around for name in names) else claim

    return claims


def _grouped(size: int) -> tuple[str, int | None]:
    """Strategy and group size; -1 is one group a row."""
    return ("channel", None) if size == -1 else ("group", size)


def _first(block: Mapping[str, Any], *keys: str) -> Any:
    found = [block[key] for key in keys if block.get(key) is not None]
    if not found:
        raise KeyError(keys[0])
    return found[0]


def _strings(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
        raise TypeError(f"{value!r} is no list of names")
    return tuple(value)


def _flat(value: Any) -> tuple[str, ...]:
    """Names of a list, or of a list of lists."""
    items = [item if isinstance(item, list) else [item] for item in value or ()]
    return _strings([name for item in items for name in item])


_METHODS: Mapping[str, Callable[[Mapping[str, Any]], Claims]] = {
    "compressed-tensors": _compressed_tensors,
    "awq": _awq,
    "gptq": _gptq,
    "fp8": _fp8,
    "fbgemm_fp8": _fbgemm,
    "modelopt": _modelopt,
}
