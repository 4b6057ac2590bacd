"""Marks of single parameters. Folders have theirs in conftest.py, files in `pytestmark`."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest

ON_STOCK = (pytest.mark.slow, pytest.mark.interpreted)
"""What uses PyTorch's server: it imports PyTorch in a process of its own, and runs little that is compiled."""

STOCK_SERVERS = [pytest.param(server, marks=ON_STOCK) for server in ("libuv", "legacy")]


def exhaustive(*values: object) -> Any:
    """Leave these values of parameters to `make test-exhaustive`."""
    return pytest.param(*values, marks=pytest.mark.exhaustive)


def thinned(cases: Iterable[tuple[object, ...]], kept: Collection[tuple[object, ...]]) -> list[Any]:
    """Leave all cases but those kept to `make test-exhaustive`."""
    return [case if case in kept else exhaustive(*case) for case in cases]
