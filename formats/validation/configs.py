"""Rules on config.json: the keys that loaders take."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from qtool.formats.reader import CONFIG_NAME
from qtool.formats.validation.facts import Facts
from qtool.formats.validation.finding import Finding

QUANTIZATION = f"{CONFIG_NAME}: quantization_config"

# compressed-tensors' classes forbid all others.
ARGS = ("weights", "input_activations", "output_activations")
GROUP_KEYS = frozenset(("targets", "format", *ARGS))
ARGS_KEYS = frozenset(
    ("num_bits", "type", "symmetric", "strategy", "group_size", "block_structure", "dynamic")
    + ("actorder", "observer", "observer_kwargs", "scale_dtype", "zp_dtype")
)

# Keys without which vLLM's config classes raise; alternatives in one tuple.
REQUIRED: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "compressed-tensors": (("format",), ("config_groups",)),
    "awq": (("bits", "w_bit"), ("group_size", "q_group_size"), ("zero_point",)),
    "gptq": (("bits",), ("group_size",), ("desc_act",), ("sym",)),
    "fp8": (("activation_scheme",),),
    "fbgemm_fp8": (("activation_scale_ub",),),
    "modelopt": (),
}


def architecture(facts: Facts) -> Iterator[Finding]:
    """Who the model is; vLLM guesses the class from the type, for models transformers knows."""
    rule, remedy = "loaders choose the model's class by it", "copy it from the original model"
    kind, classes = facts.config.get("model_type"), facts.config.get("architectures")
    if not isinstance(kind, str) or not kind:
        yield Finding("error", f"{CONFIG_NAME}: model_type", repr(kind), rule, remedy)
    if not isinstance(classes, list) or not classes:
        where = f"{CONFIG_NAME}: architectures"
        yield Finding("warning", where, repr(classes), rule, remedy, ("vllm",))


def dtype(facts: Facts) -> Iterator[Finding]:
    """What everything that is not quantized is computed in."""
    keys = ("dtype", "torch_dtype")
    found = {key: facts.decoder[key] for key in keys if facts.decoder.get(key) is not None}
    found = found or {key: facts.config[key] for key in keys if facts.config.get(key) is not None}
    known = ("float16", "bfloat16", "float32")
    if not found:
        yield Finding(
            "warning",
            f"{CONFIG_NAME}: dtype",
            "missing",
            "loaders choose the compute dtype by it",
            f"name one of {', '.join(known)}",
        )
    for key, value in found.items():
        if str(value).removeprefix("torch.") not in known:
            yield Finding(
                "error",
                f"{CONFIG_NAME}: {key}",
                repr(value),
                "transformers computes in a float dtype",
                f"name one of {', '.join(known)}",
                ("transformers",),
            )
    if len({str(value).removeprefix("torch.") for value in found.values()}) > 1:
        yield Finding(
            "warning",
            f"{CONFIG_NAME}: dtype",
            f"{found['dtype']}, and torch_dtype {found['torch_dtype']}",
            "old and new loaders read different keys",
            "write the same value into both",
        )


def readable_config(facts: Facts) -> Iterator[Finding]:
    """The config says what every linear is."""
    if facts.problem is not None:
        yield Finding(
            "error",
            QUANTIZATION,
            facts.problem,
            "the config says how every linear is stored",
            "write it again with the tool that made the checkpoint",
        )


def place_of_config(facts: Facts) -> Iterator[Finding]:
    """Files of older tools are read by some loaders only; vLLM looks for ModelOpt's unasked."""
    if facts.block is not None and facts.block_file != CONFIG_NAME:
        yield Finding(
            "error",
            facts.block_file,
            f"{CONFIG_NAME} has no quantization_config",
            "loaders look for the quantization there",
            "copy the values there, with quant_method",
            ("transformers",) if facts.method == "modelopt" else ("vllm", "transformers"),
        )
    if facts.method == "modelopt":
        yield Finding(
            "error",
            QUANTIZATION,
            "quant_method modelopt",
            "transformers has no loader for it and takes the codes as weights",
            "load it with vLLM or qtool, or convert it",
            ("transformers",),
        )


def required_keys(facts: Facts) -> Iterator[Finding]:
    """Keys that are read without a default."""
    block = facts.block or {}
    values = block.get("quantization") if isinstance(block.get("quantization"), dict) else block
    for names in REQUIRED.get(str(facts.method), ()):
        if all(name not in (values or {}) for name in names):
            yield Finding(
                "error",
                QUANTIZATION,
                f"no {' or '.join(names)}",
                f"vLLM reads it from every {facts.method} config",
                "add the key",
                ("vllm",),
            )


def unknown_keys(facts: Facts) -> Iterator[Finding]:
    """compressed-tensors' classes, which vLLM and transformers use, forbid extra keys."""
    for name, group in config_groups(facts):
        extra = set(group) - GROUP_KEYS
        for part in ARGS:
            extra |= set(group.get(part) or ()) - ARGS_KEYS
        for key in sorted(extra):
            yield Finding(
                "error",
                f"{QUANTIZATION}: {name}",
                f"unknown key {key}",
                "the classes of compressed-tensors forbid keys they do not know",
                "delete the key",
                ("vllm", "transformers"),
            )


def status(facts: Facts) -> Iterator[Finding]:
    """transformers decides by it whether tensors are packed."""
    found = (facts.block or {}).get("quantization_status")
    if facts.method == "compressed-tensors" and found != "compressed":
        yield Finding(
            "error",
            f"{QUANTIZATION}: quantization_status",
            repr(found),
            "transformers unpacks a checkpoint only with the status compressed",
            'write "compressed"',
            ("transformers",),
        )


def patterns(facts: Facts) -> Iterator[Finding]:
    """Names of modules that mean none are a mistake in most cases."""
    if facts.method != "compressed-tensors":
        return
    modules: set[str] = set()
    for name in facts.reader.entries:
        while (name := name.rpartition(".")[0]) and name not in modules:
            modules.add(name)
    names = (facts.block or {}).get("ignore")
    for pattern in names if isinstance(names, list) else ():
        # A tied head is no tensor, and must be ignored all the same.
        literal = isinstance(pattern, str) and not pattern.startswith("re:") and "." in pattern
        if literal and pattern not in modules:
            yield Finding(
                "warning",
                f"{QUANTIZATION}: ignore",
                repr(pattern),
                "a name means a module of the checkpoint",
                "correct it, or take it out",
            )


def config_groups(facts: Facts) -> list[tuple[str, dict[str, Any]]]:
    """Groups of a compressed-tensors config, as far as they are what they should be."""
    groups = (facts.block or {}).get("config_groups")
    if facts.method != "compressed-tensors" or not isinstance(groups, dict):
        return []
    return [
        (name, group)
        for name, group in groups.items()
        if isinstance(group, dict)
        and all(isinstance(group.get(part), dict | None) for part in ARGS)
    ]
