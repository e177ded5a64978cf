"""The native CPU library at every instruction set level this machine has."""

from __future__ import annotations

import ctypes
from functools import cache

from qtool.runtime.kernels.cpu.build import (
    LEVELS as ALL_LEVELS,
)
from qtool.runtime.kernels.cpu.build import (
    Native,
    build,
    cpu_features,
    recipe,
)

LEVELS = [name for name, needs in ALL_LEVELS.items() if cpu_features().issuperset(needs)]


@cache
def native_at(level: str) -> Native:
    """The library of one level on two threads; kept in the user's cache between sessions."""
    path = build(recipe(level))
    library = ctypes.CDLL(str(path))
    library.qt_pool_start(2)
    return Native(library, level, path=path)


def library_at(level: str) -> ctypes.CDLL:
    """The functions of :func:`native_at`."""
    library = native_at(level).library
    assert library is not None
    return library
