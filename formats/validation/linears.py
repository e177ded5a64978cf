"""Rules on quantized linears: are the tensors there that the config promises, and do they fit."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

import torch

from qtool.formats.validation.claim import Claim
from qtool.formats.validation.facts import Facts, Linear
from qtool.formats.validation.finding import Finding, Target
from qtool.formats.validation.layouts import (
    CACHE_PARTS,
    LAYOUTS,
    Expected,
    Shape,
    expected_tensors,
    linear_size,
)

# Linears that engines stack into one, so that they have one scheme.
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"))

AGAIN = "write the checkpoint again with the tool that made it"


def codes(facts: Facts) -> Iterator[Finding]:
    """The tensor with the codes is a matrix; everything else is judged by its shape."""
    for linear in facts.linears:
        claim = linear.claim
        if not linear.stored or claim is None:
            continue
        layout = LAYOUTS.get(claim.layout)
        if layout is None:
            rule = f"rules are there for {', '.join(LAYOUTS)}"
            yield Finding("error", linear.name, f"format {claim.layout}", rule, AGAIN)
        elif linear_size(linear.tensors, claim) is None:
            found = linear.tensors.get(layout.main)
            value = f"no {layout.main}" if found is None else _shape(layout.main, found.shape)
            rule = f"{claim.layout} has {layout.main} as a matrix"
            yield Finding("error", linear.name, value, rule, AGAIN)


def missing_tensors(facts: Facts) -> Iterator[Finding]:
    """Every tensor of the layout is there."""
    for linear, claim, _, wanted in _expected(facts):
        if wanted.needed and all(name not in linear.tensors for name in wanted.names):
            value = f"no {' or '.join(wanted.names)}"
            yield Finding("error", linear.name, value, f"{_named(claim)} has one", AGAIN)


def tensor_dtypes(facts: Facts) -> Iterator[Finding]:
    """Every tensor has a dtype that loaders copy without a change of meaning."""
    for linear, claim, _, wanted in _expected(facts):
        for name in wanted.names:
            entry = linear.tensors.get(name)
            if entry is not None and entry.dtype not in wanted.dtypes:
                allowed = " or ".join(_dtype(dtype) for dtype in wanted.dtypes)
                value = f"{name} is {_dtype(entry.dtype)}"
                yield Finding("error", linear.name, value, f"{_named(claim)}: {allowed}", AGAIN)


def tensor_shapes(facts: Facts) -> Iterator[Finding]:
    """Scales, zeros and the rest fit the codes."""
    for linear, claim, (n, k), wanted in _expected(facts):
        for name in wanted.names:
            entry = linear.tensors.get(name)
            if entry is not None and entry.shape not in wanted.shapes:
                allowed = " or ".join(str(list(shape)) for shape in wanted.shapes)
                rule = f"{_named(claim)} of {n} x {k}: {allowed}"
                yield Finding("error", linear.name, _shape(name, entry.shape), rule, AGAIN)


def weight_shapes(facts: Facts) -> Iterator[Finding]:
    """The stored shape says how many of the packed codes count."""
    for linear, _, (n, k) in facts.stored():
        entry = linear.tensors.get("weight_shape")
        if entry is None or entry.shape != (2,) or entry.dtype not in (torch.int64, torch.int32):
            continue
        stored = facts.small(f"{linear.name}.weight_shape").tolist()
        if stored != [n, k]:
            value, rule = f"weight_shape holds {stored}", f"the packed codes are {n} x {k}"
            yield Finding("error", linear.name, value, rule, AGAIN, ("transformers", "qtool"))


def unknown_tensors(facts: Facts) -> Iterator[Finding]:
    """A tensor no parameter waits for."""
    targets: tuple[Target, ...] = ("vllm", "qtool")
    for linear, claim, (n, k) in facts.stored():
        known = {name for wanted in expected_tensors(claim, n, k) for name in wanted.names}
        for name in sorted(set(linear.tensors) - known - CACHE_PARTS):
            rule = f"a linear of {_named(claim)} has no such tensor"
            yield Finding("error", linear.name, f"tensor {name}", rule, AGAIN, targets)


def config_and_tensors(facts: Facts) -> Iterator[Finding]:
    """The config and the disk agree on what is quantized."""
    strict = facts.method == "compressed-tensors"
    # Other methods leave out routers and heads without a word in the config.
    kinds = {linear.kind for linear in facts.linears if linear.stored}
    for linear in facts.linears if facts.block is not None and facts.problem is None else ():
        if linear.stored and linear.claim is None:
            value, rule = "quantized tensors", "the config leaves this linear as it was"
            yield Finding("error", linear.name, value, rule, "take it out of the ignore list")
        elif linear.claim is not None and not linear.stored and (strict or linear.kind in kinds):
            value, rule = "a plain weight", f"the config says {linear.claim.describe()}"
            yield Finding("error", linear.name, value, rule, "put its name into the ignore list")
    if facts.block is None:
        for linear in facts.linears:
            if linear.stored:
                rule = "config.json has no quantization_config that says how to read them"
                yield Finding("error", linear.name, "quantized tensors", rule, AGAIN)


def whole_groups(facts: Facts) -> Iterator[Finding]:
    """Every row is a whole number of groups."""
    for linear, claim, (_, k) in facts.stored():
        size = claim.group_size
        if size is not None and k % size:
            value, rule = f"groups of {size} in rows of {k}", "a row is a whole number of groups"
            yield Finding("error", linear.name, value, rule, "quantize with a size that divides it")


def fused_schemes(facts: Facts) -> Iterator[Finding]:
    """Engines stack these into one linear, which has one scheme."""
    for members in _fused(facts):
        claims = {linear.claim for linear in members if linear.claim is not None}
        if len(claims) > 1:
            value = ", ".join(f"{m.kind} {m.claim.describe()}" for m in members if m.claim)
            rule = "engines stack these linears into one, with one scheme"
            remedy = "give all of them the same scheme"
            yield Finding("error", _parent(members), value, rule, remedy, ("vllm", "qtool"))


def fused_ignore(facts: Facts) -> Iterator[Finding]:
    """Of stacked linears all are quantized or none. Siblings without tensors count as named."""
    for members in _fused(facts):
        parent = _parent(members)
        group = next(kinds for kinds in FUSED if members[0].kind in kinds)
        ignored = [kind for kind in group if facts.claims(f"{parent}.{kind}") is None]
        if 0 < len(ignored) < len(group):
            value = f"{', '.join(ignored)} ignored, of {', '.join(group)}"
            rule = "engines stack these linears into one, quantized or not"
            yield Finding("error", parent, value, rule, "ignore all of them or none", ("vllm",))


def fused_scales(facts: Facts) -> Iterator[Finding]:
    """One scale a tensor: vLLM takes the largest of the stacked ones and rounds again."""
    for members in _fused(facts):
        names = [f"{m.name}.weight_scale" for m in members if _one_float_scale(m)]
        scales = {facts.small(name).float().item() for name in names}
        if len(scales) > 1:
            value = f"{len(scales)} scales in {', '.join(m.kind for m in members)}"
            rule = "vLLM rounds stacked FP8 weights again to the largest of their scales"
            remedy = "quantize by channel to keep the weights as they are"
            yield Finding("warning", _parent(members), value, rule, remedy, ("vllm",))


def group_index(facts: Facts) -> Iterator[Finding]:
    """vLLM drops g_idx without a word, so only the trivial one is harmless."""
    if (facts.block or {}).get("desc_act"):
        return  # refused as such
    for linear, claim, (_, k) in facts.stored():
        entry = linear.tensors.get("g_idx") or linear.tensors.get("weight_g_idx")
        local = "g_idx" if "g_idx" in linear.tensors else "weight_g_idx"
        if entry is None or entry.shape != (k,) or entry.dtype != torch.int32:
            continue
        found = facts.small(f"{linear.name}.{local}")
        if not torch.equal(found, (torch.arange(k) // (claim.group_size or k)).int()):
            rule = "vLLM drops the tensor and takes groups as contiguous"
            remedy = "quantize with static activation order"
            yield Finding("error", linear.name, f"{local} reorders", rule, remedy, ("vllm",))


def gptq_zeros(facts: Facts) -> Iterator[Finding]:
    """A symmetric file's zeros are all one word, by its version; vLLM does not even look."""
    block = facts.block or {}
    version = block.get("checkpoint_format") or block.get("format") or "gptq"
    for linear, claim, _ in facts.stored():
        entry = linear.tensors.get("qzeros")
        known = claim.layout == "gptq" and claim.symmetric and claim.bits in (2, 4, 8)
        if not known or entry is None or entry.dtype != torch.int32:
            continue
        word = _repeated(2 ** (claim.bits - 1) - (version == "gptq"), claim.bits)
        zeros = facts.small(f"{linear.name}.qzeros")
        if not bool((zeros == word).all()):
            value = f"qzeros hold {int(zeros[zeros != word][0]) & 0xFFFFFFFF:#010x}"
            rule = f"a symmetric {version} file has {word & 0xFFFFFFFF:#010x} throughout"
            remedy = "correct sym or checkpoint_format, or quantize again"
            yield Finding("error", linear.name, value, rule, remedy)


