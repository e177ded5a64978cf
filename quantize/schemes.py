"""How schemes are asked for: words of the command line -> schemes, before any shape is known.

w4, w8        integer weights alone; -sym or -asym, and -g64 (any size), -row or -auto may follow
w8a8          INT8 weights and inputs; -dynamic (default) or -static inputs
fp8           FP8 weights and inputs; -tensor (static), -channel (default) or -block;
              -weights leaves the inputs in 16 bits
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from qtool.errors import UsageError
from qtool.formats.scheme import Strategy, WeightScheme, fp8_scheme, w8a8_scheme

Value = TypeVar("Value")
Default = TypeVar("Default")

GroupSize = int | Literal["auto", "row"]

AUTO: GroupSize = "auto"
GRANULARITIES: tuple[Strategy, ...] = ("tensor", "channel", "block")
FORMS = "w4, w8 (-sym, -asym, -g64, -row), w8a8 (-static), fp8 (-tensor, -block, -weights)"


@dataclass(frozen=True, slots=True)
class IntegerWeights:
    """Weight-only quantization whose group size may wait for the shapes.

    ``symmetric`` ``None`` is asymmetric at 4 bits and symmetric at 8, where fast kernels of other
    engines take no zero points.
    """

    bits: int = 4
    symmetric: bool | None = None
    group_size: GroupSize = AUTO

    @property
    def grid_is_symmetric(self) -> bool:
        """``symmetric`` with its default filled in."""
        return self.bits == 8 if self.symmetric is None else self.symmetric


SchemeAsked = IntegerWeights | WeightScheme


@dataclass(frozen=True, slots=True)
class Override:
    """Another scheme for the linears that a pattern means."""

    pattern: str
    scheme: SchemeAsked


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemesAsked:
    """What a run asks for, linear by linear.

    Attributes:
        default: scheme of every linear of the blocks that nothing else is said of; ``None`` leaves
            all weights as they are.
        overrides: others by pattern; of two that mean the same linear, the later one holds.
        ignore: patterns of linears left as they are.
        skip_first, skip_last: blocks at either end left as they are.
        head: scheme of ``lm_head``, which is left as it is otherwise.
    """

    default: SchemeAsked | None
    overrides: tuple[Override, ...] = ()
    ignore: tuple[str, ...] = ()
    skip_first: int = 0
    skip_last: int = 0
    head: IntegerWeights | None = None

    @property
    def has_static_inputs(self) -> bool:
        """Whether some scheme needs calibration for the scale of its input."""
        asked = (self.default, *(override.scheme for override in self.overrides))
        return any(isinstance(s, WeightScheme) and s.has_input_scale for s in asked)


def parse_override(text: str) -> Override:
    """``PATTERN=SCHEME``.

    Raises:
        UsageError: no such form.
    """
    pattern, equals, words = text.rpartition("=")
    if not equals or not pattern or not words:
        raise UsageError(f"layer={text!r}: write PATTERN=SCHEME, such as down_proj=w8")
    try:
        return Override(pattern, parse_scheme(words))
    except UsageError as error:
        raise UsageError(f"layer={text!r}: {error}") from None


def parse_scheme(text: str) -> SchemeAsked:
    """A scheme in the words of this module.

    Raises:
        UsageError: no such words, or words that contradict each other.
    """
    name, *words = text.lower().split("-")
    if name in ("w4", "w8"):
        symmetric = _one(text, words, {"sym": True, "asym": False}, None)
        group: GroupSize = _one(text, words, _group_words(words), AUTO)
        scheme: SchemeAsked = IntegerWeights(int(name[1:]), symmetric, group)
    elif name == "w8a8":
        scheme = w8a8_scheme(static=_one(text, words, {"static": True, "dynamic": False}, False))
    elif name == "fp8":
        weight_only = _one(text, words, {"weights": True}, False)
        granularity = _one(text, words, {word: word for word in GRANULARITIES}, GRANULARITIES[1])
        scheme = fp8_scheme(granularity, weight_only=weight_only)
    else:
        raise UsageError(f"{text!r} is no scheme; known are {FORMS}")
    if words:
        raise UsageError(f"{text!r}: {words[0]!r} has no meaning there; known are {FORMS}")
    return scheme


def _group_words(words: Sequence[str]) -> dict[str, GroupSize]:
    sizes: dict[str, GroupSize] = {"row": "row", "auto": "auto"}
    return sizes | {w: int(w[1:]) for w in words if re.fullmatch(r"g[1-9][0-9]*", w)}


def _one(
    text: str, words: list[str], meanings: Mapping[str, Value], default: Default
) -> Value | Default:
    """The meaning of the one word there is of a kind, which is taken out of ``words``."""
    found = [word for word in words if word in meanings]
    if len(found) > 1:
        raise UsageError(f"{text!r}: {found[0]} and {found[1]} contradict each other; keep one")
    if not found:
        return default
    words.remove(found[0])
    return meanings[found[0]]
