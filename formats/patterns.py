"""Which modules a pattern means: the one matcher of the quantizer, of checkpoints and the runtime.

Checkpoints of any tool use compressed-tensors' targets: the class name ``Linear``, a full module
name, or ``re:`` and a regular expression that matches from the name's start. What a user writes
to ``qtool quantize`` is wider: whole dotted parts anywhere in the name, so that ``layers.0``
means ``model.layers.0.mlp.up_proj`` and not ``model.layers.01``; or the same ``re:``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from difflib import get_close_matches

from qtool.errors import QuantizationError, UsageError

LINEAR = "Linear"

_REGEX = "re:"


def regex_problem(pattern: str) -> str | None:
    """What is wrong with a ``re:`` pattern; ``None`` if nothing is, or it is of another kind."""
    if pattern.startswith(_REGEX):
        try:
            re.compile(pattern.removeprefix(_REGEX))
        except re.error as error:
            return str(error)
    return None


def target_matches(target: str, module: str) -> bool:
    """Whether a target of a checkpoint means the linear ``module`` (full name)."""
    return target in (LINEAR, module) or _regex_matches(target, module)


def pattern_matches(pattern: str, module: str) -> bool:
    """Whether a user's pattern means ``module`` (full name)."""
    return f".{pattern}." in f".{module}." or _regex_matches(pattern, module)


def _regex_matches(pattern: str, module: str) -> bool:
    if not pattern.startswith(_REGEX):
        return False
    return re.match(pattern.removeprefix(_REGEX), module) is not None


def select(
    patterns: Iterable[str], modules: Sequence[str], option: str = "ignore"
) -> frozenset[str]:
    """The modules that any of a user's patterns means; ``option`` brought them, for messages.

    Raises:
        UsageError: a pattern is empty or no regular expression.
        QuantizationError: a pattern means no module; names near it are listed.
    """
    selected: set[str] = set()
    for pattern in patterns:
        if problem := regex_problem(pattern):
            raise UsageError(
                f"{option}={pattern!r}: is no regular expression ({problem}); repair it"
            )
        found = {module for module in modules if pattern and pattern_matches(pattern, module)}
        if not found:
            raise _means_nothing(pattern, modules, option)
        selected |= found
    return frozenset(selected)


def _means_nothing(pattern: str, modules: Sequence[str], option: str) -> QuantizationError:
    parts = [module.split(".") for module in modules]
    # Every pattern that would mean something.
    runs = {
        ".".join(p[i:j]) for p in parts for i in range(len(p)) for j in range(i + 1, len(p) + 1)
    }
    near = get_close_matches(pattern.removeprefix(_REGEX), sorted(runs), n=5, cutoff=0.5)
    listed = f"near are {', '.join(near)}" if near else f"one is {modules[0]}"
    return QuantizationError(
        f"{option}={pattern!r}: means none of the model's {len(modules)} linears; a pattern is "
        "whole dotted parts of a name, or re: and a regular expression that matches from its "
        f"start: {listed}"
    )
