"""What tests of native attention share."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest

from support.native import LEVELS, library_at


@pytest.fixture(params=LEVELS)
def library(request: pytest.FixtureRequest) -> Iterator[ctypes.CDLL]:
    """The native library at one instruction set, on two threads."""
    library = library_at(request.param)
    library.qt_pool_start(2)
    yield library
    library.qt_pool_stop()