def _repeated(code: int, bits: int) -> int:
    """The int32 word that holds one code all over."""
    word = sum(code << shift for shift in range(0, 32, bits))
    return word - 2**32 if word >= 2**31 else word


def _expected(facts: Facts) -> Iterator[tuple[Linear, Claim, tuple[int, int], Expected]]:
    for linear, claim, size in facts.stored():
        for wanted in expected_tensors(claim, *size):
            yield linear, claim, size, wanted


def _fused(facts: Facts) -> Iterator[list[Linear]]:
    """Linears that are stacked, where at least two of a group are there."""
    found: dict[tuple[str, int], list[Linear]] = defaultdict(list)
    for linear in facts.linears:
        for number, kinds in enumerate(FUSED):
            if linear.kind in kinds:
                found[linear.name.rpartition(".")[0], number].append(linear)
    yield from (members for members in found.values() if len(members) > 1)


def _one_float_scale(linear: Linear) -> bool:
    claim, entry = linear.claim, linear.tensors.get("weight_scale")
    return (
        linear.stored
        and claim is not None
        and (claim.type, claim.strategy) == ("float", "tensor")
        and entry is not None
        and entry.shape in ((), (1,))
    )


def _parent(members: Sequence[Linear]) -> str:
    return members[0].name.rpartition(".")[0]


def _named(claim: Claim) -> str:
    return f"{claim.layout} {claim.describe()}"


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _shape(name: str, shape: Iterable[int] | Shape) -> str:
    return f"{name} of shape {list(shape)}"
