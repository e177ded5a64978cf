"""What Triton would compile: the forms of kernels that are launched, without running them."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction

Form = tuple[object, ...]


def _kind(value: object, *, specialized: bool) -> object:
    """What of an argument is compiled in: Triton's rules for tensors, integers and the rest."""
    if isinstance(value, Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    if isinstance(value, float):
        return "float"
    wide = "int64" if value >= 2**31 else "int32"
    if not specialized:
        return wide
    return 1 if value == 1 else (wide, value % 16 == 0)


def form_of(kernel: Any, args: tuple[object, ...], options: dict[str, Any]) -> Form:
    """A kernel's name, and what of a launch would be compiled in."""
    parameters = inspect.signature(kernel.fn).parameters
    launch = {k: options.pop(k) for k in ("num_warps", "num_stages") if k in options}
    bound = inspect.signature(kernel.fn).bind(*args, **options).arguments
    plain = kernel.kwargs["do_not_specialize"] or ()
    kinds = {
        name: value
        if "constexpr" in str(parameters[name].annotation)
        else _kind(value, specialized=name not in plain)
        for name, value in bound.items()
    }
    return kernel.fn.__name__, *((k, str(v)) for k, v in (kinds | launch).items())


@contextmanager
def recorded_forms() -> Iterator[set[Form]]:
    """The forms that are launched meanwhile; nothing is computed, results are what memory held."""
    forms: set[Form] = set()

    def record(self: Any, *args: object, grid: object, warmup: bool, **options: Any) -> None:
        forms.add(form_of(self, args, options))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpretedFunction, "run", record)
        yield forms
