"""Rules on schemes: which loader runs which widths, grids and groups."""

from __future__ import annotations

from collections.abc import Iterator

from qtool.formats.validation.claim import Claim
from qtool.formats.validation.configs import QUANTIZATION, config_groups
from qtool.formats.validation.facts import Facts
from qtool.formats.validation.finding import Finding, Target

# Widths that the fast kernels of AWQ and GPTQ files have group sizes for.
MARLIN_GROUPS = (-1, 32, 64, 128)

DEPRECATED = ("fbgemm_fp8",)

# (bits, symmetric) of GPTQ files that vLLM has a type for.
VLLM_GPTQ = ((4, True), (8, True))


def schemes(facts: Facts) -> Iterator[Finding]:
    """Which loader runs which widths and grids."""
    claims = dict.fromkeys(linear.claim for linear in facts.linears if linear.stored)
    for claim in claims:
        if claim is not None:
            yield from _scheme(facts, claim)


def _scheme(facts: Facts, claim: Claim) -> Iterator[Finding]:
    name = claim.describe()
    if claim.scheme is None:
        yield _unsupported("qtool", name, "qtool runs weights of 4 and 8 bits, and FP8")
    if facts.method == "gptq" and (claim.bits, claim.symmetric) not in VLLM_GPTQ:
        yield _unsupported("vllm", name, "vLLM runs GPTQ files of 4 and 8 bits, symmetric")
    if facts.method == "awq" and claim.bits != 4:
        yield _unsupported("vllm", name, "AWQ files have 4 bits")
    packed = claim.layout == "pack-quantized"
    if packed and claim.bits not in (2, 4, 8):
        yield Finding(
            "warning",
            QUANTIZATION,
            name,
            "the packing of 3, 5, 6 and 7 bits differs between versions of compressed-tensors",
            "use 4 or 8 bits",
            ("vllm", "transformers"),
        )
    if packed and claim.bits == 8 and not claim.symmetric:
        yield Finding(
            "warning",
            QUANTIZATION,
            name,
            "vLLM's fast kernels take zero points at 4 bits alone",
            "quantize 8 bits symmetric",
            ("vllm",),
        )
    if packed and not claim.symmetric:
        yield Finding(
            "warning",
            QUANTIZATION,
            name,
            "transformers 5 expects the zero points of compressed weights unpacked",
            "load with CompressedTensorsConfig(dequantize=True)",
            ("transformers",),
        )


def _unsupported(target: Target, scheme: str, rule: str) -> Finding:
    remedy = "quantize the original model to a scheme it runs, or convert"
    return Finding("error", QUANTIZATION, scheme, rule, remedy, (target,))


def deprecated_method(facts: Facts) -> Iterator[Finding]:
    """Methods that vLLM is about to drop."""
    if facts.method in DEPRECATED:
        yield Finding(
            "warning",
            QUANTIZATION,
            f"quant_method {facts.method}",
            "vLLM 0.32 calls it deprecated",
            "serve it with --allow-deprecated-quantization, or convert it",
            ("vllm",),
        )


def awq_keys(facts: Facts) -> Iterator[Finding]:
    """The only variant that loaders share."""
    block = facts.block or {}
    if facts.method != "awq":
        return
    version = str(block.get("version") or block.get("format") or "gemm").lower()
    if version != "gemm":
        yield Finding(
            "error",
            f"{QUANTIZATION}: version",
            version,
            "loaders share the packing gemm",
            "convert it, or quantize the original model",
        )
    if block.get("zero_point") is False:
        yield Finding(
            "warning",
            f"{QUANTIZATION}: zero_point",
            "false",
            "vLLM has no fast kernel for AWQ files without zero points",
            "write true, and zeros of 8",
            ("vllm",),
        )


def kernel_groups(facts: Facts) -> Iterator[Finding]:
    """Group sizes of the Marlin kernels."""
    sizes = {
        claim.group_size
        for linear, claim, _ in facts.stored()
        if claim.strategy == "group" and claim.layout in ("awq", "gptq", "pack-quantized")
    }
    for size in sorted(size for size in sizes if size is not None and size not in MARLIN_GROUPS):
        yield Finding(
            "warning",
            QUANTIZATION,
            f"groups of {size}",
            f"vLLM's fast kernels have groups of {', '.join(map(str, MARLIN_GROUPS[1:]))}",
            "quantize with one of these group sizes",
            ("vllm",),
        )


def gptq_version(facts: Facts) -> Iterator[Finding]:
    """Version 1 stores zero - 1 and so has no zero of 0."""
    block = facts.block or {}
    version = block.get("checkpoint_format") or block.get("format") or "gptq"
    if facts.method == "gptq" and version == "gptq" and block.get("sym") is False:
        yield Finding(
            "warning",
            f"{QUANTIZATION}: checkpoint_format",
            "gptq with sym false",
            "version 1 cannot store a zero of 0",
            "write asymmetric grids as gptq_v2",
        )


def activation_order(facts: Facts) -> Iterator[Finding]:
    """Groups that are not contiguous: vLLM and compressed-tensors 0.20 have dropped them."""
    block = facts.block or {}
    for name, group in config_groups(facts):
        order = (group.get("weights") or {}).get("actorder")
        if order in ("group", "dynamic", True):
            yield _reordered(f"{name}: actorder {order}", ("vllm", "transformers"))
    if facts.method == "gptq" and block.get("desc_act") and block.get("group_size") != -1:
        yield _reordered("desc_act true", ("vllm",))


def _reordered(value: str, targets: tuple[Target, ...]) -> Finding:
    rule, remedy = "groups are contiguous", "quantize with static activation order"
    return Finding("error", QUANTIZATION, value, rule, remedy, targets)
